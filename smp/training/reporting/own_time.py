"""What a rank takes for its own computation in a step, without the time in which it waits for others.

The seconds of a step tell nobody who is slow: in the next collective all ranks wait for the slowest one. On CPUs the
waits themselves are measured, where they happen: in memory that ranks share (``smp.parallel.shared_memory``) and at the
messages of a pipeline; the rest of a step is the rank's own. On CUDA the host waits for nothing, and the device waits
inside of NCCL's kernels: the own time of a step is the sum of all other kernels, which the profiler (CUPTI) records in
one step of each window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from smp.training.pipelined import Pipelined


class HostTime:
    """On CPUs: wall time without waits.

    Args:
        groups: all that a step exchanges through.
        pipeline: what waits for messages, if there is one.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], pipeline: Pipelined | None) -> None:
        # One entry per group: several meshes share one.
        memories = {group: getattr(group, "memory", None) for group in groups if group.size() > 1}
        self._memories = [memory for memory in memories.values() if memory is not None]
        self._pipeline = pipeline
        self.unseen = sorted({dist.get_backend(group) for group, memory in memories.items() if memory is None})
        """Backends of groups whose waits cannot be told from computation."""
        self.seconds = 0.0

    def _waited(self) -> float:
        return sum(memory.waited for memory in self._memories) + (self._pipeline.waited if self._pipeline else 0.0)

    @contextmanager
    def measured(self, iteration: int) -> Iterator[None]:
        """Context of a step; afterwards ``seconds`` is its own time."""
        waited, began = self._waited(), time.perf_counter()
        yield
        self.seconds = time.perf_counter() - began - (self._waited() - waited)


class KernelTime:
    """On CUDA: time of kernels that are not NCCL's, in the first of every ``every`` steps; the other steps are taken to
    have the same."""

    unseen: Sequence[str] = ()

    def __init__(self, every: int) -> None:
        self._every = every
        self.seconds = 0.0

    @contextmanager
    def measured(self, iteration: int) -> Iterator[None]:
        """Context of a step; afterwards ``seconds`` is its own time."""
        # 1 % every: iterations count from 1, and every = 1 profiles all.
        if iteration % self._every != 1 % self._every:
            yield
            return
        torch.cuda.synchronize()  # kernels of the step before are not this one's
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            yield
            # Kernels are recorded when they have ended.
            torch.cuda.synchronize()
        self.seconds = sum(_own_seconds(recorded))


def _own_seconds(recorded: torch.profiler.profile) -> Iterator[float]:
    for event in recorded.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        # NCCL's kernels include the wait for the slowest rank.
        if on_device and "nccl" not in event.name.lower() and not event.is_user_annotation:
            yield event.time_range.elapsed_us() / 1e6
