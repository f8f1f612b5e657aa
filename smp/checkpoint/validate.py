"""What a manifest may say. Everything is bounded by the sizes of the files, so that no lie costs memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp.checkpoint.entries import DTYPES, DamagedError, Manifest, Shard, TensorEntry

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_LARGEST = 2**63 - 1
_MOST_CELLS = 2**24  # of the grid in which shards are counted; a million processes need less


def check_manifest(manifest: Manifest, folder: Path | None) -> None:
    """Raise DamagedError for file names that leave ``folder`` (None on storage without links), tensors that are not
    covered exactly once and shards larger than their file."""
    for file, size in manifest.files.items():
        require(FILE_NAME.fullmatch(file) is not None, f"file name {file!r} is not a plain .safetensors name")
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
    for file, size in held.items():
        require(size <= manifest.files[file], f"file {file!r} of {manifest.files[file]} bytes cannot hold {size}")


def _check_tensor(name: str, entry: TensorEntry, manifest: Manifest) -> None:
    require(entry.dtype in DTYPES, f"tensor {name!r} has an unknown dtype {entry.dtype!r}")
    require(all(_is_count(n) for n in entry.shape), f"tensor {name!r} has an impossible shape {entry.shape}")
    require(math.prod(entry.shape) <= _LARGEST, f"tensor {name!r} has an impossible shape {entry.shape}")
    for shard in entry.shards:
        require(shard.file in manifest.files, f"tensor {name!r} is in file {shard.file!r}, which is not listed")
        require(isinstance(shard.key, str) and shard.key != "", f"tensor {name!r} has a shard without a key")
        require(isinstance(shard.xxh3_64, str), f"tensor {name!r} has a shard without a checksum")
        require(_inside(shard, entry.shape), f"tensor {name!r} of shape {entry.shape} has an impossible {shard}")
    require(_covered_once(entry), f"the shards of tensor {name!r} do not cover it exactly once")


def shard_bytes(shard: Shard, dtype: str) -> int:
    """Size of a shard's data in its file."""
    return math.prod(shard.sizes) * DTYPES[dtype].itemsize


def require(condition: bool, message: str) -> None:
    """Raise DamagedError unless ``condition`` holds. The message is cut: what it quotes may be anything."""
    if not condition:
        raise DamagedError(message[:500])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _inside(shard: Shard, shape: Sequence[int]) -> bool:
    numbers = (*shard.offsets, *shard.sizes)
    if not len(shard.offsets) == len(shard.sizes) == len(shape) or not all(_is_count(n) for n in numbers):
        return False
    return all(o + s <= n for o, s, n in zip(shard.offsets, shard.sizes, shape, strict=True))


def _covered_once(entry: TensorEntry) -> bool:
    """Whether the shards tile the tensor. All their edges cut it into a coarse grid; every cell must be hit once."""
    if math.prod(entry.shape) == 0:
        return True
    if sum(math.prod(s.sizes) for s in entry.shards) != math.prod(entry.shape):
        return False
    edges = [
        sorted({0, n} | {s.offsets[d] for s in entry.shards} | {s.offsets[d] + s.sizes[d] for s in entry.shards})
        for d, n in enumerate(entry.shape)
    ]
    require(math.prod(len(along) - 1 for along in edges) <= _MOST_CELLS, "a tensor is cut into too many pieces")
    cell = [{edge: i for i, edge in enumerate(along)} for along in edges]
    hit = np.zeros([len(along) - 1 for along in edges], dtype=np.bool_)
    for s in entry.shards:
        box = tuple(slice(c[o], c[o + n]) for c, o, n in zip(cell, s.offsets, s.sizes, strict=True))
        if hit[box].any():
            return False
        hit[box] = True
    return bool(hit.all())
