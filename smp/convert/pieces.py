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
from smp.convert.weights import Stored, Weights, assemble

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
    """Memory that parallel writers share, in bytes. One that needs more than all of it gets it alone."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._changed = limit, 0, Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Within, ``size`` bytes are this writer's; waits for them. Not to be nested."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


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
        first = planned.parts[0]
        if self._straight(planned) and self.weights.sliced(first.ours):
            chunks = self._some_rows(first.ours)
            yield from self._bytes(planned, chunks)
            return
        with self._assembled(planned) as tensor:
            yield from self._bytes(planned, iter(tensor.flatten().split(max(1, CHUNK // tensor.itemsize))))

    @contextmanager
    def whole(self, planned: Planned) -> Iterator[torch.Tensor]:
        """A tensor."""
        with self._assembled(planned) as tensor:
            yield _cast(tensor, planned)
        self._told(planned.stored.nbytes)

    def _straight(self, planned: Planned) -> bool:
        first = planned.parts[0]
        return len(planned.parts) == 1 and first.rows.whole and not first.transposed and first.padded is None

    @contextmanager
    def _assembled(self, planned: Planned) -> Iterator[torch.Tensor]:
        source = self.weights.tensors[planned.parts[0].ours].dtype
        size = torch.Size(planned.stored.shape).numel() * source.itemsize
        with self._room.taken(size if self._straight(planned) else 2 * size):
            yield assemble(self.weights, planned.parts, planned.stored.shape)

    def _some_rows(self, name: str) -> Iterator[torch.Tensor]:
        """Some rows of one of our tensors at a time."""
        source = self.weights.tensors[name]
        row = max(1, source.nbytes // max(1, source.shape[0]))
        step = max(1, min(source.shape[0], CHUNK // row))
        buffer = torch.empty((step, *source.shape[1:]), dtype=source.dtype)
        for start in range(0, source.shape[0], step):
            rows = buffer[: min(step, source.shape[0] - start)]
            self.weights.read_into(name, (start, *(0 for _ in source.shape[1:])), rows)
            yield rows

    def _bytes(self, planned: Planned, chunks: Iterator[torch.Tensor]) -> Iterator[memoryview]:
        for chunk in chunks:
            converted = _cast(chunk, planned)
            yield raw_bytes(converted)
            self._told(converted.nbytes)


def _cast(tensor: torch.Tensor, planned: Planned) -> torch.Tensor:
    """In the dtype that is to be written. Raises CheckpointError for values that it cannot hold."""
    out = tensor.to(planned.stored.dtype)
    if out.dtype == torch.float16 and out is not tensor and bool((out.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(f"tensor {planned.name} has values that are too large for fp16: take another --dtype")
    return out
