"""The time of a rank's own computation in a step, without waiting for others.

The seconds of a step tell nobody who is slow: in the next collective all ranks wait for the slowest one. On CPUs the
waits themselves are measured, where they happen: in memory that ranks share (``smp.parallel.shared_memory``) and at the
messages of a pipeline. The rest of a step is the rank's own but for the time in which it had no processor: Linux counts
for each thread how long it could have run while another one did. That is the host's fault, and is told apart. On CUDA
the host waits for nothing, and the device waits inside of NCCL's kernels: the own time of a step is the sum of all
other kernels, which the profiler (CUPTI) records in one step of each window.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from smp.training.pipelined import Pipelined


class _Delay:
    """How long this thread could have run, but had no processor. Systems other than Linux do not say."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """So far; 0 where the system does not say."""
        # Nanoseconds on a processor, nanoseconds of waiting for one, number of turns.
        return 0.0 if self._file is None else int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Close the system's file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class HostTime:
    """On CPUs: wall time without waits for others, and without those for a processor.

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
        self._delay = _Delay()
        self.seconds = self.delayed = 0.0

    def close(self) -> None:
        self._delay.close()

    def _waited(self) -> float:
        return sum(memory.waited for memory in self._memories) + (self._pipeline.waited if self._pipeline else 0.0)

    @contextmanager
    def measured(self, iteration: int) -> Iterator[None]:
        """Context of a step; afterwards ``seconds`` is its own time, and ``delayed`` that without a processor."""
        waited, delayed, used, began = self._waited(), self._delay.seconds(), time.thread_time(), time.perf_counter()
        yield
        own = time.perf_counter() - began - (self._waited() - waited)
        # A rank that is woken from a wait may have no processor at once, which is a part of the wait. So the delay is
        # at most the time in which the thread neither waited for others nor ran.
        idle = own - (time.thread_time() - used)
        self.delayed = min(max(idle, 0.0), self._delay.seconds() - delayed)
        self.seconds = own - self.delayed


class KernelTime:
    """On CUDA: time of kernels that are not NCCL's, in the first of every ``every`` steps; the other steps are taken to
    have the same."""

    unseen: Sequence[str] = ()
    delayed = 0.0
    """Not measured: the device computes while the host waits."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.seconds = 0.0

    def close(self) -> None:
        """Nothing is open."""

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
