"""Random numbers that do not depend on the layout.

Two kinds, neither with a state that could be lost:

* Initial weights: a block of rows is drawn from a generator keyed by (seed, parameter name, block number). A rank draws
  the blocks it owns rows of and nothing else, and every layout starts from the same bits.
* Dropout: each element's decision is a hash of (seed, layer, site, global token, channel), see
  :mod:`smp.kernels.dropout`. The same in every layout, under recompute and after a resume. The keys are made here.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from smp.kernels.transfer import to_device
from smp.parallel.region import Region

_BLOCK_ELEMENTS = 1 << 18
_MASK = 0xFFFFFFFF


def stable_hash(*parts: object) -> int:
    """63-bit hash of the parts' text: the same on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(str(p) for p in parts).encode(), digest_size=8).digest()
    # Not Python's hash(), which is salted: every process would draw other weights. 63 bits fit into an int64.
    return int.from_bytes(digest, "little") >> 1


def keyed_normal(seed: int, name: str, shape: torch.Size | tuple[int, ...], region: Region, std: float) -> torch.Tensor:
    """The ``region`` of an fp32 CPU tensor of ``shape`` with independent N(0, std^2) elements keyed by (seed, name).

    Rows (dim 0) are drawn in blocks of a fixed size, each from its beginning to the last row in the region; columns
    outside the region are drawn and dropped.
    """
    columns = max(1, torch.Size(shape[1:]).numel())
    # Part of the definition of the weights: another size would draw other numbers.
    block = max(1, _BLOCK_ELEMENTS // columns)
    first, last = region.offsets[0], region.offsets[0] + region.sizes[0]
    out = torch.empty(region.sizes)
    for index in range(first // block, -(-last // block) if last > first else 0):
        start, stop = index * block, min((index + 1) * block, shape[0])
        # The numbers depend on the block alone, not on which of its rows are wanted: those before them are drawn too.
        low, high = max(start, first), min(stop, last)
        drawn = _normal_block(seed, name, index, (high - start) * columns).mul_(std).view(high - start, *shape[1:])
        rows = drawn[low - start : high - start]
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, region.offsets[dim], region.sizes[dim])
        out[low - first : high - first] = rows
    return out


def _normal_block(seed: int, name: str, index: int, elements: int) -> torch.Tensor:
    """The first N(0, 1) numbers of one block: drawn in sequence, so a shorter draw is a prefix of a longer one. numpy's
    Philox takes the whole 128-bit key; torch's CPU generator uses 32 bits of a seed, so that a model of 2^36 elements
    would have blocks that are equal."""
    digest = hashlib.blake2b(f"{seed}\x1f{name}\x1f{index}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal(elements, dtype=np.float32))


def dropout_keys(seed: int, num_sites: int, device: torch.device) -> torch.Tensor:
    """One 32-bit key per dropout site of the model, int64 (num_sites,)."""
    # 32 bits: the hash of masks works on them, see smp.kernels.dropout.
    keys = torch.tensor([stable_hash(seed, "dropout", i) & _MASK for i in range(num_sites)])
    return to_device(keys, device)


def dropout_key(seed: int, site: str) -> int:
    """The 32-bit key of one dropout site that has a name."""
    return stable_hash(seed, "dropout", site) & _MASK
