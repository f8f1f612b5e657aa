"""Tensors of a file to be written, made from weights: as streams of bytes, or whole where that is necessary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition

import torch

from smp.checkpoint import CheckpointError
from smp.checkpoint.format.tensor_bytes import raw_bytes
from smp.convert.layout import Link
from smp.convert.store import Stored
from smp.convert.weights import Weights
from smp.models.inventory import EXPERT_BIAS

CHUNK = 1 << 23
"""Bytes that are converted and written at a time."""


@dataclass(frozen=True)
class Planned:
    """A tensor to write.

    Attributes:
        name: in the file.
        stored: what it will be; without a dimension of layers.
        parts: of this project's tensors, and where they go.
    """

    name: str
    stored: Stored
    parts: tuple[Link, ...]

    @property
    def straight(self) -> bool:
        """Whether its rows are those of a single tensor, unchanged."""
        first = self.parts[0]
        as_it_is = first.rows.whole and not (first.transposed or first.inner_one or first.leading)
        as_it_is = as_it_is and first.padded is None
        return len(self.parts) == 1 and as_it_is


def plan(weights: Weights, name: str, parts: Sequence[Link], dtype: torch.dtype | None) -> Planned:
    """An external tensor to write, ``name``, from all ``parts`` in it; ``dtype`` None: that of the parts.

    Raises:
        CheckpointError: parts of different dtypes.
    """
    # The bias that balances experts keeps its dtype, whatever the weights become.
    if all(part.smp_name.endswith(f".{EXPERT_BIAS}") for part in parts):
        dtype = None
    different = {weights.tensors[part.smp_name].dtype for part in parts}
    if dtype is None and len(different) != 1:
        names = ", ".join(part.smp_name for part in parts)
        raise CheckpointError(f"{names} have different dtypes and cannot lie in one tensor, {name}: give a --dtype")
    return Planned(name, Stored(parts[0].external_shape, dtype or different.pop()), tuple(parts))


def in_files(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Tensors in order, grouped into files of at most ``limit`` bytes (a larger tensor gets a file of its own)."""
    files: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        # A new file only when the tensor does not fit any more: order and sizes are the same on every machine.
        if not files or tensor.stored.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(tensor)
        room -= tensor.stored.nbytes
    return files


class Room:
    """``limit`` bytes of memory that parallel writers share. A writer that needs more than all of it gets it alone.

    Blocks are kept for the next writer: memory that is fresh from the system costs as much time as to read a file into.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._changed = limit, 0, Condition()
        self._kept: list[torch.Tensor] = []

    @contextmanager
    def block(self, size: int) -> Iterator[torch.Tensor]:
        """Context in which ``size`` bytes, uint8 (size,), belong to this writer; waits for them. Must not be nested."""
        with self._changed:
            # The first of the two is for a tensor that is larger than the limit: it goes alone.
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            block = self._take(size)
            # A kept block counts in full.
            count = size if block is None else block.numel()
            self._used += count
        if block is None:
            # Outside of the lock: memory that is fresh from the system takes time.
            block = torch.empty(size, dtype=torch.uint8)
        try:
            yield block[:size]
        finally:
            with self._changed:
                self._used -= count
                self._kept.append(block)
                self._changed.notify_all()

    def _take(self, size: int) -> torch.Tensor | None:
        """The smallest kept block that is large enough; None: there is none. Other blocks are freed where they would
        exceed the limit."""
        fitting = [block for block in self._kept if size <= block.numel() <= max(size, self._limit - self._used)]
        found = min(fitting, key=torch.Tensor.numel, default=None)
        self._kept = [block for block in self._kept if block is not found]
        wanted = self._used + (size if found is None else found.numel())
        # The oldest first; blocks that nobody waits for count as well.
        while self._kept and wanted + sum(block.numel() for block in self._kept) > self._limit:
            self._kept.pop(0)
        return found


class Feed:
    """The source of a target's tensors.

    Args:
        weights: what is written.
        room: for tensors that have to be in memory whole.
        progress: called with the number of bytes that are done; may raise to end the conversion.
    """

    def __init__(self, weights: Weights, room: Room, progress: Callable[[int], None]) -> None:
        self.weights, self._room, self._progress = weights, room, progress

    def stream(self, planned: Planned) -> Iterator[memoryview]:
        """The bytes of a tensor, in order. The memory is reused for the next ones."""
        if planned.straight:
            yield from self.rows(planned, 0, planned.stored.shape[0])
            return
        with self._assembled(planned) as tensor:
            yield from self._bytes(planned, tensor)

    def rows(self, planned: Planned, first: int, count: int) -> Iterator[memoryview]:
        """The bytes of some rows of a straight tensor. The memory is reused."""
        part, shape = planned.parts[0], (count, *planned.stored.shape[1:])
        dtype = self.weights.tensors[part.smp_name].dtype
        with self._room.block(math.prod(shape) * dtype.itemsize) as block:
            rows = block.view(dtype).view(shape)
            self._read(part, (first, *(0 for _ in shape[1:])), rows)
            yield from self._bytes(planned, rows)

    @contextmanager
    def whole(self, planned: Planned) -> Iterator[torch.Tensor]:
        """A tensor whose storage holds nothing else, as ``torch.save`` writes whole storages."""
        with self._assembled(planned) as tensor:
            # A tensor of its own on exactly these bytes; a view of the block would be saved with all of it.
            yield torch.frombuffer(raw_bytes(tensor), dtype=tensor.dtype).view(tensor.shape)
        self._progress(planned.stored.nbytes)

    @contextmanager
    def _assembled(self, planned: Planned) -> Iterator[torch.Tensor]:
        """The tensor, in one block that also has room for a part that cannot be read in place. Padded rows of the
        vocabulary are 0."""
        size, kind = planned.stored.nbytes, planned.stored.dtype
        sizes = (self._part(p).nbytes for p in planned.parts if not self._in_place(planned, p))
        # So that the spare part begins where any dtype may begin.
        # 8: the widest element.
        aligned = -(-size // 8) * 8
        with self._room.block(aligned + max(sizes, default=0)) as block:
            out, spare = block[:size].view(kind).view(planned.stored.shape), block[aligned:]
            filled = 0
            # In rows that do not meet: parts of a fused matrix come in any order.
            for part in planned.parts:
                self._put(planned, part, out, spare)
                filled += part.rows.smp_rows
            if planned.parts[0].padded is not None:
                out[filled:] = 0
            yield out

    def _in_place(self, planned: Planned, part: Link) -> bool:
        same = self.weights.tensors[part.smp_name].dtype == planned.stored.dtype
        return same and part.rows.whole and not (part.transposed or part.inner_one)

    def _put(self, planned: Planned, part: Link, out: torch.Tensor, spare: torch.Tensor) -> None:
        """Read a part into its rows of ``out``, by way of ``spare`` where it has to be rearranged or converted."""
        stored, zeros = self._part(part), (0,) * len(part.shape)
        for index, _ in part.leading:
            out = out[index]
        if self._in_place(planned, part):
            self._read(part, zeros, out[: part.rows.smp_rows])  # unchanged
            return
        tensor = spare[: stored.nbytes].view(stored.dtype).view(stored.shape)
        self._read(part, zeros, tensor)
        # A view: writing to it writes the external order.
        out = out.t() if part.transposed else out.squeeze(1) if part.inner_one else out
        step = max(1, CHUNK // max(1, tensor[0].nbytes))
        # Rows of a fused matrix are stretches; of two that alternate every second row, in one strided copy.
        runs = ((out[row : row + n], tensor[at : at + n]) for row, at, n in part.rows.runs(0, part.rows.smp_rows))
        single = [(out[part.rows.start :: part.rows.slots], tensor)]
        for block, given in single if part.rows.single else runs:
            # Some megabytes at a time, so that a converted copy never is as large as the tensor.
            for target, rows in zip(block.split(step), given.split(step), strict=True):
                target.copy_(_cast(rows, planned))

    def _part(self, part: Link) -> Stored:
        """Shape and dtype of a link's own tensor."""
        return Stored(part.shape, self.weights.tensors[part.smp_name].dtype)

    def _read(self, part: Link, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out`` with a region of a link's own tensor."""
        if part.entry is None:
            self.weights.read_into(part.smp_name, offsets, out)
        else:
            # (experts, out, in): one expert's region.
            self.weights.read_into(part.smp_name, (part.entry, *offsets), out.unsqueeze(0))

    def _bytes(self, planned: Planned, tensor: torch.Tensor) -> Iterator[memoryview]:
        """A tensor's bytes in the dtype to be written, some megabytes at a time."""
        for chunk in tensor.flatten().split(max(1, CHUNK // tensor.itemsize)):
            converted = _cast(chunk, planned)
            yield raw_bytes(converted)
            self._progress(converted.nbytes)


def _cast(tensor: torch.Tensor, planned: Planned) -> torch.Tensor:
    """``tensor`` in the dtype to be written.

    Raises:
        CheckpointError: it cannot hold a value.
    """
    out = tensor.to(planned.stored.dtype)
    # Only such a dtype can turn a number into infinity.
    # bf16 to fp16, for one: a smaller range.
    narrower = torch.promote_types(tensor.dtype, out.dtype) != out.dtype
    if narrower and bool((out.isinf() & tensor.isfinite()).any()):
        kind = str(out.dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {planned.name} has values that are too large for {kind}: take another --dtype")
    return out
