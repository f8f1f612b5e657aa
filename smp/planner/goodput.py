"""Goodput of a run that fails at random: from the mean time between failures, the cost of a save and of a recovery.

Failures come as a Poisson process with mean M between two. After tau seconds of steps a save stops the run for C
seconds; after a failure it recovers in R seconds and goes on from its last save. Failures strike during saves and
recoveries, too. A segment of tau + C seconds then takes, on average,

    M e^(R/M) (e^((tau + C)/M) - 1)

seconds (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006). It fails
n = e^((tau + C)/M) - 1 times; each time a recovery takes M (e^(R/M) - 1), and what is lost in all is n M - tau - C.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_TOO_MANY = 700.0
"""Failures that are expected in a segment; e to a power above 709 is no float."""


@dataclass(frozen=True)
class Shares:
    """Of all time; they add up to 1."""

    productive: float
    save: float
    rerun: float
    recovery: float


def predicted_shares(interval: float, save: float, recovery: float, mtbf: float) -> Shares:
    """Where the time goes with ``interval`` seconds of steps between saves; all in one unit."""
    segment = (interval + save) / mtbf
    # All shares are over the failures of a segment, whose number may be too large for a float: no segment ends then.
    each = 1 / math.expm1(segment) if segment < _TOO_MANY else 0.0
    stepping = math.exp(-recovery / mtbf)
    productive, saving = (stepping * part / mtbf * each if each else 0.0 for part in (interval, save))
    return Shares(productive, saving, stepping - productive - saving, -math.expm1(-recovery / mtbf))


def simulated_share(
    interval: float, save: float, recovery: float, mtbf: float, segments: int, draw: random.Random
) -> float:
    """Productive share of a run of so many segments between saves, with drawn failures."""
    passed = 0.0
    for _ in range(segments):
        while (failure := draw.expovariate(1 / mtbf)) < interval + save:
            passed += failure
            while (failure := draw.expovariate(1 / mtbf)) < recovery:
                passed += failure
            passed += recovery
        passed += interval + save
    return segments * interval / passed
