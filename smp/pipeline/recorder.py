"""Records when the actions of one step run, and gathers the records of all ranks into one timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from smp.pipeline.actions import Action
from smp.pipeline.timeline import Span, Timeline

Mark = float | torch.cuda.Event


@runtime_checkable
class Watcher(Protocol):
    """Observer of the actions of a rank."""

    def posted(self, receive: Action) -> None:
        """A receive begins."""

    def arrived(self, receive: Action) -> None:
        """Its message is here."""

    def running(self, action: Action) -> AbstractContextManager[None]:
        """Context manager around an action."""


class Recorder:
    """Records times: by the CPU's clock, or by events in the stream of a GPU, for which the host does not wait.

    The clocks of the ranks start together, behind a barrier; what a barrier leaves (microseconds on one machine, more
    between several) is the error of comparisons across ranks. A send is posted and not timed; a receive lasts from
    when it is posted until the computation that reads it has it.

    Args:
        group: the pipeline's ranks.
        device: what computes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._posted: dict[Action, Mark] = {}
        # Behind the barrier all ranks are at the same point; the device then ends what it had to do before, which would
        # else count as time of the first action.
        dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._zero = self._mark()

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        # Both are of the same kind: marks are floats on a CPU and events on a GPU.
        if isinstance(mark, float) and isinstance(self._zero, float):
            return mark - self._zero
        assert isinstance(mark, torch.cuda.Event) and isinstance(self._zero, torch.cuda.Event)
        return self._zero.elapsed_time(mark) / 1000

    def posted(self, receive: Action) -> None:
        """A receive begins."""
        self._posted[receive] = self._mark()

    def arrived(self, receive: Action) -> None:
        """Its message is here."""
        self._marks.append((receive, self._posted.pop(receive), self._mark()))

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Time what is inside."""
        start = self._mark()
        yield
        self._marks.append((action, start, self._mark()))

    def timeline(self) -> Timeline | None:
        """All ranks' spans, on pipeline rank 0; None elsewhere. Every rank calls it, after the step."""
        # An event has a time only after the stream has passed it. It is the one wait, and after the step.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        own = [Span(rank, action, self._seconds(start), self._seconds(end)) for action, start, end in self._marks]
        every: list[list[Span]] | None = [[] for _ in range(size)] if rank == 0 else None
        # Collective: every rank of the pipeline has to call it. ``group_dst`` is a rank of the
        # group, not of the world.
        dist.gather_object(own, every, group=self._group, group_dst=0)
        return None if every is None else Timeline(size, tuple(span for spans in every for span in spans))
