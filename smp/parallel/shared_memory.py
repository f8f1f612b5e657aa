"""Sums and gathers of CPU tensors among ranks of one machine, through memory that they share: ``smp_node``.

    import smp.parallel.shared_memory
    torch.distributed.new_group(ranks, backend="smp_node")

gloo sends every byte through the system's sockets: a sum of 256 KiB over two ranks takes 1 to 1.5 ms, through memory
0.1 ms. Each rank copies its tensor to a place of its own, counts up, waits until the others have counted, and reads
theirs. There are two places for each rank, used in turns: who has counted twice since has read the first one.

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
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from smp.parallel.backend import DIVIDED, NetworkProcessGroup, alike_on_cpu, limit_of, options_of
from smp.parallel.network.group import CollectiveError

NAME = "smp_node"
PLACE = 1 << 22
"""Bytes of a place; larger tensors go in several turns. Pages that nothing was written to take no memory."""
_LINE = 16
"""Numbers (int64) of the counters of one rank, in cache lines of their own: collectives begun, and whether it left."""
_HEADER = 1 << 16
_Limit = Callable[[], float]
"""Seconds until a late rank is an error, asked for only while one is late."""
_SPINS = 3000
"""Looks at a counter, about 0.1 ms, before the processor is offered to others."""


class Memory:
    """What the ranks of one group share.

    Args:
        memory: counters, then 2 x size places.
        processes: descriptors of the other ranks' processes, by rank; they become readable when one ends.
    """

    def __init__(self, rank: int, size: int, memory: mmap.mmap, processes: dict[int, int]) -> None:
        self.rank, self.size = rank, size
        self._counters = memoryview(memory).cast("q")
        self._places = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER).view(2, size, PLACE)
        self._turn, self._processes = 0, processes
        self._close = weakref.finalize(self, _close_all, tuple(processes.values()))
        self._failure = ""

    def all_reduce(self, x: torch.Tensor, limit: _Limit) -> None:
        """(n), the sum over all ranks in the order of ranks, in place; 16-bit numbers are rounded once."""
        for part in x.split(PLACE // x.itemsize):
            places = self._next(part.nbytes, x.dtype)
            places[self.rank].copy_(part)
            self._meet(limit, "all-reduce", x.nbytes)
            _add(places, part)

    def all_gather(self, output: torch.Tensor, x: torch.Tensor, limit: _Limit) -> None:
        """(n) of every rank -> (size x n)."""
        columns = PLACE // x.itemsize
        for part, into in zip(x.split(columns), output.view(self.size, -1).split(columns, 1), strict=True):
            places = self._next(part.nbytes, x.dtype)
            places[self.rank].copy_(part)
            self._meet(limit, "all-gather", output.nbytes)
            into.copy_(places)

    def reduce_scatter(self, output: torch.Tensor, x: torch.Tensor, limit: _Limit) -> None:
        """(size x n) of every rank -> this rank's (n) of the sum."""
        columns = PLACE // x.itemsize // self.size
        for part, into in zip(x.view(self.size, -1).split(columns, 1), output.split(columns), strict=True):
            places = self._next(part.nbytes, x.dtype).view(self.size, *part.shape)
            places[self.rank].copy_(part)
            self._meet(limit, "reduce-scatter", x.nbytes)
            _add(places[:, self.rank], into)

    def leave(self) -> None:
        """The others need not wait for this rank any more."""
        self._counters[self.rank * _LINE + 1] = 1
        self._close()

    def _next(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The places of this turn, (ranks, size in bytes / that of dtype)."""
        if self._failure:
            raise CollectiveError(f"an earlier collective of this group failed: {self._failure}")
        self._turn += 1
        return self._places[self._turn & 1][:, :size].view(dtype)

    def _meet(self, limit: _Limit, what: str, size: int) -> None:
        """Say that this rank's tensor is there, and wait for those of the others."""
        counters, turn = self._counters, self._turn
        counters[self.rank * _LINE] = turn
        for other in range(self.size):
            spins = 0
            while counters[other * _LINE] < turn:
                spins += 1
                if spins > _SPINS:
                    self._wait(other, limit, what, size)

    def _wait(self, other: int, limit: _Limit, what: str, size: int) -> None:
        """For a rank that is not there soon."""
        counter, turn = other * _LINE, self._turn
        started = time.monotonic()
        ends = select.poll()
        ends.register(self._processes[other], select.POLLIN)
        while self._counters[counter] < turn:
            passed = time.monotonic() - started
            if passed < 1e-3:
                os.sched_yield()
                continue
            gone = bool(ends.poll(0)) or bool(self._counters[counter + 1])
            if (gone or passed > limit()) and self._counters[counter] < turn:
                why = "its process ended, or it left the group" if gone else "it is late, or waits for one that is"
                self._failure = (
                    f"{what} of {size:,} bytes failed after {passed:.1f} s on rank {self.rank} of {self.size} on "
                    f"{socket.gethostname()}: rank {other} of the group has not come: {why}"
                )
                raise CollectiveError(self._failure)
            time.sleep(5e-5)


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _add(places: torch.Tensor, into: torch.Tensor) -> None:
    """(ranks, n) -> (n), in the order of ranks."""
    if len(places) > 2 and into.itemsize == 2:
        total = places[0].float()
        for place in places[1:]:
            total.add_(place)
        into.copy_(total)
        return
    torch.add(places[0], places[1], out=into)
    for place in places[2:]:
        into.add_(place)


def join(rank: int, size: int, store: Any) -> Memory | None:
    """Memory that all ranks of a group see, or None on every one of them. Every rank calls this.

    It has no name: rank 0's descriptor is opened through /proc, which ranks elsewhere (another machine, a container)
    cannot, or they find another secret behind it. It is gone with the last process that has it.
    """
    memory, secret = None, secrets.token_hex(16)
    able = platform.machine() == "x86_64" and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC) if able and rank == 0 else -1
    try:
        if descriptor >= 0:
            os.ftruncate(descriptor, _HEADER + 2 * size * PLACE)
            os.pwrite(descriptor, secret.encode(), _HEADER - len(secret))
        if rank == 0:
            store.set("memory", json.dumps([f"/proc/{os.getpid()}/fd/{descriptor}", secret]))
        path, secret = json.loads(store.get("memory"))
        memory = _open(path, secret) if able else None
        store.set(f"process {rank}", str(os.getpid() if memory is not None else 0))
        # Also what keeps rank 0's descriptor open until all have opened it.
        processes = [int(store.get(f"process {other}")) for other in range(size)]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if memory is None or 0 in processes:
        return None
    return Memory(rank, size, memory, {r: os.pidfd_open(pid) for r, pid in enumerate(processes) if r != rank})


def _open(path: str, secret: str) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(descriptor, len(secret), _HEADER - len(secret)) != secret.encode():
            return None
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


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
        x = given[0].detach()
        if self.memory is None or len(given) > 1 or not _is_taken(x, opts.reduceOp):
            return super().allreduce(tensors, opts)
        self.counts["memory all-reduce"] += 1
        ordered = x if x.is_contiguous() else x.contiguous()
        self.memory.all_reduce(ordered.view(-1), partial(self._seconds, opts))
        self._divide(ordered, opts)
        if ordered is not x:
            x.copy_(ordered)
        return _Done(list(given))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n) of every rank -> (n x ranks)."""
        opts = options_of(AllgatherOptions, opts, more)
        fits = alike_on_cpu(output, given) and output.numel() == self.size() * given.numel()
        if self.memory is None or not fits or not _is_taken(given):
            return super().all_gather_single(output, given, opts)
        self.counts["memory all-gather"] += 1
        self.memory.all_gather(output.detach().view(-1), given.detach().view(-1), partial(self._seconds, opts))
        return _Done([output])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n x ranks) of every rank -> (n) of the sum."""
        opts = options_of(dist.ReduceScatterOptions, opts, more)
        fits = alike_on_cpu(output, given) and given.numel() == self.size() * output.numel()
        if self.memory is None or not fits or not _is_taken(given, opts.reduceOp):
            return super().reduce_scatter_single(output, given, opts)
        self.counts["memory reduce-scatter"] += 1
        self.memory.reduce_scatter(output.detach().view(-1), given.detach().view(-1), partial(self._seconds, opts))
        self._divide(output.detach(), opts)
        return _Done([output])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _seconds(self, opts: Any) -> float:
        return (limit_of(opts) or self.network.timeout).total_seconds()

    def _divide(self, x: torch.Tensor, opts: Any) -> None:
        if opts.reduceOp == dist.ReduceOp.AVG:
            x.div_(self.size())


def _is_taken(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
    """Whether it is summed or gathered through memory: by what is the same on all ranks."""
    there = x.device.type == "cpu" and x.layout is torch.strided and x.numel() > 0
    plain = there and x.dtype in DIVIDED and not x.is_neg()
    return plain and bool(op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG)


class _Done(dist.Work):
    """The handle of what is done."""

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
