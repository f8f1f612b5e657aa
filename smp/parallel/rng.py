"""Random numbers that do not depend on the layout.

Two kinds, neither with a state that could be lost:

* Initial weights: a block of rows is drawn from a generator keyed by (seed, parameter name, block number). A rank draws
  the blocks it owns rows of and nothing else, and every layout starts from the same bits.
* Dropout: each element's decision is a hash of (seed, layer, site, global token, channel). The same in every layout,
  under recompute and after a resume.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from smp.parallel.boxes import Box

_BLOCK_ELEMENTS = 1 << 18
_MASK = 0xFFFFFFFF


def stable_hash(*parts: object) -> int:
    """63-bit hash of the parts' text: the same on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(str(p) for p in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_normal(seed: int, name: str, shape: torch.Size | tuple[int, ...], box: Box, std: float) -> torch.Tensor:
    """The ``box`` of an fp32 CPU tensor of ``shape`` with independent N(0, std^2) elements keyed by (seed, name).

    Rows (dim 0) are drawn in blocks of a fixed size, whole; columns outside the box are drawn and dropped.
    """
    columns = max(1, torch.Size(shape[1:]).numel())
    block = max(1, _BLOCK_ELEMENTS // columns)
    first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
    out = torch.empty(box.sizes)
    for index in range(first // block, -(-last // block) if last > first else 0):
        start, stop = index * block, min((index + 1) * block, shape[0])
        drawn = _normal_block(seed, name, index, block * columns).mul_(std).view(block, *shape[1:])
        low, high = max(start, first), min(stop, last)
        rows = drawn[low - start : high - start]
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, box.offsets[dim], box.sizes[dim])
        out[low - first : high - first] = rows
    return out


def _normal_block(seed: int, name: str, index: int, elements: int) -> torch.Tensor:
    """N(0, 1) numbers of one block. numpy's Philox takes the whole 128-bit key; torch's CPU generator uses 32 bits of a
    seed, so that a model of 2^36 elements would have blocks that are equal."""
    digest = hashlib.blake2b(f"{seed}\x1f{name}\x1f{index}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal(elements, dtype=np.float32))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """32-bit finalizer on int64 tensors that hold values below 2^32.

    Two multiply-xorshift rounds with constants from the hash-prospector search. Both are below 2^31, so no product
    overflows 63 bits and the arithmetic is the same on every device and compiler.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def dropout_keys(seed: int, num_sites: int, device: torch.device) -> torch.Tensor:
    """One 32-bit key per dropout site of the model, int64 (num_sites,)."""
    keys = torch.tensor([stable_hash(seed, "dropout", i) & _MASK for i in range(num_sites)])
    return to_device(keys, device)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``, in the order of the device's work: from pinned memory, so that the host does not wait."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def dropout_key(seed: int, site: str) -> int:
    """The 32-bit key of one dropout site that has a name."""
    return stable_hash(seed, "dropout", site) & _MASK


def keyed_keep_mask(
    key: torch.Tensor, tokens: torch.Tensor, channels: int, p: float, first_channel: int = 0
) -> torch.Tensor:
    """Boolean (len(tokens), channels): True with probability 1 - p, a function of (key, token, channel) alone.

    Args:
        key: 0-dim int64, this site's key.
        tokens: int64 (n,), global token numbers.
        channels: number of columns; column c is channel first_channel + c of every layout.
        p: probability of False, in [0, 1).
        first_channel: of the columns that this rank holds.
    """
    rows = _mix((tokens & _MASK) ^ key)
    rows = _mix(rows ^ ((tokens >> 32) & _MASK) ^ 0x5BF03635)
    columns = _mix(torch.arange(first_channel, first_channel + channels, device=tokens.device) + 0x9E3779B9)
    bits = _mix(rows[:, None] ^ columns[None, :])  # (n, channels)
    return bits >= int(p * 2**32)


def keyed_dropout(
    x: torch.Tensor, key: torch.Tensor, tokens: torch.Tensor, p: float, *, first_channel: int = 0
) -> torch.Tensor:
    """Dropout of ``x`` (n, channels) whose mask is keyed by (key, global token, channel); p == 0 returns ``x``."""
    if p == 0.0:
        return x
    keep = keyed_keep_mask(key, tokens, x.shape[-1], p, first_channel)
    return torch.where(keep, x / (1.0 - p), 0.0)
