"""When a run ends before its last iteration."""

from __future__ import annotations

import time

from smp.config import TrainingConfig
from smp.parallel.agree import any_rank, gather
from smp.training.runtime import StopSignal


class StopRules:
    """Signals, a clock and an interval. Made when the run begins.

    Args:
        training: settings.
        stop: told of signals.
    """

    def __init__(self, training: TrainingConfig, stop: StopSignal) -> None:
        self.training, self.stop = training, stop
        self._started = time.monotonic()

    def signalled(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop.name is not None

    def reason(self, iteration: int) -> str | None:
        """Why to end after ``iteration``, agreed upon by all ranks: a signal or a clock may reach one before others."""
        limit = self.training.exit_duration_in_mins
        timed_out = limit is not None and (time.monotonic() - self._started) / 60 >= limit
        if any_rank(self.signalled() or timed_out):
            if any(gather(self.signalled())):
                return f"stopped by {self.stop.name or 'a signal to another rank'}"
            return f"--exit-duration-in-mins {limit} reached"
        if due(iteration, self.training.exit_interval):
            return f"--exit-interval {self.training.exit_interval} reached"
        return None


def due(iteration: int, interval: int | None) -> bool:
    """Whether something that happens every ``interval`` iterations happens after this one."""
    return interval is not None and iteration % interval == 0
