"""The formula for goodput against drawn failures, and Young's interval against all others."""

from __future__ import annotations

import random

import pytest

from smp.checkpoint.folders.retention import best_interval
from smp.planner.goodput import predicted_shares, simulated_share

CASES = [(6.0, 600.0, 11160.0), (120.0, 600.0, 11160.0), (0.5, 60.0, 840.0), (30.0, 900.0, 840.0)]
"""Seconds of a save, of a recovery, and between failures: 3.1 h is of 16,384 GPUs, 14 min of 131,072."""


@pytest.mark.parametrize(("save", "recovery", "mtbf"), CASES)
def test_the_formula_is_what_drawn_failures_leave(save: float, recovery: float, mtbf: float) -> None:
    interval = best_interval(save, mtbf)
    predicted = predicted_shares(interval, save, recovery, mtbf)
    assert sum(vars(predicted).values()) == pytest.approx(1)
    drawn = simulated_share(interval, save, recovery, mtbf, 50_000, random.Random(1))
    assert predicted.productive == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize(("save", "recovery", "mtbf"), CASES)
def test_no_interval_is_much_better_than_the_suggested_one(save: float, recovery: float, mtbf: float) -> None:
    def share(interval: float) -> float:
        return predicted_shares(interval, save, recovery, mtbf).productive

    best = max(share(10 ** (i / 50)) for i in range(250))
    assert share(best_interval(save, mtbf)) >= 0.995 * best


def test_saves_that_cost_nothing_and_failures_without_end() -> None:
    free = predicted_shares(10.0, 0.0, 60.0, 3600.0)
    assert free.save == 0 and free.productive == pytest.approx(0.98, abs=0.005)
    for hopeless in (predicted_shares(1e6, 2.0, 60.0, 100.0), predicted_shares(1.0, 2.0, 1e6, 1e-300)):
        assert hopeless.productive == 0 and sum(vars(hopeless).values()) == pytest.approx(1)
