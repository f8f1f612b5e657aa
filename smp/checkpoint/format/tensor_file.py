"""Safetensors files, written and read in pieces that are hashed while they are in the cache.

The safetensors package knows only paths of a file system, and neither hashes nor reads into memory that is there. The
format itself is small: 8 bytes with the length of a header, the header in JSON, and the tensors without holes.
To this file tensors are bytes: the process that writes in the background starts without torch.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.folders.local import PIECE, Source
from smp.checkpoint.format.entries import ELEMENT_SIZES, CheckpointError, DamagedError
from smp.checkpoint.format.manifest import parse_unique
from smp.checkpoint.format.validate_manifest import require

METADATA = "__metadata__"  # texts about the file under this key of a header; no tensor may be called so
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors package
ALIGNMENT = 64  # of the first tensor in the file: a cache line
LARGEST_SHARD = 1 << 26
"""Bytes of a shard at most. A checksum covers a shard, so reading a part of one reads all of it."""


@dataclass(frozen=True)
class Slot:
    """Place of a tensor: ``size`` bytes, ``start`` bytes after the header (in a layout) or in the file (read)."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class FileLayout:
    """A file to write: its header, and the place of each tensor after it."""

    header: bytes
    slots: tuple[Slot, ...]

    @property
    def data_size(self) -> int:
        return self.slots[-1].start + self.slots[-1].size if self.slots else 0


def rows_of_a_shard(row_size: int) -> int:
    """Number of rows of ``row_size`` bytes in a shard."""
    return max(1, LARGEST_SHARD // max(row_size, 1))


def shard_keys(pieces: Sequence[tuple[str, int, int]]) -> list[str]:
    """A key for each (tensor, first row, rows) of one file: the tensor's name, followed by the rows if it has several
    shards.

    Raises:
        CheckpointError: a tensor's name is like such a key.
    """
    # A tensor with several shards in a file needs several keys; one with a single shard keeps its own name, so
    # that other programs find it.
    times = Counter(name for name, _, _ in pieces)
    keys = [name if times[name] == 1 else f"{name}[{first}:{first + rows}]" for name, first, rows in pieces]
    if len(set(keys)) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise CheckpointError(f"{twice} would be two tensors in one file: rename the one that is called so")
    return keys


def write_file(
    folder: Folder, name: str, layout: FileLayout, tensors: Iterable[tuple[str, memoryview]]
) -> dict[str, str]:
    """Write a new file, durably; returns xxh3_64 by key.

    ``tensors`` are key and bytes of every slot of the layout, in its order; a slot's may come in several pieces.
    """
    hashes = {slot.key: xxhash.xxh3_64() for slot in layout.slots}
    offset = len(layout.header)
    with folder.writer(name, len(layout.header) + layout.data_size) as sink:
        sink.write(memoryview(layout.header))
        for key, data in tensors:
            while data:
                # up to a multiple of PIECE in the file: the page cache has large pages for what is aligned to them
                piece = data[: PIECE - offset % PIECE]
                hashes[key].update(piece)
                sink.write(piece)
                offset, data = offset + len(piece), data[len(piece) :]
        # room for all was made before: what nobody wrote would be zeros
        assert offset == len(layout.header) + layout.data_size, f"{name}: {offset} bytes are not what was laid out"
    return {key: hashed.hexdigest() for key, hashed in hashes.items()}


def read_header(source: Source) -> dict[str, Slot]:
    """The tensors of a file by key, each checked to lie inside of it.

    Raises:
        DamagedError: not a header of safetensors; the message does not name the file.
    """
    try:
        prefix = bytearray(8)
        source.read_into(0, memoryview(prefix))
        # Little-endian, as the format has it.
        (length,) = struct.unpack("<Q", prefix)
        # Before memory for it is asked for: the first 8 bytes of a file that is none may be any number.
        require(length <= min(_LONGEST_HEADER, source.size - 8), f"a header of {length} bytes cannot be")
        text = bytearray(length)
        source.read_into(8, memoryview(text))
        content = parse_unique(bytes(text))
        slots = {key: _slot(key, entry, 8 + length, source.size) for key, entry in content.items() if key != METADATA}
        _refuse_overlaps(slots.values())
        return slots
    except DamagedError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, EOFError, OverflowError) as error:
        raise DamagedError(f"not a safetensors header ({type(error).__name__}: {error})"[:500]) from error


def _slot(key: str, entry: dict[str, Any], data_start: int, file_size: int) -> Slot:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    numbers = (*shape, begin, end)
    # ``type(...) is``: JSON's true is an int in Python.
    require(all(type(n) is int and n >= 0 for n in numbers), f"tensor {key!r} has impossible numbers")
    require(begin <= end <= file_size - data_start, f"tensor {key!r} lies outside of the file")
    known = dtype in ELEMENT_SIZES and math.prod(shape) * ELEMENT_SIZES[dtype] == end - begin
    require(known, f"tensor {key!r} of {dtype!r} {shape} cannot have {end - begin} bytes")
    return Slot(key, dtype, shape, data_start + begin, end - begin)


def _refuse_overlaps(slots: Iterable[Slot]) -> None:
    end = 0
    # Tensors without elements have no bytes to overlap.
    for slot in sorted((slot for slot in slots if slot.size), key=lambda slot: slot.start):
        require(slot.start >= end, f"tensor {slot.key!r} overlaps another one")
        end = slot.start + slot.size
