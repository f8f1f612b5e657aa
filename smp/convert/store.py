"""Tensors that lie in files as one or several row-major pieces, and boxes read from them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.entries import DTYPES
from smp.checkpoint.folder import Source
from smp.checkpoint.local import LocalFolder
from smp.checkpoint.tensor_file import Slot, raw_bytes
from smp.convert.weights import Stored

_ABSENT = (FileNotFoundError, NotADirectoryError)
_SHORT_RUN = 1024  # bytes: shorter stretches of a row are read with what is between them
_BLOCK = 1 << 22


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What to raise ``from error`` when the system did not give a file's content: that is no damage."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}")


class OpenFiles:
    """Files of a folder, opened once each and read from any thread. Links are followed: the cache of
    ``huggingface_hub`` is made of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._open = folder, ExitStack()
        self.sources: dict[str, Source] = {}

    def open(self, name: str) -> Source:
        """A file of the folder.

        Raises:
            CheckpointError: it is not there, no plain file, or cannot be read.
        """
        if name not in self.sources:
            path = self.folder / name
            try:
                real = path.resolve(strict=True)
                self.sources[name] = self._open.enter_context(LocalFolder(real.parent).reader(real.name))
            except _ABSENT as error:
                raise CheckpointError(f"{path} is missing or not a file") from error
            except OSError as error:
                raise unreadable(path, error) from error
        return self.sources[name]

    def fingerprint(self) -> Any:
        """Sizes and times of the files."""
        return [[name, (s := (self.folder / name).stat()).st_size, s.st_mtime_ns] for name in sorted(self.sources)]

    def close(self) -> None:
        """Close them all."""
        self._open.close()


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, at ``offsets`` of the whole: ``slot`` of ``file``."""

    file: str
    slot: Slot
    offsets: tuple[int, ...]


def single(file: str, slot: Slot) -> list[Piece]:
    """A tensor that lies in one piece."""
    return [Piece(file, slot, (0,) * len(slot.shape))]


class PieceStore:
    """A ``Store`` of tensors in pieces.

    Args:
        files: what they lie in.
        pieces: by name of the tensor; they cover it.
        shapes: of tensors in several pieces.

    Attributes:
        notes: what of the files is left out, a line each.

    Raises:
        CheckpointError: the pieces of a tensor do not cover it, or have different dtypes.
    """

    def __init__(
        self, files: OpenFiles, pieces: Mapping[str, Sequence[Piece]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.files, self.pieces = files, dict(pieces)
        self.notes: list[str] = []
        self.tensors: dict[str, Stored] = {}
        for name, parts in self.pieces.items():
            shape = shapes.get(name, parts[0].slot.shape)
            if len({part.slot.dtype for part in parts}) != 1:
                raise CheckpointError(f"{self.where(name)}: the parts of tensor {name} have different dtypes")
            _check_cover(self.where(name), name, shape, parts)
            self.tensors[name] = Stored(shape, DTYPES[parts[0].slot.dtype])

    def where(self, name: str) -> str:
        """The file of a tensor (its first); of one that is nowhere, the folder."""
        return str(self.files.folder / self.pieces[name][0].file) if name in self.pieces else str(self.files.folder)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out`` with the box at ``offsets``."""
        for piece in self.pieces[name]:
            low = [max(o, p) for o, p in zip(offsets, piece.offsets, strict=True)]
            ends = zip(offsets, out.shape, piece.offsets, piece.slot.shape, strict=True)
            high = [min(o + n, p + m) for o, n, p, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            target = out
            for dim, (a, b, o) in enumerate(zip(low, high, offsets, strict=True)):
                target = target.narrow(dim, a - o, b - a)
            inside = [a - p for a, p in zip(low, piece.offsets, strict=True)]
            try:
                read_box(self.files.open(piece.file), piece.slot, inside, target)
            except EOFError as error:
                raise DamagedError(f"{self.files.folder / piece.file} is cut off: tensor {name} ({error})") from None
            except OSError as error:
                raise unreadable(self.files.folder / piece.file, error) from error

    def fingerprint(self) -> Any:
        """Sizes and times of the files."""
        return self.files.fingerprint()

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def _check_cover(where: str, name: str, shape: tuple[int, ...], parts: Sequence[Piece]) -> None:
    inside = all(
        len(p.offsets) == len(p.slot.shape) == len(shape)
        and all(o >= 0 and o + n <= whole for o, n, whole in zip(p.offsets, p.slot.shape, shape, strict=True))
        for p in parts
    )
    count = sum(math.prod(p.slot.shape) for p in parts)
    if not inside or count != math.prod(shape) or _overlap(parts):
        raise CheckpointError(
            f"{where}: the {len(parts)} parts of tensor {name} do not make up its shape {list(shape)}"
        )


def _overlap(parts: Sequence[Piece]) -> bool:
    """Whether two pieces share an element."""
    ordered = sorted((p for p in parts if 0 not in p.slot.shape), key=lambda p: p.offsets)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.slot.shape[0]:
                break
            boxes = zip(one.offsets, one.slot.shape, other.offsets, other.slot.shape, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in boxes):
                return True
    return False


_buffers = threading.local()


def _buffer(size: int) -> torch.Tensor:
    """Scratch memory of this thread: fresh memory costs as much as the read."""
    held: torch.Tensor | None = getattr(_buffers, "held", None)
    if held is None or held.numel() < size:
        held = _buffers.held = torch.empty(max(size, _BLOCK), dtype=torch.uint8)
    return held[:size]


def read_box(source: Source, slot: Slot, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Fill ``out`` with a box of a row-major tensor: in one piece where it lies so, else row by row."""
    shape, sizes = slot.shape, tuple(out.shape)
    if 0 in sizes:
        return
    if not out.is_contiguous() and out.nbytes > _BLOCK and sizes[0] > 1:  # what goes by way of a buffer, in small parts
        half = sizes[0] // 2
        read_box(source, slot, offsets, out[:half])
        read_box(source, slot, (offsets[0] + half, *offsets[1:]), out[half:])
        return
    lead = 0  # the first dimension after which the box has everything
    while lead < len(shape) and math.prod(sizes[lead + 1 :]) != math.prod(shape[lead + 1 :]):
        lead += 1
    if all(size == 1 for size in sizes[:lead]):
        _read_run(source, slot, offsets, out)
    elif len(shape) == 2:
        _read_columns(source, slot, offsets, out)
    else:
        size = slot.size // shape[0]
        for i in range(sizes[0]):
            inner = replace(slot, shape=shape[1:], start=slot.start + (offsets[0] + i) * size, size=size)
            read_box(source, inner, offsets[1:], out[i])


def _start(slot: Slot, offsets: Sequence[int]) -> int:
    """Byte of an element in the file."""
    element = 0
    for offset, size in zip(offsets, slot.shape, strict=True):
        element = element * size + offset
    return slot.start + element * DTYPES[slot.dtype].itemsize


def _read_run(source: Source, slot: Slot, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Elements that lie one after the other in the file."""
    start = _start(slot, offsets)
    if out.is_contiguous():
        source.read_into(start, raw_bytes(out))
        return
    buffer = _buffer(out.nbytes)
    source.read_into(start, raw_bytes(buffer))
    out.copy_(buffer.view(out.dtype).view(out.shape))


def _read_columns(source: Source, slot: Slot, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Some columns of some rows."""
    rows, columns = out.shape
    width, item = slot.shape[1], out.itemsize
    if columns * item >= _SHORT_RUN:
        for i in range(rows):
            _read_run(source, slot, (offsets[0] + i, offsets[1]), out[i : i + 1])
        return
    step = max(1, _BLOCK // (width * item))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        buffer = _buffer(count * width * item)
        source.read_into(_start(slot, (offsets[0] + first, 0)), raw_bytes(buffer))
        block = buffer.view(out.dtype).view(count, width)
        out[first : first + count] = block[:, offsets[1] : offsets[1] + columns]
