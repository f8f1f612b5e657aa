"""When to save."""

from __future__ import annotations

import time

from smp.checkpoint.retention import best_interval
from smp.config import CheckpointConfig
from smp.parallel.agree import any_rank, rank


class SaveClock:
    """When to save: by the iteration, or by the time since the last save and what it cost."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self.interval, self.mtbf_hours = settings.save_interval, settings.save_mtbf_hours
        self._cost: float | None = None
        self._last = time.monotonic()

    def due(self, iteration: int, busy: bool) -> bool:
        """Whether to save after ``iteration``; ``busy``: the last save is still under way."""
        if self.mtbf_hours is None:
            return self.interval is not None and iteration % self.interval == 0
        return not busy and any_rank(rank() == 0 and self._time_is_up(self.mtbf_hours))

    def _time_is_up(self, mtbf_hours: float) -> bool:
        if self._cost is None:
            return True
        return time.monotonic() - self._last >= best_interval(self._cost, 3600 * mtbf_hours)

    def saved(self, seconds: float) -> None:
        """A save stopped the training for so long."""
        self._cost, self._last = seconds, time.monotonic()
