"""Memory that the ranks of one machine share, and collectives of CPU tensors through it.

Each rank copies its tensor to its slot, publishes the next sequence number, waits until the other ranks have published
it too, and reads their slots. Each rank has two slots and alternates between them: a rank that has published two
numbers more has read the slot of the first. With its sequence number a rank publishes which collective it calls, of how
many bytes and which dtype: ranks that call different ones all raise an error.

:mod:`smp.parallel.node_group` makes a process group of it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from smp.parallel.network.group import CollectiveError
from smp.parallel.shared_numbers import LOOK, AbsentError, Numbers, is_possible

SLOT_BYTES = 1 << 21
"""Larger tensors go in several chunks, which caches have room for. Pages that nothing was written to take no memory."""
_SHARED_WORK = 1 << 16
"""Bytes from which on more than two ranks share the work of an all-reduce."""
_KEPT_VIEWS = 64
"""Views of slots, by size and dtype, that are made once."""
_LINE, _GONE, _CALL = 16, 1, 2
"""Numbers (int64) of one rank, in cache lines of their own, and where in them is what: first the sequence number, at
_GONE why the rank will not come any more, at _CALL and after it which collective it calls with this sequence number
and which with the one before, alternating like the slots."""
LEFT, _FAILED = 1, 2
"""Values at _GONE."""
WHY = {
    0: "it is late, or waits for one that is",
    LEFT: "its process ended, or it left the group",
    _FAILED: "a collective of the group failed or was interrupted there",
}
HEADER, _SECRET = 1 << 16, 32
"""Bytes before the slots, and of the secret at their end."""
_MOST = (HEADER - _SECRET) // (8 * _LINE)
"""Ranks that there is room for."""
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "shift", "barrier")
OPERATIONS = ("SUM", "AVG", "MAX", "MIN")
"""Names that torch has for what is reduced."""
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
)
"""Dtypes that are moved; those before bool can be added up."""
_Slots = Sequence[torch.Tensor]
"""One tensor in memory for each rank."""
_Limit = Callable[[], float]
"""Seconds until a late rank is an error, asked for only while one is late."""


class AbsentRankError(CollectiveError):
    """A rank did not come to a collective in time, or will not come any more."""


class Memory:
    """The shared memory of one group, and its collectives.

    Args:
        memory: sequence numbers, then 2 x size slots.
        processes: descriptors of the other ranks' processes, by rank; they become readable when one ends.
    """

    def __init__(self, rank: int, size: int, memory: mmap.mmap, processes: dict[int, int]) -> None:
        self.rank, self.size, self.processes = rank, size, processes
        self._numbers = numbers_of(memory, size)
        with torch.inference_mode(False):  # in which mode a group is made says nothing of its later calls
            self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER).view(2, size, SLOT_BYTES)
        self._views: dict[tuple[int, int, torch.dtype], _Slots] = {}
        self._sequence = 0
        self._close = weakref.finalize(self, close_all, tuple(processes.values()))
        self._call, self._failure = 0, ""
        self.waited = 0.0
        """Seconds so far in which this rank could not go on before another one came."""
        # One collective at a time, whichever thread calls it. A signal's handler that calls one inside of another gets
        # the error of :meth:`_begin`, not a lock that its own thread holds.
        self._lock = threading.RLock()

    def all_reduce(self, x: torch.Tensor, limit: _Limit, operation: str = "SUM") -> None:
        """(n), reduced over all ranks in their order, in place; 16-bit sums are rounded once."""
        with self._lock, self._begin("all-reduce", x, OPERATIONS.index(operation)):
            for chunk in _chunks(x, SLOT_BYTES // x.itemsize):
                slots = self._next_slots(chunk)
                # Then all ranks read all slots: each adds up the same numbers in the same order, to the same bits.
                slots[self.rank].copy_(chunk)
                self._meet(limit)
                # The size decides, which is the same on all ranks.
                if self.size > 2 and chunk.nbytes >= _SHARED_WORK:
                    self._reduce_together(slots, chunk, limit, operation)
                else:
                    self._reduce(slots, chunk, chunk, operation)

    def _reduce_together(self, slots: _Slots, into: torch.Tensor, limit: _Limit, operation: str) -> None:
        """Every rank reduces its own part of all slots, and reads those of the others."""
        parts = [slot.tensor_split(self.size) for slot in slots]
        results = [slot.tensor_split(self.size)[rank] for rank, slot in enumerate(self._next_slots(into))]
        self._reduce([part[self.rank] for part in parts], None, results[self.rank], operation)
        self._meet(limit)
        for part, result in zip(into.tensor_split(self.size), results, strict=True):
            part.copy_(result)

    def all_gather(self, output: torch.Tensor, x: torch.Tensor, limit: _Limit) -> None:
        """(n) of every rank -> (size x n)."""
        columns = SLOT_BYTES // x.itemsize
        with self._lock, self._begin("all-gather", x):
            chunks = _chunks(_apart(x, output), columns)
            for chunk, into in zip(chunks, _chunks(output.view(self.size, -1), columns), strict=True):
                slots = self._next_slots(chunk)
                slots[self.rank].copy_(chunk)
                self._meet(limit)
                own = into[self.rank]
                if own.data_ptr() != chunk.data_ptr():
                    own.copy_(chunk)  # first: another row may be what is gathered from here
                for rank, (row, slot) in enumerate(zip(into, slots, strict=True)):
                    if rank != self.rank:
                        row.copy_(slot)

    def reduce_scatter(self, output: torch.Tensor, x: torch.Tensor, limit: _Limit, operation: str = "SUM") -> None:
        """(size x n) of every rank -> this rank's (n) of what is reduced."""
        # Elements of each rank's part that fit into a slot at a time.
        columns = SLOT_BYTES // x.itemsize // self.size
        with self._lock, self._begin("reduce-scatter", x, OPERATIONS.index(operation)):
            chunks = _chunks(_apart(x, output).view(self.size, -1), columns)
            for chunk, into in zip(chunks, _chunks(output, columns), strict=True):
                # of each rank (ranks, n): part j is for rank j
                slots = [slot.view(chunk.shape) for slot in self._next_slots(chunk)]
                for rank, row in enumerate(chunk):
                    if rank != self.rank or self.rank > 1:
                        slots[self.rank][rank].copy_(row)
                self._meet(limit)
                self._reduce([slot[self.rank] for slot in slots], chunk[self.rank], into, operation)

    def _reduce(self, parts: _Slots, own: torch.Tensor | None, into: torch.Tensor, operation: str) -> None:
        """Parts of all ranks, (n) each -> (n), in their order; ``own`` is what this rank's part is a copy of."""
        if own is not None and self.rank < 2:  # it is read before ``into``, which may be its memory, is written
            parts = [own if rank == self.rank else part for rank, part in enumerate(parts)]
        _reduce(parts, into, operation)
        if operation == "AVG":
            into.div_(self.size)

    def all_to_all(
        self, output: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], limit: _Limit
    ) -> None:
        """Parts of ``x`` (n) of ``sent`` elements to the ranks, in their order; parts of ``received`` elements from
        them. A slot holds how many bytes each rank is sent, the largest of these numbers, and a part of equal size for
        each rank; parts that are larger take several turns."""
        header = 8 * (self.size + 1)
        most = (SLOT_BYTES - header) // self.size // 16 * 16
        nothing = x.new_empty(0)  # how much there is, ranks need not know of each other before
        with self._lock, self._begin("all-to-all", nothing):
            parts = [_bytes(part) for part in _apart(x, output, whole_rows=False).split(sent)]
            into = [_bytes(part) for part in output.split(received)]
            sizes = [part.numel() for part in parts]
            if sizes[self.rank] == into[self.rank].numel():  # else an error, which all get
                into[self.rank].copy_(parts[self.rank])
            start, more = 0, 1
            while start < more:
                counts, slots = self._counted_slots()
                # With the data, so that a receiver can compare it with what it expects.
                for at, size in enumerate([*sizes, max(sizes)], counts[self.rank]):
                    self._numbers.values[at] = size
                for rank, part in enumerate(parts):
                    if rank != self.rank and start < sizes[rank]:
                        chunk, at = part[start : start + most], header + rank * most
                        slots[self.rank][at : at + chunk.numel()].copy_(chunk)
                self._meet(limit)
                for rank, part in enumerate(into):
                    if (count := self._numbers.values[counts[rank] + self.rank]) != part.numel():
                        self._fail(
                            f"ranks of a group on {socket.gethostname()} disagree: in an all-to-all rank {rank} sends "
                            f"{count:,} bytes to rank {self.rank}, which expects {part.numel():,}"
                        )
                    if rank != self.rank and start < count:
                        chunk, at = part[start : start + most], header + self.rank * most
                        chunk.copy_(slots[rank][at : at + chunk.numel()])
                # The same on all ranks: by the largest part of any two of them.
                more, start = max(self._numbers.values[at + self.size] for at in counts), start + most

    def broadcast(self, x: torch.Tensor, root: int, limit: _Limit) -> None:
        """Broadcast ``x`` (n) of the rank ``root``, in place."""
        with self._lock, self._begin("broadcast", x, root):
            for chunk in _chunks(x, SLOT_BYTES // x.itemsize):
                slots = self._next_slots(chunk)
                # The other ranks' slots stay empty; they meet all the same.
                if self.rank == root:
                    slots[root].copy_(chunk)
                self._meet(limit)
                if self.rank != root:
                    chunk.copy_(slots[root])

    def shift(self, output: torch.Tensor, x: torch.Tensor, source: int, limit: _Limit) -> None:
        """Copy ``x`` (n) of the rank ``source`` into ``output``; every rank is the source of one."""
        with self._lock, self._begin("shift", x):
            columns = SLOT_BYTES // x.itemsize
            for chunk, into in zip(_chunks(x, columns), _chunks(output, columns), strict=True):
                slots = self._next_slots(chunk)
                slots[self.rank].copy_(chunk)
                self._meet(limit)
                into.copy_(slots[source])

    def barrier(self, limit: _Limit) -> None:
        """Wait until all ranks have come here."""
        with self._lock, self._begin("barrier", torch.empty(0)):
            self._next_slots(torch.empty(0))
            self._meet(limit)

    @property
    def sound(self) -> bool:
        """Whether a collective can follow."""
        return not self._failure

    def leave(self) -> None:
        """Tell the other ranks that this one will not come any more, so that they do not wait for it."""
        if not self._failure:
            self._go(LEFT)
        self._close()

    def gone(self, other: int) -> int:
        """Why a rank has told the others that it will not come any more, see :data:`WHY`; 0: it has not."""
        return self._numbers.values[other * _LINE + _GONE]

    def _go(self, why: int) -> None:
        """Tell the others that this rank does not come any more."""
        self._numbers.values[self.rank * _LINE + _GONE] = why
        self._numbers.wake(self.rank * _LINE)

    def _begin(self, kind: str, x: torch.Tensor, detail: int = 0) -> Memory:
        """Begin a collective, which then runs as ``with self._lock, self._begin(...)``; ``detail``: its operation or
        root.

        An exception inside, from wherever it comes (Ctrl-C, a signal's handler), leaves ranks with different sequence
        numbers, which would take the data of one collective for those of another: this rank calls no more, and the
        others, who would wait for it, are told.
        """
        if self._failure:
            raise CollectiveError(f"an earlier collective of this group failed: {self._failure}")
        # Set before and cleared after: an exception anywhere between leaves the group marked as failed.
        self._failure = "it was interrupted, or has not ended"
        # One integer, so that it is written and compared at once; ``_in_words`` undoes it.
        self._call = x.nbytes << 24 | detail << 12 | DTYPES.index(x.dtype) << 4 | _KINDS.index(kind)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._failure = ""
        else:
            self._go(_FAILED)

    def _next_slots(self, chunk: torch.Tensor) -> _Slots:
        """Slots of the next sequence number, each (elements of chunk), by rank."""
        self._sequence += 1
        # Two slots in turn: a rank fills that of number n + 2 after all have published n + 1, and so have read n.
        key = self._sequence & 1, chunk.numel(), chunk.dtype
        if (found := self._views.get(key)) is None:
            if len(self._views) > _KEPT_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # views outlive the call
                found = self._slots[key[0]][:, : chunk.nbytes].view(chunk.dtype).unbind()
            self._views[key] = found
        return found

    def _counted_slots(self) -> tuple[list[int], _Slots]:
        """Slots of the next sequence number that begin with numbers: where among all numbers, and their bytes, by
        rank."""
        slots = self._next_slots(self._slots[0, 0])
        first = (self._sequence & 1) * self.size
        return [(HEADER + (first + rank) * SLOT_BYTES) // 8 for rank in range(self.size)], slots

    def _meet(self, limit: _Limit) -> None:
        """Say that this rank's slot is filled, and wait for those of the others."""
        numbers, sequence = self._numbers.values, self._sequence
        call = _CALL + (sequence & 1)
        # In this order: x86 makes stores visible in the order of the program, so a rank that reads
        # the new number also finds the slot and the call that were written before it. (Other
        # processors may not: ``join`` refuses them.)
        numbers[self.rank * _LINE + call] = self._call
        self._numbers.publish(self.rank * _LINE, sequence)
        for other in range(self.size):
            if numbers[other * _LINE] < sequence:
                self._wait(other, limit)
            if numbers[other * _LINE + call] != self._call:
                self._fail(
                    f"ranks of a group on {socket.gethostname()} call different collectives: rank {self.rank} "
                    f"{_in_words(self._call)}, rank {other} {_in_words(numbers[other * _LINE + call])}"
                )

    def _wait(self, other: int, limit: _Limit) -> None:
        """Wait for a rank that is not there yet."""

        def absent(passed: float) -> str:
            # A process that was killed writes nothing: its pidfd becomes readable.
            gone = self.gone(other) or LEFT * has_ended(self.processes[other], passed)
            return _absence(_in_words(self._call), passed, self, other, gone) if gone or passed > limit() else ""

        try:
            self.waited += self._numbers.wait(other * _LINE, self._sequence, absent)
        except AbsentError as error:
            self._failure = str(error)
            raise AbsentRankError(self._failure) from None

    def _fail(self, why: str) -> NoReturn:
        self._failure = why
        raise CollectiveError(why)


def _in_words(call: int) -> str:
    """The call that :meth:`Memory._begin` packed into one number, as text."""
    kind, dtype, detail = _KINDS[call & 15], DTYPES[call >> 4 & 255], call >> 12 & 4095
    told = [str(dtype).removeprefix("torch.")]
    if kind in ("all-reduce", "reduce-scatter"):
        told.append(OPERATIONS[detail])
    if kind == "broadcast":
        told.append(f"from rank {detail}")
    if kind in ("all-to-all", "barrier"):
        return kind
    return f"{kind} of {call >> 24:,} bytes ({', '.join(told)})"


def _absence(what: str, passed: float, here: Memory, other: int, gone: int) -> str:
    return (
        f"{what} failed after {passed:.1f} s on rank {here.rank} of {here.size} on {socket.gethostname()}: "
        f"rank {other} of the group has not come: {WHY[gone]}"
    )


def close_all(descriptors: tuple[int, ...]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)


def _apart(x: torch.Tensor, output: torch.Tensor, whole_rows: bool = True) -> torch.Tensor:
    """x, or a copy of it if a chunk of ``output`` would be written over a later chunk of x: they share memory, and the
    smaller one is not a whole row (one rank's part) of the other."""
    overlap = x.data_ptr() < output.data_ptr() + output.nbytes and output.data_ptr() < x.data_ptr() + x.nbytes
    # A whole row is this rank's own part, which is copied to its slot before that row is written.
    rows = whole_rows and not (x.data_ptr() - output.data_ptr()) % max(min(x.nbytes, output.nbytes), 1)
    return x.clone() if overlap and not rows else x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """(n) as uint8."""
    return x.view(torch.uint8)


def _chunks(x: torch.Tensor, columns: int) -> Sequence[torch.Tensor]:
    """(..., n) in parts of (..., columns) at most."""
    return (x,) if x.shape[-1] <= columns else x.split(columns, -1)


def _reduce(parts: _Slots, into: torch.Tensor, operation: str) -> None:
    """Parts (n) of all ranks -> (n), in the order of ranks; an average is not yet divided."""
    combine = {"MAX": torch.maximum, "MIN": torch.minimum}.get(operation, torch.add)
    # With two ranks one addition rounds once anyway.
    if len(parts) > 2 and into.itemsize == 2 and into.is_floating_point():
        total = parts[0].float()
        for part in parts[1:]:
            combine(total, part, out=total)
        into.copy_(total)
        return
    combine(parts[0], parts[1], out=into)
    for part in parts[2:]:
        combine(into, part, out=into)


def has_ended(process: int, passed: float) -> bool:
    """Whether the process of a descriptor has, looked at when a wait for it has taken a moment."""
    if passed < LOOK:
        return False
    ends = select.poll()
    ends.register(process, select.POLLIN)
    return bool(ends.poll(0))


def numbers_of(memory: mmap.mmap, size: int) -> Numbers:
    """What a group of so many ranks waits for; they may be some of a run's."""
    return Numbers(memory, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", size))))


def join(rank: int, size: int, store: Any) -> Memory | None:
    """Memory that all ranks of a group see, or None on every one of them. Every rank calls this."""
    found = share(rank, size, store, HEADER + 2 * size * SLOT_BYTES)
    return None if found is None else Memory(rank, size, *found)


def share(rank: int, size: int, store: Any, length: int) -> tuple[mmap.mmap, dict[int, int]] | None:
    """``length`` bytes that all ranks of a group see, and descriptors of the other ranks' processes, or None on every
    one of them. Every rank calls this. The first HEADER bytes are zeros, except for the secret at their end.

    It has no name: rank 0's descriptor is opened through /proc, which ranks elsewhere (another machine, a container)
    cannot, or they find another secret behind it. It is gone with the last process that has it. What a system refuses
    to one rank, all of them do without: each says what became of it.
    """
    able = is_possible() and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
    able = able and size <= _MOST
    store.set(f"process {rank}", str(os.getpid()))
    # The path may open another file in another container: the secret tells.
    secret = secrets.token_hex(16)
    descriptor = _create_memory(length, secret) if able and rank == 0 else -1
    try:
        if rank == 0:
            store.set("memory", json.dumps([f"/proc/{os.getpid()}/fd/{descriptor}", secret]))
        path, secret = json.loads(store.get("memory"))
        processes = {other: int(store.get(f"process {other}")) for other in range(size) if other != rank}
        memory = _open(path, secret) if able else None
        watched = _watch(processes) if memory is not None else None
        made = (memory, watched) if memory is not None and watched is not None else None
        store.set(f"joined {rank}", str(int(made is not None)))
        # Also what keeps rank 0's descriptor open until all have opened it.
        joined = [int(store.get(f"joined {other}")) for other in range(size)]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    # Some rank cannot: then none does, and what this one has opened is closed.
    if watched is not None and not all(joined):
        close_all(tuple(watched.values()))
    return made if all(joined) else None


def _create_memory(length: int, secret: str) -> int:
    """Create the memory; returns its file descriptor, -1 if the system refuses it."""
    descriptor = -1
    try:
        # Without a name in the file system: nothing is left behind when processes are killed.
        descriptor = os.memfd_create("smp_node", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, length)
        os.pwrite(descriptor, secret.encode(), HEADER - _SECRET)
    except OSError:
        close_all((descriptor,) if descriptor >= 0 else ())
        return -1
    return descriptor


def _open(path: str, secret: str) -> mmap.mmap | None:
    """Map the memory at ``path``; None if it cannot be opened here, or is another file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(descriptor, _SECRET, HEADER - _SECRET) != secret.encode():
            return None
        return mmap.mmap(descriptor, 0)
    except OSError:  # a pipe, or no room for it
        return None
    finally:
        os.close(descriptor)


def _watch(processes: dict[int, int]) -> dict[int, int] | None:
    """A descriptor for each process, by rank; None if the system refuses one."""
    opened: dict[int, int] = {}
    try:
        for rank, process in processes.items():
            opened[rank] = os.pidfd_open(process)
    except OSError:
        close_all(tuple(opened.values()))
        return None
    return opened
