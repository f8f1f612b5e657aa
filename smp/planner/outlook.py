"""The cost of training on a number of tokens: days, GPU hours, money, energy; with the time that failures leave."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smp.checkpoint.folders.retention import best_interval
from smp.planner.goodput import Reliability, Shares, slowest

DAY = 86400.0


@dataclass(frozen=True)
class Outlook:
    """The cost of a whole run.

    Attributes:
        price: in the unit of the price of a GPU hour; None: no price is known.
        megawatt_hours: None: nobody said what a GPU takes.
    """

    days: float
    gpu_hours: float
    price: float | None
    megawatt_hours: float | None

    @staticmethod
    def of(
        tokens: float, per_second: float, gpus: int, goodput: float, price: float | None, watts: float | None
    ) -> Outlook:
        """The outlook for ``tokens``, at ``per_second`` of all GPUs while they train, which is ``goodput`` of the
        time."""
        # Goodput 0: no interval between failures is long enough.
        seconds = tokens / per_second / goodput if goodput > 0 else math.inf
        hours = seconds / 3600 * gpus
        return Outlook(
            seconds / DAY,
            hours,
            None if price is None else hours * price,
            None if watts is None else hours * watts / 1e6,
        )

    def __str__(self) -> str:
        parts = [f"{self.days:,.1f} days", f"{self.gpu_hours:,.0f} GPU hours"]
        parts += [] if self.price is None else [f"a price of {self.price:,.0f}"]
        parts += [] if self.megawatt_hours is None else [f"{self.megawatt_hours:,.1f} MWh"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Saving:
    """How often to save.

    Attributes:
        steps: between two saves.
        seconds: of these steps.
        shares: where the time goes with that.
    """

    steps: int
    seconds: float
    shares: Shares

    @staticmethod
    def best(what: Reliability, step: float, processes: int) -> Saving:
        """The best interval for steps of ``step`` seconds on the average process."""
        # A step takes as long as its slowest process.
        took = step * slowest(processes, what.spread)
        # Young's and Daly's interval is in seconds: rounded to whole steps.
        steps = max(1, round(best_interval(what.save, what.mtbf) / took))
        return Saving(steps, steps * took, what.shares(steps * took, processes))
