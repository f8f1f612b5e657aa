"""--profile: a torch profiler trace and a memory snapshot of some iterations. --trace-pipeline: when actions ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from smp.config import Config, TrainingConfig
from smp.parallel.agree import rank
from smp.pipeline.timeline import to_trace
from smp.training.pipelined import Pipelined


class Profiler:
    """Records the iterations from ``profile_step_start`` up to, but not including, ``profile_step_end``; in a run that
    starts after the first, as many from its own start on.

    Each rank writes ``<log-dir>/profile/rank_NNNNN.trace.json`` (Chrome trace: chrome://tracing, Perfetto) and a memory
    snapshot: on CUDA torch's own (``rank_NNNNN.memory.pickle``, for pytorch.org/memory_viz), elsewhere the profiler's
    table of operators by memory (``rank_NNNNN.memory.txt``). Without --profile it does nothing.
    """

    def __init__(self, config: TrainingConfig, log_dir: Path, rank: int) -> None:
        self._config = config
        self._stem = log_dir / "profile" / f"rank_{rank:05d}"
        self._profile: profile | None = None
        self._until: int | None = None  # the iteration before which to stop, once started

    def step(self, iteration: int) -> None:
        """Call before iteration ``iteration`` starts."""
        if not self._config.profile:
            return
        start, end = self._config.profile_step_start, self._config.profile_step_end
        if self._until is None and iteration >= start:
            # As many iterations as asked for, also in a run that resumed after the first of them.
            # ``end`` is exclusive, as Megatron's --profile-step-end.
            self._until = iteration + end - start
            self._start()
        elif iteration == self._until:
            self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            # From here on: what was allocated before has no stack in the snapshot.
            torch.cuda.memory._record_memory_history()
        self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._profile.start()

    def close(self) -> None:
        """Stop, and write what is recorded."""
        if self._profile is None:
            return
        self._profile.stop()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(f"{self._stem}.trace.json")
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{self._stem}.memory.pickle")
            # Off again: the history costs time at each allocation.
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            table = self._profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=50)
            Path(f"{self._stem}.memory.txt").write_text(table)
        self._profile = None


class PipelineTrace:
    """The timeline of one iteration, the first of the run from ``profile_step_start`` on, in
    ``<log-dir>/pipeline_trace.json``. Without --trace-pipeline it does nothing."""

    def __init__(self, config: Config, pipeline: Pipelined | None, say: Callable[[str], None]) -> None:
        self.config, self.pipeline, self.say = config, pipeline, say
        self._waits = config.training.trace_pipeline

    @contextmanager
    def of(self, iteration: int) -> Iterator[None]:
        """Context of a step, which is recorded if it is the one asked for."""
        if not self._waits or iteration < self.config.training.profile_step_start:
            yield
            return
        self._waits = False
        assert self.pipeline is not None, "checked with the settings"
        self.pipeline.record()
        # Every rank records: ``recorded`` gathers the times.
        yield
        timeline = self.pipeline.recorded()
        if timeline is not None and rank() == 0:
            path = Path(self.config.logging.log_dir) / "pipeline_trace.json"
            title = f"{self.config.parallel.pipeline_schedule}, iteration {iteration}"
            path.write_text(json.dumps(to_trace(timeline, title)))
            self.say(f"wrote {path}: bubble {100 * timeline.bubble_fraction:.1f} % of the step")
