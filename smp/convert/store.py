"""Tensors in files as one or several row-major pieces, and reading of regions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.folders.local import LocalFolder, Source
from smp.checkpoint.format.tensor_bytes import DTYPES, raw_bytes
from smp.checkpoint.format.tensor_file import Slot
from smp.checkpoint.format.validate_manifest import covered_once, inside
from smp.parallel.region import Region

_SHORT_RUN = 1024  # bytes: shorter parts of rows are read together with what is between them
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error to raise ``from error`` when the system could not read a file: that is no damage."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}")


class OpenFiles:
    """Files of a folder, opened once each and read from any thread; closed when nobody holds them any more.

    Links are followed: the cache of ``huggingface_hub`` is made of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._open = folder, ExitStack()
        self.sources: dict[str, Source] = {}

    def open(self, name: str) -> Source:
        """A file of the folder.

        Raises:
            CheckpointError: it does not exist, is no plain file, or cannot be read.
        """
        if name not in self.sources:
            path = self.folder / name
            try:
                # The cache of huggingface_hub is made of links; a reader refuses to follow them itself.
                real = path.resolve(strict=True)
                self.sources[name] = self._open.enter_context(LocalFolder(real.parent).reader(real.name))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise CheckpointError(f"{path} is missing or not a file") from error
            except OSError as error:
                raise unreadable(path, error) from error
        return self.sources[name]

    def fingerprint(self) -> Any:
        """Sizes and modification times of the files."""
        return [[name, (s := (self.folder / name).stat()).st_size, s.st_mtime_ns] for name in sorted(self.sources)]

    def close(self) -> None:
        """Close all files."""
        self._open.close()


@dataclass(frozen=True)
class Piece:
    """A region of a tensor: ``slot`` of ``file``, at ``offsets`` of the whole."""

    file: str
    slot: Slot
    offsets: tuple[int, ...]


class PieceStore:
    """Tensors of another program's files, by their own names.

    Args:
        files: what they lie in.
        pieces: by name of the tensor; they cover it.
        shapes: of tensors in several pieces.

    Attributes:
        tensors: what there is.
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
            # A tensor in one piece has the shape of the piece.
            shape = shapes.get(name, parts[0].slot.shape)
            if len({part.slot.dtype for part in parts}) != 1:
                raise CheckpointError(f"{self.where(name)}: the parts of tensor {name} have different dtypes")
            _check_cover(self.where(name), name, shape, parts)
            self.tensors[name] = Stored(shape, DTYPES[parts[0].slot.dtype])

    def where(self, name: str) -> str:
        """Path of the (first) file of a tensor; of one that is nowhere, the folder."""
        return str(self.files.folder / self.pieces[name][0].file) if name in self.pieces else str(self.files.folder)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out``, a CPU tensor of the stored dtype, with the region of its shape at ``offsets``."""
        for piece in self.pieces[name]:
            # What the wanted region and this piece have in common.
            low = [max(o, p) for o, p in zip(offsets, piece.offsets, strict=True)]
            ends = zip(offsets, out.shape, piece.offsets, piece.slot.shape, strict=True)
            high = [min(o + n, p + m) for o, n, p, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            # A view: a contiguous one is read into directly.
            target = out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
            path = self.files.folder / piece.file
            try:
                inside = [a - p for a, p in zip(low, piece.offsets, strict=True)]
                read_region(self.files.open(piece.file), piece.slot, inside, target)
            except EOFError as error:
                raise DamagedError(f"{path} is cut off: tensor {name} ({error})") from None
            except OSError as error:
                raise unreadable(path, error) from error


def _check_cover(where: str, name: str, shape: tuple[int, ...], parts: Sequence[Piece]) -> None:
    regions = [Region(p.offsets, p.slot.shape) for p in parts]
    if not all(inside(region, shape) for region in regions) or not covered_once(shape, regions):
        raise CheckpointError(
            f"{where}: the {len(parts)} parts of tensor {name} do not make up its shape {list(shape)}"
        )


def read_region(source: Source, slot: Slot, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Fill ``out`` with a region of a row-major tensor: whole rows at once, parts of long rows one by one."""
    if 0 in out.shape:
        return
    # Bytes of a row.
    row = slot.size // slot.shape[0] if slot.shape else slot.size
    start = slot.start + (row * offsets[0] if slot.shape else 0)
    whole = out.shape[1:] == slot.shape[1:]
    if whole and out.is_contiguous():
        source.read_into(start, raw_bytes(out))
    # Columns of a narrow part would be a read of some bytes for each row: whole rows are read, and cut.
    elif whole or (out.ndim == 2 and out[0].nbytes < _SHORT_RUN):
        _read_by_buffer(source, start, slot.shape[1:], offsets[1:], out)
    else:
        # Long rows: each part of one is worth a read of its own.
        for i in range(out.shape[0]):
            inner = replace(slot, shape=slot.shape[1:], start=start + i * row, size=row)
            # One dimension less each time.
            read_region(source, inner, offsets[1:], out[i])


def _read_by_buffer(
    source: Source, start: int, shape: tuple[int, ...], offsets: Sequence[int], out: torch.Tensor
) -> None:
    """Read whole rows of ``shape`` from byte ``start`` on, and keep the part at ``offsets`` of each row."""
    size = math.prod(shape)
    step = min(out.shape[0], max(1, _BLOCK // max(1, size * out.itemsize)))
    buffer = torch.empty(step, *shape, dtype=out.dtype)
    part = tuple(slice(o, o + n) for o, n in zip(offsets, out.shape[1:], strict=True))
    for first in range(0, out.shape[0], step):
        rows = buffer[: min(step, out.shape[0] - first)]
        source.read_into(start + first * size * out.itemsize, raw_bytes(rows))
        out[first : first + step] = rows[:, *part]
