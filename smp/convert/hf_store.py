"""A Hugging Face folder: which file holds which tensor, and boxes read from there."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError
from smp.checkpoint.entries import DTYPES, DamagedError
from smp.checkpoint.folder import Source
from smp.checkpoint.local import LocalFolder
from smp.checkpoint.tensor_file import Slot, raw_bytes, read_header
from smp.convert.weights import Stored

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_SHORT_RUN = 1024  # bytes: shorter stretches of a row are read with what is between them
_BLOCK = 1 << 22


class SafetensorsStore:
    """The safetensors files of a Hugging Face folder, one or many with an index. Links are followed: the cache of
    ``huggingface_hub`` is made of them.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: files are missing, cut off, or not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, ExitStack()
        self._sources: dict[str, Source] = {}
        self._slots: dict[str, tuple[str, Slot]] = {}
        index = read_index(folder, INDEX) if (folder / INDEX).is_file() else None
        names = sorted(set(index.values())) if index is not None else [SINGLE]
        try:
            for name in names:
                self._open(name)
            if index is not None:
                self._compare(index)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, Stored] = {n: Stored(s.shape, DTYPES[s.dtype]) for n, (_, s) in self._slots.items()}

    def _open(self, name: str) -> None:
        path = self.folder / name
        try:
            real = path.resolve(strict=True)
            source = self._files.enter_context(LocalFolder(real.parent).reader(real.name))
        except OSError:
            raise CheckpointError(f"{path} is missing or not a file") from None
        try:
            slots = read_header(source)
        except DamagedError as error:
            raise DamagedError(f"{path} is damaged or cut off: {error}") from None
        end = 0
        for slot in sorted(slots.values(), key=lambda s: (s.start, s.size)):
            if slot.start < end:
                raise DamagedError(f"{path}: tensor {slot.key} overlaps another")
            end = slot.start + slot.size
            if slot.key in self._slots:
                raise CheckpointError(f"{path}: tensor {slot.key} is also in {self._slots[slot.key][0]}")
            self._slots[slot.key] = name, slot
        self._sources[name] = source

    def _compare(self, index: Mapping[str, str]) -> None:
        for tensor, file in index.items():
            if self._slots.get(tensor, ("", None))[0] != file:
                raise CheckpointError(f"{self.folder / file}: tensor {tensor} is not in it, but {INDEX} says so")
        extra = [name for name in self._slots if name not in index]
        if extra:
            raise CheckpointError(f"{self.folder / self._slots[extra[0]][0]}: tensor {extra[0]} is not in {INDEX}")

    def where(self, name: str) -> str:
        """The file of a tensor; of one that is nowhere, the folder."""
        return str(self.folder / self._slots[name][0]) if name in self._slots else str(self.folder)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out`` with the box at ``offsets``."""
        file, slot = self._slots[name]
        try:
            read_box(self._sources[file], slot, offsets, out)
        except (EOFError, OSError) as error:
            raise DamagedError(f"{self.folder / file}: tensor {name} cannot be read ({error})") from None

    def fingerprint(self) -> Any:
        """Sizes and times of the files."""
        return [[name, (s := (self.folder / name).stat()).st_size, s.st_mtime_ns] for name in sorted(self._sources)]

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def read_index(folder: Path, name: str) -> dict[str, str]:
    """Tensor -> file of an index, each checked to be a plain name.

    Raises:
        CheckpointError: it cannot be read, or an entry leads out of the folder.
    """
    path = folder / name
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        items = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index ({type(error).__name__}: {error})"[:500]) from None
    for tensor, file in items.items():
        if not _PLAIN.fullmatch(file):
            raise CheckpointError(
                f"{path}: tensor {tensor} is said to be in {file!r}, which is not a file of this folder"
            )
    return items


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
    lead = 0  # dimensions in front, in which the box is one index after the other
    while lead < len(shape) and math.prod(sizes[lead + 1 :]) != math.prod(shape[lead + 1 :]):
        lead += 1
    if lead == 0 or all(size == 1 for size in sizes[:lead]):
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
        line = out if out.is_contiguous() else None
        for i in range(rows):
            start = _start(slot, (offsets[0] + i, offsets[1]))
            if line is not None:
                source.read_into(start, raw_bytes(line[i]))
            else:
                buffer = _buffer(columns * item)
                source.read_into(start, raw_bytes(buffer))
                out[i] = buffer.view(out.dtype)
        return
    step = max(1, _BLOCK // (width * item))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        buffer = _buffer(count * width * item)
        source.read_into(_start(slot, (offsets[0] + first, 0)), raw_bytes(buffer))
        block = buffer.view(out.dtype).view(count, width)
        out[first : first + count] = block[:, offsets[1] : offsets[1] + columns]
