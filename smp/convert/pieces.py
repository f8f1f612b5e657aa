"""Tensors of a file to be written, made from weights under our names: streams of bytes, or whole where it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition

import torch

from smp.checkpoint import CheckpointError
from smp.checkpoint.tensor_file import raw_bytes
from smp.convert.layout import Link
from smp.convert.weights import Stored, Weights, assemble, widest

CHUNK = 1 << 23
"""Bytes of a tensor that are in memory at a time, where that is possible."""


@dataclass(frozen=True)
class Planned:
    """A tensor to write.

    Attributes:
        name: in the file.
        stored: what it will be; without a dimension of layers.
        parts: of our tensors, and where they go.
    """

    name: str
    stored: Stored
    parts: tuple[Link, ...]


def plan(weights: Weights, name: str, parts: Sequence[Link], dtype: torch.dtype | None) -> Planned:
    """One of their tensors to write.

    Args:
        weights: under our names.
        name: in the file.
        parts: of ours, all that lie in it.
        dtype: of it; None: that of the parts.

    Raises:
        CheckpointError: parts of different dtypes.
    """
    different = {weights.tensors[part.ours].dtype for part in parts}
    if dtype is None and len(different) != 1:
        names = ", ".join(part.ours for part in parts)
        raise CheckpointError(f"{names} have different dtypes and cannot lie in one tensor, {name}: give a --dtype")
    return Planned(name, Stored(parts[0].their_shape, dtype or different.pop()), tuple(parts))


def in_files(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Tensors in their order, in files of at most ``limit`` bytes (a larger tensor has a file of its own)."""
    files: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.stored.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(tensor)
        room -= tensor.stored.nbytes
    return files


class Room:
    """Memory that parallel writers share, ``limit`` bytes. One that needs more than all of it gets it alone.

    Blocks are kept for the next writer: memory that is fresh from the system costs as much time as to read a file into.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._changed = limit, 0, Condition()
        self._kept: list[torch.Tensor] = []

    @contextmanager
    def block(self, size: int) -> Iterator[torch.Tensor]:
        """Within, ``size`` bytes are this writer's, uint8 (size,); waits for them. Not to be nested."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            block = self._take(size)
            count = size if block is None else block.numel()
            self._used += count
        if block is None:
            block = torch.empty(size, dtype=torch.uint8)
        try:
            yield block[:size]
        finally:
            with self._changed:
                self._used -= count
                self._kept.append(block)
                self._changed.notify_all()

    def _take(self, size: int) -> torch.Tensor | None:
        """The smallest kept block that is large enough. Others are let go of where they would be too much."""
        fitting = [block for block in self._kept if size <= block.numel() <= max(size, self._limit - self._used)]
        found = min(fitting, key=torch.Tensor.numel, default=None)
        self._kept = [block for block in self._kept if block is not found]
        wanted = self._used + (size if found is None else found.numel())
        while self._kept and wanted + sum(block.numel() for block in self._kept) > self._limit:
            self._kept.pop(0)
        return found


class Feed:
    """What a target gets its tensors from.

    Args:
        weights: under our names.
        room: for tensors that have to be in memory whole.
        told: called with the number of bytes that are done; may raise to end the conversion.
    """

    def __init__(self, weights: Weights, room: Room, told: Callable[[int], None]) -> None:
        self.weights, self._room, self._told = weights, room, told

    def stream(self, planned: Planned) -> Iterator[memoryview]:
        """The bytes of a tensor, in order. Their memory is used again for the next ones."""
        if self._straight(planned):
            yield from self.rows(planned, 0, planned.stored.shape[0])
            return
        with self._assembled(planned) as tensor:
            yield from self._bytes(planned, tensor)

    def rows(self, planned: Planned, first: int, count: int) -> Iterator[memoryview]:
        """The bytes of some rows of a tensor that is one of ours as it is. Their memory is used again."""
        name, rest = planned.parts[0].ours, planned.stored.shape[1:]
        dtype = self.weights.tensors[name].dtype
        row = max(1, torch.Size(rest).numel() * dtype.itemsize)
        parts = list(self.weights.stretches(name, first, count, max(1, CHUNK // row)))
        most = max((rows for _, rows in parts), default=0)
        with self._room.block(most * row) as block:
            buffer = block.view(dtype).view(most, *rest)
            for start, rows in parts:
                self.weights.read_into(name, (start, *(0 for _ in rest)), buffer[:rows])
                yield from self._bytes(planned, buffer[:rows])

    @contextmanager
    def whole(self, planned: Planned) -> Iterator[torch.Tensor]:
        """A tensor whose storage holds nothing else: ``torch.save`` writes storages."""
        with self._assembled(planned) as tensor:
            converted = _cast(tensor, planned)
            yield torch.frombuffer(raw_bytes(converted), dtype=converted.dtype).view(converted.shape)
        self._told(planned.stored.nbytes)

    def _straight(self, planned: Planned) -> bool:
        first = planned.parts[0]
        return len(planned.parts) == 1 and first.rows.whole and not first.transposed and first.padded is None

    @contextmanager
    def _assembled(self, planned: Planned) -> Iterator[torch.Tensor]:
        source = widest(self.weights, planned.parts)
        size = torch.Size(planned.stored.shape).numel() * source.itemsize
        size *= 1 if self._straight(planned) else 2
        converted = planned.stored.nbytes if source != planned.stored.dtype else 0
        with self._room.block(size + converted) as block:
            yield assemble(self.weights, planned.parts, planned.stored.shape, block[:size])

    def _bytes(self, planned: Planned, tensor: torch.Tensor) -> Iterator[memoryview]:
        """A tensor as it is to be written, some megabytes at a time."""
        for chunk in tensor.flatten().split(max(1, CHUNK // tensor.itemsize)):
            converted = _cast(chunk, planned)
            yield raw_bytes(converted)
            self._told(converted.nbytes)


def _cast(tensor: torch.Tensor, planned: Planned) -> torch.Tensor:
    """In the dtype that is to be written. Raises CheckpointError for values that it cannot hold."""
    out = tensor.to(planned.stored.dtype)
    narrower = torch.promote_types(tensor.dtype, out.dtype) != out.dtype
    if narrower and bool((out.isinf() & tensor.isfinite()).any()):
        kind = str(out.dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {planned.name} has values that are too large for {kind}: take another --dtype")
    return out
