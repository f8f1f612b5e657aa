"""A tensor of a file to be written, as a stream of bytes made from weights under our names."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from smp.checkpoint.tensor_file import raw_bytes
from smp.convert.layout import Link
from smp.convert.weights import Stored, Weights, assemble

CHUNK = 1 << 23
"""Bytes of a tensor that are in memory at a time, where that is possible."""
_BIG = 128 << 20
_one_big = threading.Lock()
"""Held while a large tensor is in memory whole, so that parallel writers need the memory of one."""


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


def pieces(weights: Weights, planned: Planned) -> Iterator[memoryview]:
    """The bytes of a tensor, in order."""
    first = planned.parts[0]
    straight = len(planned.parts) == 1 and first.rows.whole and not first.transposed and first.padded is None
    if straight and weights.sliced(first.ours):
        yield from _streamed(weights, first.ours, planned.stored)
        return
    with _one_big if planned.stored.nbytes > _BIG else _free():
        tensor = assemble(weights, planned.parts, planned.stored.shape)
        for chunk in tensor.flatten().split(max(1, CHUNK // tensor.itemsize)):
            yield raw_bytes(chunk.to(planned.stored.dtype))


def _free() -> AbstractContextManager[None]:
    return nullcontext()


def _streamed(weights: Weights, name: str, stored: Stored) -> Iterator[memoryview]:
    """Some rows at a time, in memory that is used again."""
    source = weights.tensors[name]
    row = max(1, source.nbytes // max(1, source.shape[0]))
    step = max(1, min(source.shape[0], CHUNK // row))
    buffer = torch.empty((step, *source.shape[1:]), dtype=source.dtype)
    for start in range(0, source.shape[0], step):
        rows = buffer[: min(step, source.shape[0] - start)]
        weights.read_into(name, (start, *(0 for _ in source.shape[1:])), rows)
        yield raw_bytes(rows.to(stored.dtype))


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
