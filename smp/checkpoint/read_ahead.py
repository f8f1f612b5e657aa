"""Shards of a data file in blocks, in the order of the file, while threads read the blocks that come next."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle

import torch
import xxhash

from smp.checkpoint.folders.local import Source
from smp.checkpoint.format.tensor_bytes import DTYPES, raw_bytes
from smp.checkpoint.format.tensor_file import Slot


@dataclass(frozen=True)
class Wanted:
    """A shard to read, and the contiguous CPU tensor of its shape and dtype to read it into; None: into buffers."""

    slot: Slot
    into: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, ...); a 0-dim tensor has one row."""
        return self.slot.shape or (1,)

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return self.slot.size // max(self.shape[0], 1)

    def rows(self, first: int, end: int, buffer: torch.Tensor) -> torch.Tensor:
        """The memory of some rows, (end - first, ...): the tensor's own, else in ``buffer``, a tensor of bytes."""
        if self.into is not None:
            return self.into.view(self.shape)[first:end]
        count = (end - first) * self.row_size
        return buffer[:count].view(DTYPES[self.slot.dtype]).view(end - first, *self.shape[1:])


@dataclass(frozen=True)
class Block:
    """Some rows of a shard.

    Attributes:
        number: of the shard, in the order of what was wanted.
        first: number of the first row, in the shard.
        rows: (rows, ...) of the shard's dtype. Unless the shard had a tensor to go to, their memory is used again.
        checksum: the shard's, when it ends with them; else None.
    """

    number: int
    first: int
    rows: torch.Tensor
    checksum: str | None = None


def read_ahead(source: Source, wanted: Sequence[Wanted], pinned: bool = False) -> Generator[Block]:
    """Yield every shard's rows, a few megabytes at a time, or one row; a shard without rows is one empty block.

    Close it when not all was taken: until then threads read from ``source``. They are told addresses and nothing else,
    so that streams and modes of torch are those of the caller.

    Args:
        source: their file.
        wanted: shards in the order of the file.
        pinned: have buffers in page-locked memory.

    Raises:
        EOFError, OSError: from ``source``.
        MemoryError: there is none left for buffers.
    """
    # what goes by buffers comes in halves of a piece: several buffers are there at a time
    sizes = [source.piece if one.into is not None else source.piece // 2 for one in wanted]
    steps = [max(1, min(one.shape[0], n // max(one.row_size, 1))) for one, n in zip(wanted, sizes, strict=True)]
    room = max((one.row_size * step for one, step in zip(wanted, steps, strict=True) if one.into is None), default=0)
    # one block more than threads, so that they go on while the caller uses one; of huge rows only one at a time
    ahead = source.readers + 1 if room <= source.piece else 0
    # A block's buffer comes round again only after the block was yielded and the caller asked for the next: at most
    # ``ahead`` + 1 are under way.
    buffers = cycle([_buffer(room, pinned) for _ in range(ahead + 1)])
    under_way: deque[tuple[Block, Future[None]]] = deque()
    # One hash for all shards in turn: blocks end in the order in which they lie in the file.
    hashed = xxhash.xxh3_64()

    def oldest() -> Block:
        block, reading = under_way.popleft()
        # What went wrong on the thread is raised here, for the caller.
        reading.result()
        hashed.update(raw_bytes(block.rows))
        if block.first + len(block.rows) < wanted[block.number].shape[0]:
            return block
        checksum = hashed.hexdigest()
        hashed.reset()
        return replace(block, checksum=checksum)

    with ThreadPoolExecutor(source.readers, "checkpoint-reader") as pool:
        for number, first in ((n, f) for n, step in enumerate(steps) for f in range(0, wanted[n].shape[0] or 1, step)):
            one = wanted[number]
            end = min(first + steps[number], one.shape[0])
            rows = one.rows(first, end, next(buffers))
            # Blocks are read at offsets of their own, so that threads need no order among themselves.
            reading = pool.submit(source.read_into, one.slot.start + first * one.row_size, raw_bytes(rows))
            under_way.append((Block(number, first, rows), reading))
            if len(under_way) > ahead:
                yield oldest()
        while under_way:
            yield oldest()


def _buffer(size: int, pinned: bool) -> torch.Tensor:
    """A buffer of bytes that goes back to the system when it is freed: malloc may keep as much memory again."""
    if pinned or size == 0:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    try:
        memory = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)  # private: copy on write
    except OSError as error:  # that of a file means something else
        raise MemoryError(f"tried to allocate {size} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
