"""The manifest: what a checkpoint folder holds, and the file whose appearance commits it.

The format is written down in ``docs/checkpoint-format.md``. Here is only JSON and paths; no tensor is touched.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

MANIFEST = "manifest.json"
FORMAT, VERSION = "smp-checkpoint", 1
_UNSIGNED = '{"checksum": "0000000000000000"'
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes, the same in the manifest as in safetensors headers."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read. The message is one line and names the file or the tensors."""


@dataclass(frozen=True)
class Shard:
    """One box of a tensor: tensor ``key`` of ``file``, at ``offsets`` of the whole, ``sizes`` large."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    xxh3_64: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its whole shape, its dtype's name in ``DTYPES``, and the shards that cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint: tensors by name, size in bytes of every data file, and the free ``extra`` dictionary."""

    tensors: dict[str, TensorEntry]
    files: dict[str, int]
    extra: dict[str, Any]


def read_manifest(folder: Path | str) -> Manifest:
    """The checked manifest of a checkpoint folder.

    Raises:
        CheckpointError: when the folder or its manifest does not exist, does not match its own checksum, or says
            something impossible (a file outside the folder, shards that do not cover their tensor exactly once, ...).
    """
    path = Path(folder) / MANIFEST
    if not path.parent.is_dir():
        raise CheckpointError(f"no checkpoint folder {path.parent}")
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no {MANIFEST}: it is not a checkpoint, or one whose save did not finish"
        )
    data = path.read_bytes()
    try:
        content = json.loads(data)
        _require(isinstance(content, dict) and content.get("format") == FORMAT, f"format is not {FORMAT!r}")
        _require(
            content.get("version") == VERSION, f"version {content.get('version')!r} is not the known one, {VERSION}"
        )
        _require(_signed(_unsigned(data)) == data, "content does not match its checksum: it was damaged or edited")
        manifest = _parse(content)
        check_manifest(manifest, path.parent)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable manifest ({type(error).__name__}: {error})") from error
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit: after this returns, the checkpoint is complete and on disk. The data files must be on disk before."""
    check_manifest(manifest, folder)
    body = {"checksum": "0" * 16, "format": FORMAT, "version": VERSION, **asdict(manifest)}
    data = json.dumps(body, allow_nan=False).encode()
    write_durably(folder / MANIFEST, _signed(data))


def check_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` as it will come back from the file.

    Raises:
        TypeError: for anything that JSON would change or cannot hold (tuples, non-string keys, NaN, objects).
    """
    try:
        copy = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra is not plain JSON: {error}") from None
    if copy != extra:
        raise TypeError("extra would change in JSON: use only dict with str keys, list, str, int, float, bool and None")
    assert isinstance(copy, dict)
    return copy


def check_manifest(manifest: Manifest, folder: Path) -> None:
    """Raise :class:`CheckpointError` for file names that leave ``folder`` and tensors not covered exactly once."""
    for file, size in manifest.files.items():
        _require(_FILE_NAME.fullmatch(file) is not None, f"file name {file!r} is not a plain .safetensors name")
        inside = (folder / file).resolve().parent == folder.resolve()
        _require(inside, f"file {file!r} leads out of the checkpoint folder")
        _require(_is_count(size), f"size {size!r} of file {file!r}")
    for name, entry in manifest.tensors.items():
        _require(entry.dtype in DTYPES, f"tensor {name!r} has an unknown dtype {entry.dtype!r}")
        _require(all(_is_count(n) for n in entry.shape), f"tensor {name!r} has an impossible shape {entry.shape}")
        for shard in entry.shards:
            _require(shard.file in manifest.files, f"tensor {name!r} is in file {shard.file!r}, which is not listed")
            _require(isinstance(shard.key, str) and shard.key != "", f"tensor {name!r} has a shard without a key")
            _require(_inside(shard, entry.shape), f"tensor {name!r} of shape {entry.shape} has an impossible {shard}")
        _require(_covered_once(entry), f"the shards of tensor {name!r} do not cover it exactly once")


def write_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` so that a crash leaves the old content or the new, on disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """fsync of a file or folder written before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)


def _unsigned(data: bytes) -> bytes:
    """The file's bytes with the digits of its checksum set to zero."""
    return _UNSIGNED.encode() + data[len(_UNSIGNED) :]


def _signed(data: bytes) -> bytes:
    """The file's bytes with the checksum of ``data``, whose own digits are zero, filled in."""
    return data.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(data).encode(), 1)


def _parse(content: dict[str, Any]) -> Manifest:
    tensors = {name: _parse_tensor(entry) for name, entry in content["tensors"].items()}
    _require(isinstance(content["extra"], dict), "extra is not a dictionary")
    return Manifest(tensors, dict(content["files"]), content["extra"])


def _parse_tensor(entry: dict[str, Any]) -> TensorEntry:
    shards = [Shard(**{**s, "offsets": tuple(s["offsets"]), "sizes": tuple(s["sizes"])}) for s in entry["shards"]]
    return TensorEntry(tuple(entry["shape"]), entry["dtype"], tuple(shards))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _inside(shard: Shard, shape: Sequence[int]) -> bool:
    numbers = (*shard.offsets, *shard.sizes)
    if not len(shard.offsets) == len(shard.sizes) == len(shape) or not all(_is_count(n) for n in numbers):
        return False
    return all(o + s <= n for o, s, n in zip(shard.offsets, shard.sizes, shape, strict=True))


def _covered_once(entry: TensorEntry) -> bool:
    """Whether the shards tile the tensor. All their edges cut it into a coarse grid; every cell must be hit once."""
    if math.prod(entry.shape) == 0:
        return True
    edges = [
        sorted({0, n} | {s.offsets[d] for s in entry.shards} | {s.offsets[d] + s.sizes[d] for s in entry.shards})
        for d, n in enumerate(entry.shape)
    ]
    cell = [{edge: i for i, edge in enumerate(along)} for along in edges]
    hits = np.zeros([len(along) - 1 for along in edges], dtype=np.int64)
    for s in entry.shards:
        box = tuple(slice(c[o], c[o + n]) for c, o, n in zip(cell, s.offsets, s.sizes, strict=True))
        hits[box] += 1
    return bool((hits == 1).all())
