"""Runs that fail at random, event by event: what the formulas of smp/planner/goodput.py are checked against."""

from __future__ import annotations

import heapq
from statistics import NormalDist

import numpy as np

from smp.planner.goodput import Numbers, Reliability

POINTS = np.linspace(-9, 9, 3601)
BELOW = np.array([NormalDist().cdf(point) for point in POINTS])


def drawn_share(
    what: Reliability, step: float, steps: int, *, segments: int, processes: int, runs: int, seed: int
) -> float:
    """Productive share of all runs together, each of so many segments of ``steps`` steps and a save. A process's step
    takes ``step`` seconds on average."""
    draw = np.random.default_rng(seed)
    passed = sum(one_run(what, step, steps, segments, processes, draw) for _ in range(runs))
    return step * steps * segments * runs / passed


def one_run(
    what: Reliability, step: float, steps: int, segments: int, processes: int, draw: np.random.Generator
) -> float:
    """Seconds until its last save is done."""
    clock, away = 0.0, list[float]()  # when each node that failed is back
    for _ in range(segments):
        while (failure := draw.exponential(what.mtbf)) < (took := segment(what, step, steps, processes, draw)):
            clock = recovered(what, clock + failure, away, draw)
        clock += took
    return clock


def segment(what: Reliability, step: float, steps: int, processes: int, draw: np.random.Generator) -> float:
    """Seconds of steps that end with their slowest process, and of the save after them."""
    if not what.spread:
        return step * steps + what.save
    # The largest of n numbers is below a point with the n-th power of one number's probability.
    largest: Numbers = np.interp(draw.random(steps) ** (1 / processes), BELOW, POINTS)
    return float(step * (1 + what.spread * largest).sum()) + what.save


def recovered(what: Reliability, clock: float, away: list[float], draw: np.random.Generator) -> float:
    """The time when a run that failed goes on. Failures strike again while it recovers, not while it waits."""
    while True:
        heapq.heappush(away, clock + draw.exponential(what.repair))
        while away and away[0] <= clock:
            heapq.heappop(away)
        if len(away) > what.spares:
            clock = heapq.heappop(away)
        if (failure := draw.exponential(what.mtbf)) >= what.recovery:
            return clock + what.recovery
        clock += failure
