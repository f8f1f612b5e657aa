"""Checks of a manifest. File sizes bound everything in it, so that a forged one cannot make a reader allocate much."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp.checkpoint.format.entries import ELEMENT_SIZES, DamagedError, Manifest, Shard, TensorEntry
from smp.parallel.region import Region

# No dot first and no slash: neither hidden files nor other folders.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_LARGEST = 2**63 - 1
_MOST_CELLS = 2**24  # of the grid in which shards are counted; a million processes need less


def check_manifest(manifest: Manifest, folder: Path | None) -> None:
    """Raise DamagedError for file names that leave ``folder`` (None on storage without links), tensors that are not
    covered exactly once and shards larger than their file."""
    for file, size in manifest.files.items():
        require(FILE_NAME.fullmatch(file) is not None, f"file name {file!r} is not a plain .safetensors name")
        # With links followed: the name may be that of a link.
        inside = folder is None or (folder / file).resolve().parent == folder.resolve()
        require(inside, f"file {file!r} leads out of the checkpoint folder")
        require(_is_count(size), f"size {size!r} of file {file!r}")
    held: Counter[str] = Counter()
    keys: set[tuple[str, str]] = set()
    for name, entry in manifest.tensors.items():
        _check_tensor(name, entry, manifest)
        for shard in entry.shards:
            held[shard.file] += shard_bytes(shard, entry.dtype)
            require((shard.file, shard.key) not in keys, f"two shards are tensor {shard.key!r} of {shard.file!r}")
            keys.add((shard.file, shard.key))
    # The same bytes cannot be two tensors, so what a file holds is at most its size.
    for file, size in held.items():
        require(size <= manifest.files[file], f"file {file!r} of {manifest.files[file]} bytes cannot hold {size}")


def _check_tensor(name: str, entry: TensorEntry, manifest: Manifest) -> None:
    require(entry.dtype in ELEMENT_SIZES, f"tensor {name!r} has an unknown dtype {entry.dtype!r}")
    require(all(_is_count(n) for n in entry.shape), f"tensor {name!r} has an impossible shape {entry.shape}")
    require(math.prod(entry.shape) <= _LARGEST, f"tensor {name!r} has an impossible shape {entry.shape}")
    for shard in entry.shards:
        require(shard.file in manifest.files, f"tensor {name!r} is in file {shard.file!r}, which is not listed")
        require(isinstance(shard.key, str) and shard.key != "", f"tensor {name!r} has a shard without a key")
        require(isinstance(shard.xxh3_64, str), f"tensor {name!r} has a shard without a checksum")
        require(inside(shard, entry.shape), f"tensor {name!r} of shape {entry.shape} has an impossible {shard}")
    require(covered_once(entry.shape, entry.shards), f"the shards of tensor {name!r} do not cover it exactly once")


def shard_bytes(shard: Shard, dtype: str) -> int:
    """Size of a shard's data in its file."""
    return math.prod(shard.sizes) * ELEMENT_SIZES[dtype]


def require(condition: bool, message: str) -> None:
    """Raise DamagedError unless ``condition`` holds. The message is cut: what it quotes may be anything."""
    if not condition:
        raise DamagedError(message[:500])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def inside(region: Shard | Region, shape: Sequence[int]) -> bool:
    """Whether a region, whose numbers may be anything, lies in a tensor of this shape."""
    numbers = (*region.offsets, *region.sizes)
    if not len(region.offsets) == len(region.sizes) == len(shape) or not all(_is_count(n) for n in numbers):
        return False
    return all(o + s <= n for o, s, n in zip(region.offsets, region.sizes, shape, strict=True))


def covered_once(shape: Sequence[int], regions: Sequence[Shard | Region]) -> bool:
    """Whether regions inside of a tensor tile it. Their edges cut it into a coarse grid, in which each cell must be hit
    once.

    Raises:
        DamagedError: the grid is too fine.
    """
    if math.prod(shape) == 0:
        return True
    # With equal volumes and no cell hit twice every cell is hit. It also refuses most lies before there is a grid.
    if sum(math.prod(region.sizes) for region in regions) != math.prod(shape):
        return False
    # Only the places where some shard begins or ends: the grid is as fine as the layout, not as the tensor.
    edges = [
        sorted({0, n} | {b.offsets[d] for b in regions} | {b.offsets[d] + b.sizes[d] for b in regions})
        for d, n in enumerate(shape)
    ]
    require(math.prod(len(along) - 1 for along in edges) <= _MOST_CELLS, "a tensor is cut into too many pieces")
    cell = [{edge: i for i, edge in enumerate(along)} for along in edges]
    hit = np.zeros([len(along) - 1 for along in edges], dtype=np.bool_)
    for region in regions:
        cells = tuple(slice(c[o], c[o + n]) for c, o, n in zip(cell, region.offsets, region.sizes, strict=True))
        if hit[cells].any():
            return False
        hit[cells] = True
    return bool(hit.all())
