"""When a run saves, and when it ends before its last iteration."""

from __future__ import annotations

import time

from smp.checkpoint.folders.retention import best_interval
from smp.config import CheckpointConfig, TrainingConfig
from smp.parallel.agree import any_rank, gather, rank
from smp.training.runtime import StopSignal


class StopRules:
    """Decides when a run ends early: signals, a time limit and --exit-interval. Made when the run begins."""

    def __init__(self, training: TrainingConfig, stop: StopSignal) -> None:
        self.training, self.stop, self.heard = training, stop, False
        self._started = time.monotonic()

    def signalled(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop.name is not None

    def reason(self, iteration: int) -> str | None:
        """Why to end after ``iteration``, agreed upon by all ranks: a signal or a clock may reach one before others."""
        limit = self.training.exit_duration_in_mins
        timed_out = limit is not None and (time.monotonic() - self._started) / 60 >= limit
        # One small collective for each step; why is asked only when there is a reason.
        # Clocks differ between hosts: one rank's limit counts for all.
        if any_rank(self.signalled() or timed_out):
            if any(gather(self.signalled())):
                self.heard = True
                return f"stopped by {self.stop.name or 'a signal to another rank'}"
            return f"--exit-duration-in-mins {limit} reached"
        if due(iteration, self.training.exit_interval):
            return f"--exit-interval {self.training.exit_interval} reached"
        return None


class SaveClock:
    """When to save: by the iteration, or by the time since the last save and what it cost."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self.interval, self.mtbf_hours = settings.save_interval, settings.save_mtbf_hours
        self._cost: float | None = None
        self._last = time.monotonic()

    def due(self, iteration: int, busy: bool) -> bool:
        """Whether to save after ``iteration``; ``busy``: the last save is still under way."""
        if self.mtbf_hours is None:
            return due(iteration, self.interval)
        # Rank 0's clock decides.
        return not busy and any_rank(rank() == 0 and self._time_is_up(self.mtbf_hours))

    def _time_is_up(self, mtbf_hours: float) -> bool:
        # The first save shows what a save costs.
        if self._cost is None:
            return True
        return time.monotonic() - self._last >= best_interval(self._cost, 3600 * mtbf_hours)

    def saved(self, seconds: float) -> None:
        """Note that a save stopped the training for so many seconds."""
        self._cost, self._last = seconds, time.monotonic()


def due(iteration: int, interval: int | None) -> bool:
    """Whether something that happens every ``interval`` iterations happens after this one."""
    return interval is not None and iteration % interval == 0
