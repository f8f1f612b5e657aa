"""Goodput of a run with random failures, waits for its slowest process, and spare nodes.

Failures come as a Poisson process with mean M between two. After tau seconds of steps a save stops the run for C
seconds; after a failure it recovers in R seconds and continues from its last save. Failures strike during saves and
recoveries, too. A segment of tau + C seconds then takes, on average,

    M e^(R/M) (e^((tau + C)/M) - 1)

seconds (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006). It fails
n = e^((tau + C)/M) - 1 times; each time a recovery takes M (e^(R/M) - 1), and what is lost in all is n M - tau - C.

A node that failed is repaired in a mean time T, and with s spares the run waits when s + 1 are away. While it waits
nothing fails, so nodes away are the calls of a telephone exchange with s + 1 lines: the share of time that it waits is
Erlang's B of s + 1 and T / M, whatever the distribution of repair times. The rest of the time is as above.

A step ends with its slowest process. With n processes whose times have standard deviation d (of a mean of 1), the mean
step takes 1 + d E(n), E(n) being the mean of the largest of n standard normal numbers: 4.4 of 100,000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_TOO_MANY = 700.0
"""Largest expected number of failures (in mean times between failures) of a segment; exp of more than 709 overflows."""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """Shares of all time, which add up to 1.

    Attributes:
        waiting: for the slowest process.
        repair: for a node, when no spare is left.
    """

    productive: float
    save: float
    rerun: float
    recovery: float
    waiting: float = 0.0
    repair: float = 0.0


@dataclass(frozen=True)
class Reliability:
    """How reliable a run's machines are; times in seconds.

    Attributes:
        mtbf: mean time between failures of the whole run.
        save: how long a save stops the run.
        recovery: from a failure to the first step of the next start.
        spares: nodes that replace those that failed.
        repair: mean time until a node that failed is back; 0: at once.
        spread: standard deviation of a process's step time, as a share of it.
    """

    mtbf: float
    save: float
    recovery: float
    spares: int = 0
    repair: float = 0.0
    spread: float = 0.0

    def shares(self, interval: float, processes: int = 1) -> Shares:
        """Where the time goes with ``interval`` seconds of steps between two saves. The interval includes waits for the
        slowest process."""
        # Without spares' waits: the formula of the module's docstring.
        running = predicted_shares(interval, self.save, self.recovery, self.mtbf)
        stopped = erlang_b(self.spares + 1, self.repair / self.mtbf)
        # Nothing fails while the run waits for a repair, so its share comes off all others.
        parts = {name: value * (1 - stopped) for name, value in vars(running).items()}
        # Productive time is stretched by the slowest process: the difference is waiting.
        working = parts["productive"] / slowest(processes, self.spread)
        parts |= {"productive": working, "waiting": parts["productive"] - working, "repair": stopped}
        return replace(running, **parts)


def predicted_shares(interval: float, save: float, recovery: float, mtbf: float) -> Shares:
    """Where the time goes with ``interval`` seconds of steps between two saves; all times in one unit."""
    segment = (interval + save) / mtbf
    # All shares are over the failures of a segment, whose number may be too large for a float: no segment ends then.
    each = 1 / math.expm1(segment) if segment < _TOO_MANY else 0.0
    # Recoveries take n M (e^(R/M) - 1) of n M e^(R/M) seconds: a share of e^(-R/M) is left.
    stepping = math.exp(-recovery / mtbf)
    # interval / (M (e^segment - 1)), times what recovery leaves; saves likewise.
    productive, saving = (stepping * part / mtbf * each if each else 0.0 for part in (interval, save))
    return Shares(productive, saving, stepping - productive - saving, -math.expm1(-recovery / mtbf))


def erlang_b(lines: int, load: float) -> float:
    """Erlang's B: the share of time that all ``lines`` are busy; ``load`` is the mean number of calls with enough
    lines."""
    # The usual recursion over lines, which does not overflow as factorials would.
    blocked = 1.0
    for line in range(1, lines + 1):
        blocked = load * blocked / (line + load * blocked)
    return blocked


def slowest(processes: int, spread: float) -> float:
    """Mean of the slowest of ``processes`` times with mean 1 and standard deviation ``spread``."""
    return 1 + spread * largest_of(processes) if spread else 1.0


def largest_of(count: int) -> float:
    """Mean of the largest of ``count`` standard normal numbers."""
    # 9 standard deviations: beyond, the tail of 10^9 processes is below 1e-9.
    points = np.linspace(0, 9, 1801)
    # E[X] = integral over x > 0 of P(X > x) - P(X < -x).
    above, below = 1 - _normal(points) ** count, _normal(-points) ** count
    return float(np.trapezoid(above - below, points))


def _normal(points: Numbers) -> Numbers:
    """The normal distribution function at each point."""
    return np.array([0.5 * math.erfc(-point / math.sqrt(2)) for point in points])
