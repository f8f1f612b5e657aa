"""Times of collectives and messages between processes of this machine, as a training step calls them.

In groups of as many ranks as the step's, all of them at once, on memory as it is in a step: what is sent was written
just before, and where it goes was not touched for long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.parallel.collectives import Group, start_shift, wait
from smp.parallel.links import Links
from smp.parallel.node_group import NAME
from smp.planner.operands import FarMemory
from smp.planner.record import FAR, Collective, TensorLike

REPEATS = 9
"""Measured calls of each collective."""


class Exchanges:
    """The groups in which collectives are timed. All processes make it, and call it with the same collectives.

    Args:
        far: where results go.
    """

    def __init__(self, far: FarMemory) -> None:
        self._far = far
        self._groups: dict[int, DeviceMesh] = {}
        self._links: dict[int, Links] = {}

    def time(self, call: Collective) -> float:
        """Seconds that a call takes of a rank: copies of its own tensors and waits of up to 0.1 ms."""
        mesh = self._mesh(call.ranks)
        run = self._message(call, mesh) if call.kind == "send" else self._collective(call, mesh)
        # Through memory a rank itself does all the work, and another program's turn on the processor is none of it;
        # gloo has threads, so only the clock says what it takes.
        clock = time.perf_counter if getattr(mesh.get_group(), "memory", None) is None else time.thread_time
        run(clock)  # the first call makes connections
        # Median: another process may have delayed one.
        return statistics.median(run(clock) for _ in range(REPEATS))

    def _mesh(self, ranks: int) -> DeviceMesh:
        """The mesh of this rank's group, where all ranks are in groups of so many neighbours."""
        if ranks not in self._groups:
            starts = range(0, dist.get_world_size(), ranks)
            groups = {start: dist.new_group(range(start, start + ranks), backend=NAME) for start in starts}
            own = groups[dist.get_rank() // ranks * ranks]
            self._groups[ranks] = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("ranks",))
        return self._groups[ranks]

    def _result(self, elements: int) -> torch.Tensor:
        return self._far.take(TensorLike((elements,), (1,), torch.float32))

    def _collective(self, call: Collective, mesh: DeviceMesh) -> Callable[[Callable[[], float]], float]:
        """A function that runs the collective once, on floats of as many bytes, and returns its seconds by a clock."""
        # Rounded up to whole floats per rank.
        part = -(-call.size // (4 * call.ranks))
        sent = torch.ones(part if call.kind == "all-gather" else part * call.ranks)
        into = {"reduce-scatter": part, "all-reduce": 0}.get(call.kind, part * call.ranks)
        group, run = Group.of(mesh), _CALLS[call.kind]

        def once(clock: Callable[[], float]) -> float:
            if call.far:
                self._far.use(FAR)
            # As the operator before it did: its result is still in this core's caches.
            sent.fill_(1)
            received = self._result(into)
            started = clock()
            run(received, sent, group)
            return clock() - started

        return once

    def _message(self, call: Collective, mesh: DeviceMesh) -> Callable[[Callable[[], float]], float]:
        """A function that sends a message to a neighbour and back, and returns the seconds of both copies of one."""
        if call.ranks not in self._links:
            self._links[call.ranks] = Links(mesh, [(0, 1), (1, 0)])
        links, here, sent = self._links[call.ranks], mesh.get_local_rank(), torch.ones(-(-call.size // 4))

        def once(clock: Callable[[], float]) -> float:
            if call.far:
                self._far.use(FAR)
            sent.fill_(1)
            received = self._result(sent.numel())
            started = clock()
            for source in (0, 1) if here < 2 else ():
                if here == source:
                    links.send(sent, 1 - here).wait()
                else:
                    links.receive(received, source).wait()
            return clock() - started

        return once


def _shift(_: torch.Tensor, sent: torch.Tensor, group: Group) -> None:
    wait(start_shift(sent, group, 1), group)


_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, Group], Any]] = {
    "all-gather": lambda into, sent, group: dist.all_gather_into_tensor(into, sent, group=group.process_group),
    "reduce-scatter": lambda into, sent, group: dist.reduce_scatter_tensor(into, sent, group=group.process_group),
    "all-to-all": lambda into, sent, group: dist.all_to_all_single(into, sent, group=group.process_group),
    "all-reduce": lambda _, sent, group: dist.all_reduce(sent, group=group.process_group),
    "shift": _shift,
}
