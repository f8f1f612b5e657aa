"""Devices that are not there: copies that run when a test's clock or its worst case says."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch

from smp.kernels.copier import Copier, Event

Order = Literal["early", "late"]


@dataclass(eq=False)
class _Task:
    """A copy under way. What it reads and writes may be freed before it runs, which a device would not notice."""

    source: weakref.ref[torch.UntypedStorage]
    target: weakref.ref[torch.UntypedStorage]
    views: tuple[Any, Any]
    after: _Task | None
    queue: str
    done: bool = False


class QueueCopier(Copier):
    """Two queues of copies, beside computation that runs at once. A queue runs each copy ``early``, where it is issued,
    or ``late``, when somebody waits for it: between the two lies all that a device may do. A copy from memory that was
    freed brings NaN, and memory is NaN until it is written.

    Args:
        out, back: of copies to the host and from it.
        forget: waits that are left out, as a bug would: "use" of what came, "free" of what leaves, or "reuse" of
            memory of the host.
    """

    def __init__(self, out: Order, back: Order, forget: str = "") -> None:
        super().__init__()
        self.orders: dict[str, Order] = {"out": out, "back": back}
        self.queues: dict[str, deque[_Task]] = {"out": deque(), "back": deque()}
        self.forget = forget

    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN as floating point

    def wait(self, event: Event) -> None:
        forgotten = {"back": "use", "out": "free"}[event.queue]
        if self.forget != forgotten:
            self._run_until(event)

    def host_wait(self, event: Event) -> None:
        self._run_until(event)

    def _copy(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        if way == "back":
            target.view(torch.uint8).fill_(255)
        if way == "out" and self.forget == "reuse":
            after = None
        references = weakref.ref(source.untyped_storage()), weakref.ref(target.untyped_storage())
        views = _place(source), _place(target)
        task = _Task(*references, views, after, way)
        self.queues[way].append(task)
        if self.orders[way] == "early":
            self._run_until(task)
        return task

    def _run_until(self, task: _Task) -> None:
        queue = self.queues[task.queue]
        while not task.done:
            first = queue[0]
            if first.after is not None:
                self._run_until(first.after)
            _run(first)
            queue.popleft()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and size within the storage."""
    return tensor.storage_offset() * tensor.itemsize, tensor.nbytes


def _run(task: _Task) -> None:
    task.done = True
    source, target = task.source(), task.target()
    if target is None:
        return  # written into memory that is something else by now: nothing of it is ours to see
    (start, size), (there, _) = task.views
    bytes_ = _bytes(target)[there : there + size]
    if source is None:
        bytes_.fill_(255)
    else:
        bytes_.copy_(_bytes(source)[start : start + size])


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@dataclass(eq=False)
class _At:
    """When a copy ends."""

    end: float


class ClockCopier(Copier):
    """Computation and the two directions of a link in simulated time. Copies are made at once.

    Args:
        rate: bytes per second of each direction.

    Attributes:
        now: when all that was issued is computed.
        waited: of that, what computation waited for copies.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.now, self.waited = rate, 0.0, 0.0
        self.free = {"out": 0.0, "back": 0.0}

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def wait(self, event: Event) -> None:
        late = max(0.0, event.end - self.now)
        self.now += late
        self.waited += late

    host_wait = wait

    def _copy(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        target.copy_(source)
        start = max(self.free[way], self.now, 0.0 if after is None else after.end)
        self.free[way] = start + source.nbytes / self.rate
        return _At(self.free[way])
