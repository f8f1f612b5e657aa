"""Sums and gathers of CPU tensors among ranks of one machine, through memory that they share: ``smp_node``.

    import smp.parallel.shared_memory
    torch.distributed.new_group(ranks, backend="smp_node")

gloo sends every byte through the system's sockets: a sum of 256 KiB over two ranks takes 1 to 1.5 ms, through memory
0.1 ms. Each rank copies its tensor to its slot, publishes the next sequence number, waits until the other ranks have
published it too, and reads their slots. Each rank has two slots and alternates between them: a rank that has published
two numbers more has read the slot of the first. Beside its sequence number a rank writes which collective it calls, of
how many bytes and which dtype: ranks that call different ones all raise an error.

A group uses it if all of its ranks see the same memory and their processor keeps the order of stores (x86); else, and
for everything but sums, averages and gathers of floating-point tensors, it is what the backend ``smp`` is
(:mod:`smp.parallel.backend`). ``group.counts`` says what ran how.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from smp.parallel.backend import DIVIDED, NetworkProcessGroup, limit_of, options_of
from smp.parallel.network.group import CollectiveError

NAME = "smp_node"
SLOT_BYTES = 1 << 22
"""Larger tensors go in several chunks. Pages that nothing was written to take no memory."""
_LINE, _GONE, _CALL = 16, 1, 2
"""Numbers (int64) of one rank, in cache lines of their own, and where in them is what: first the sequence number, at
_GONE why the rank will not come any more, at _CALL and behind it which collective it calls with this sequence number
and which with the one before, alternating like the slots."""
_LEFT, _FAILED = 1, 2
"""What is at _GONE."""
_WHY = {
    0: "it is late, or waits for one that is",
    _LEFT: "its process ended, or it left the group",
    _FAILED: "a collective of the group failed or was interrupted there",
}
_HEADER, _SECRET = 1 << 16, 32
"""Bytes before the slots, and of the secret at their end."""
_MOST = (_HEADER - _SECRET) // (8 * _LINE)
"""Ranks that there is room for."""
_KINDS = ("all-reduce", "all-gather", "reduce-scatter")
_Limit = Callable[[], float]
"""Seconds until a late rank is an error, asked for only while one is late."""
_SPINS = 3000
"""Looks at a sequence number, about 0.1 ms, before the processor is offered to other threads."""


class Memory:
    """What the ranks of one group share.

    Args:
        memory: sequence numbers, then 2 x size slots.
        processes: descriptors of the other ranks' processes, by rank; they become readable when one ends.
    """

    def __init__(self, rank: int, size: int, memory: mmap.mmap, processes: dict[int, int]) -> None:
        self.rank, self.size = rank, size
        self._numbers = memoryview(memory).cast("q")
        with torch.inference_mode(False):  # in which mode a group is made says nothing of its later calls
            self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER).view(2, size, SLOT_BYTES)
        self._sequence, self._processes = 0, processes
        self._close = weakref.finalize(self, _close_all, tuple(processes.values()))
        self._call, self._failure = 0, ""
        # One collective at a time, whichever thread calls it. A signal's handler that calls one inside of another gets
        # the error of :meth:`_begin`, not a lock that its own thread holds.
        self._lock = threading.RLock()

    def all_reduce(self, x: torch.Tensor, limit: _Limit, average: bool = False) -> None:
        """(n), the sum over all ranks in the order of ranks, in place; 16-bit numbers are rounded once."""
        with self._lock, self._begin("all-reduce", x, average):
            for chunk in x.split(SLOT_BYTES // x.itemsize):
                slots = self._next_slots(chunk)
                slots[self.rank].copy_(chunk)
                self._meet(limit)
                _add(slots, chunk)
            if average:
                x.div_(self.size)

    def all_gather(self, output: torch.Tensor, x: torch.Tensor, limit: _Limit) -> None:
        """(n) of every rank -> (size x n)."""
        columns = SLOT_BYTES // x.itemsize
        with self._lock, self._begin("all-gather", x):
            chunks = _apart(x, output).split(columns)
            for chunk, into in zip(chunks, output.view(self.size, -1).split(columns, 1), strict=True):
                slots = self._next_slots(chunk)
                slots[self.rank].copy_(chunk)
                self._meet(limit)
                into.copy_(slots)

    def reduce_scatter(self, output: torch.Tensor, x: torch.Tensor, limit: _Limit, average: bool = False) -> None:
        """(size x n) of every rank -> this rank's (n) of the sum."""
        columns = SLOT_BYTES // x.itemsize // self.size
        with self._lock, self._begin("reduce-scatter", x, average):
            chunks = _apart(x, output).view(self.size, -1).split(columns, 1)
            for chunk, into in zip(chunks, output.split(columns), strict=True):
                slots = self._next_slots(chunk).view(self.size, *chunk.shape)
                slots[self.rank].copy_(chunk)
                self._meet(limit)
                _add(slots[:, self.rank], into)
            if average:
                output.div_(self.size)

    def leave(self) -> None:
        """The others need not wait for this rank any more."""
        if not self._failure:
            self._numbers[self.rank * _LINE + _GONE] = _LEFT
        self._close()

    def _begin(self, kind: str, x: torch.Tensor, average: bool = False) -> Memory:
        """Of a collective, which then runs as ``with self._lock, self._begin(...)``. An exception inside, from wherever
        it comes (Ctrl-C, a signal's handler), leaves ranks with different sequence numbers, which would take the data
        of one collective for those of another: this rank calls no more, and the others, who would wait for it, are
        told.
        """
        if self._failure:
            raise CollectiveError(f"an earlier collective of this group failed: {self._failure}")
        self._failure = "it was interrupted, or has not ended"
        self._call = x.nbytes << 8 | DIVIDED.index(x.dtype) << 4 | _KINDS.index(kind) << 1 | average
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._failure = ""
        else:
            self._numbers[self.rank * _LINE + _GONE] = _FAILED

    def _next_slots(self, chunk: torch.Tensor) -> torch.Tensor:
        """Those of the next sequence number, (ranks, elements of chunk)."""
        self._sequence += 1
        return self._slots[self._sequence & 1][:, : chunk.nbytes].view(chunk.dtype)

    def _meet(self, limit: _Limit) -> None:
        """Say that this rank's slot is filled, and wait for those of the others."""
        numbers, sequence = self._numbers, self._sequence
        call = _CALL + (sequence & 1)
        numbers[self.rank * _LINE + call] = self._call
        numbers[self.rank * _LINE] = sequence
        for other in range(self.size):
            spins = 0
            while numbers[other * _LINE] < sequence:
                spins += 1
                if spins > _SPINS:
                    self._wait(other, limit)
            if numbers[other * _LINE + call] != self._call:
                self._fail(
                    f"ranks of a group on {socket.gethostname()} call different collectives: rank {self.rank} "
                    f"{_in_words(self._call)}, rank {other} {_in_words(numbers[other * _LINE + call])}"
                )

    def _wait(self, other: int, limit: _Limit) -> None:
        """For a rank that is not there soon."""
        at, sequence = other * _LINE, self._sequence
        started = time.monotonic()
        ends = select.poll()
        ends.register(self._processes[other], select.POLLIN)
        while self._numbers[at] < sequence:
            passed = time.monotonic() - started
            if passed < 1e-3:
                os.sched_yield()
                continue
            gone = self._numbers[at + _GONE] or (_LEFT if ends.poll(0) else 0)
            if (gone or passed > limit()) and self._numbers[at] < sequence:
                why = _WHY[gone]
                self._fail(
                    f"{_in_words(self._call)} failed after {passed:.1f} s on rank {self.rank} of {self.size} on "
                    f"{socket.gethostname()}: rank {other} of the group has not come: {why}"
                )
            time.sleep(5e-5)

    def _fail(self, why: str) -> NoReturn:
        self._failure = why
        raise CollectiveError(why)


def _in_words(call: int) -> str:
    """What :meth:`Memory._begin` made one number of, so that ranks can compare it."""
    kind = _KINDS[call >> 1 & 7]
    operation = "" if kind == "all-gather" else ", AVG" if call & 1 else ", SUM"
    return f"{kind} of {call >> 8:,} bytes ({str(DIVIDED[call >> 4 & 15]).removeprefix('torch.')}{operation})"


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _apart(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if a chunk of ``output`` would be written over a later chunk of x: they share memory, and the
    smaller one is not a whole row (one rank's part) of the other."""
    overlap = x.data_ptr() < output.data_ptr() + output.nbytes and output.data_ptr() < x.data_ptr() + x.nbytes
    return x.clone() if overlap and (x.data_ptr() - output.data_ptr()) % min(x.nbytes, output.nbytes) else x


def _add(slots: torch.Tensor, into: torch.Tensor) -> None:
    """(ranks, n) -> (n), in the order of ranks."""
    if len(slots) > 2 and into.itemsize == 2:
        total = slots[0].float()
        for slot in slots[1:]:
            total.add_(slot)
        into.copy_(total)
        return
    torch.add(slots[0], slots[1], out=into)
    for slot in slots[2:]:
        into.add_(slot)


def join(rank: int, size: int, store: Any) -> Memory | None:
    """Memory that all ranks of a group see, or None on every one of them. Every rank calls this.

    It has no name: rank 0's descriptor is opened through /proc, which ranks elsewhere (another machine, a container)
    cannot, or they find another secret behind it. It is gone with the last process that has it. What a system refuses
    to one rank, all of them do without: each says what became of it.
    """
    able = platform.machine() == "x86_64" and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
    able = able and size <= _MOST
    store.set(f"process {rank}", str(os.getpid()))
    secret = secrets.token_hex(16)
    descriptor = _create_memory(size, secret) if able and rank == 0 else -1
    try:
        if rank == 0:
            store.set("memory", json.dumps([f"/proc/{os.getpid()}/fd/{descriptor}", secret]))
        path, secret = json.loads(store.get("memory"))
        processes = {other: int(store.get(f"process {other}")) for other in range(size) if other != rank}
        memory = _open(path, secret) if able else None
        watched = _watch(processes) if memory is not None else None
        made = Memory(rank, size, memory, watched) if memory is not None and watched is not None else None
        store.set(f"joined {rank}", str(int(made is not None)))
        # Also what keeps rank 0's descriptor open until all have opened it.
        joined = [int(store.get(f"joined {other}")) for other in range(size)]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if made is not None and not all(joined):
        made.leave()
    return made if all(joined) else None


def _create_memory(size: int, secret: str) -> int:
    """Its descriptor, -1 if the system refuses it."""
    descriptor = -1
    try:
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEADER + 2 * size * SLOT_BYTES)
        os.pwrite(descriptor, secret.encode(), _HEADER - _SECRET)
    except OSError:
        _close_all((descriptor,) if descriptor >= 0 else ())
        return -1
    return descriptor


def _open(path: str, secret: str) -> mmap.mmap | None:
    """What is at ``path``; None if that cannot be opened here, or is something else."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(descriptor, _SECRET, _HEADER - _SECRET) != secret.encode():
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
        _close_all(tuple(opened.values()))
        return None
    return opened


class NodeProcessGroup(NetworkProcessGroup):
    """The group that ``new_group(backend="smp_node")`` makes; see this module."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        store = dist.PrefixStore("smp/memory", options.store)
        self.memory = join(options.group_rank, options.group_size, store) if options.group_size > 1 else None

    def getBackendName(self) -> str:  # noqa: N802
        """What torch asks for."""
        return NAME

    def name(self) -> str:
        """The same in newer versions."""
        return NAME

    def shutdown(self) -> None:
        """What ``destroy_process_group`` calls."""
        if self.memory is not None:
            self.memory.leave()
            self.memory = None
        super().shutdown()

    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        """In place; a sum or an average of one tensor goes through memory."""
        opts = options_of(dist.AllreduceOptions, opts, more)
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if self.memory is None or len(given) > 1 or not _is_taken(opts.reduceOp, given[0]):
            return super().allreduce(tensors, opts)
        self.counts["memory all-reduce"] += 1
        with torch.inference_mode(given[0].is_inference()):  # else nothing may write to it
            x = _flat(given[0])
            self.memory.all_reduce(x, partial(self._seconds, opts), opts.reduceOp == dist.ReduceOp.AVG)
            _copy_into(x, given[0])
        return _CompletedWork(list(given))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n) of every rank -> (n x ranks)."""
        opts = options_of(AllgatherOptions, opts, more)
        fits = output.numel() == self.size() * given.numel()
        if self.memory is None or not fits or not _is_taken(dist.ReduceOp.SUM, output, given):
            return super().all_gather_single(output, given, opts)
        self.counts["memory all-gather"] += 1
        with torch.inference_mode(output.is_inference()):
            result = _flat(output)
            self.memory.all_gather(result, _flat(given), partial(self._seconds, opts))
            _copy_into(result, output)
        return _CompletedWork([output])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n x ranks) of every rank -> (n) of the sum."""
        opts = options_of(dist.ReduceScatterOptions, opts, more)
        fits = given.numel() == self.size() * output.numel()
        if self.memory is None or not fits or not _is_taken(opts.reduceOp, output, given):
            return super().reduce_scatter_single(output, given, opts)
        self.counts["memory reduce-scatter"] += 1
        with torch.inference_mode(output.is_inference()):
            result, average = _flat(output), opts.reduceOp == dist.ReduceOp.AVG
            self.memory.reduce_scatter(result, _flat(given), partial(self._seconds, opts), average)
            _copy_into(result, output)
        return _CompletedWork([output])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _seconds(self, opts: Any) -> float:
        return (limit_of(opts) or self.network.timeout).total_seconds()


def _is_taken(op: Any, *tensors: torch.Tensor) -> bool:
    """Whether they are summed or gathered through memory. Only what is the same on all ranks decides, or what an error
    names where they differ in it: not the strides of this rank's tensor."""
    there = all(x.device.type == "cpu" and x.layout is torch.strided for x in tensors)
    numbers = tensors[0].dtype in DIVIDED and all(x.dtype == tensors[0].dtype for x in tensors)
    return there and numbers and bool(op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(elements), contiguous: a view of x, or a copy of a strided tensor or a negated view."""
    return x.detach().resolve_neg().contiguous().view(-1)


def _copy_into(result: torch.Tensor, x: torch.Tensor) -> None:
    """What :func:`_flat` copied from x, back into x."""
    if x.is_neg() or not x.is_contiguous():
        x.detach().copy_(result.view(x.shape))


class _CompletedWork(dist.Work):
    """The handle of a collective that has finished."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _create(options: Any, _: Any = None) -> NodeProcessGroup:
    return NodeProcessGroup(options)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
