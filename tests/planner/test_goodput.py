"""The formulas for goodput against runs whose failures are drawn, Young's interval against all others, and what others
published."""

from __future__ import annotations

import pytest

from smp.checkpoint.folders.retention import best_interval
from smp.planner.goodput import Reliability, erlang_b, largest_of, predicted_shares
from tests.planner.goodput_runs import drawn_share

HOUR = 3600.0
CASES = [(6.0, 600.0, 11160.0), (120.0, 600.0, 11160.0), (0.5, 60.0, 840.0), (30.0, 900.0, 840.0)]
"""Seconds of a save, of a recovery, and between failures: 3.1 h is of 16,384 GPUs, 14 min of 131,072."""
RUNS = {
    "Llama 3's cluster": (Reliability(3.1 * HOUR, 6.0, 600.0, spares=16, repair=24 * HOUR, spread=0.01), 16384),
    "131,072 GPUs": (Reliability(840.0, 2.0, 120.0, spares=128, repair=24 * HOUR, spread=0.005), 131072),
    "no spare": (Reliability(20 * HOUR, 60.0, 900.0, repair=2 * HOUR, spread=0.02), 512),
    "nothing but failures": (Reliability(5 * HOUR, 30.0, 300.0), 1),
}


@pytest.mark.parametrize(("save", "recovery", "mtbf"), CASES)
def test_the_formula_is_what_drawn_failures_leave(save: float, recovery: float, mtbf: float) -> None:
    interval = best_interval(save, mtbf)
    predicted = predicted_shares(interval, save, recovery, mtbf)
    assert sum(vars(predicted).values()) == pytest.approx(1)
    what = Reliability(mtbf, save, recovery)
    drawn = drawn_share(what, interval, 1, segments=2_000, processes=1, runs=10, seed=1)
    assert predicted.productive == pytest.approx(drawn, rel=0.02)


def compare(name: str, runs: int, segments: int) -> float:
    """Relative difference of the formula and of drawn runs."""
    what, processes = RUNS[name]
    step = 5.0
    steps = max(1, round(best_interval(what.save, what.mtbf) / step))
    shares = what.shares(step * steps, processes)
    assert sum(vars(shares).values()) == pytest.approx(1)
    drawn = drawn_share(what, step, steps, segments=segments, processes=processes, runs=runs, seed=7)
    return shares.productive / drawn - 1


@pytest.mark.parametrize("name", ["no spare", "nothing but failures"])
def test_stragglers_spares_and_failures_are_as_drawn(name: str) -> None:
    assert abs(compare(name, runs=20, segments=500)) < 0.02


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_ten_thousand_drawn_runs_are_as_predicted(name: str) -> None:
    """Runs begin with all nodes there; long ones hardly notice."""
    error = compare(name, runs=10_000, segments=40)
    print(name, f"{100 * error:+.2f} %")
    assert abs(error) < 0.01


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


def test_known_values_of_telephone_exchanges_and_of_largest_numbers() -> None:
    """Erlang's table, and order statistics: of 2 the mean is 1 / sqrt(pi)."""
    assert erlang_b(1, 1.0) == pytest.approx(0.5) and erlang_b(10, 5.0) == pytest.approx(0.0184, abs=1e-4)
    assert erlang_b(3, 0.0) == 0
    assert largest_of(1) == pytest.approx(0, abs=1e-6) and largest_of(2) == pytest.approx(0.56419, abs=1e-4)
    assert largest_of(1000) == pytest.approx(3.2414, abs=1e-3)


def test_published_goodput_lies_where_the_formula_has_it() -> None:
    """Llama 3: 419 unexpected interruptions in 54 days of 16,384 GPUs and over 90 % of effective time, which is a
    recovery of up to a quarter of an hour. FT-HSDP: 100,000 GPUs, 44 % with recoveries of 10 minutes."""
    mtbf = 54 * 24 * HOUR / 419
    assert mtbf == pytest.approx(3.09 * HOUR, rel=0.01)
    quick, slow = (
        predicted_shares(best_interval(6.0, mtbf), 6.0, minutes * 60, mtbf).productive for minutes in (10, 15)
    )
    assert slow > 0.88 and quick > 0.9 and slow < 0.92
    # Meta's projection for 131,072 GPUs is 14 minutes.
    mtbf = 14 * 60 * 131072 / 100_000
    stalled = predicted_shares(best_interval(30.0, mtbf), 30.0, 600.0, mtbf).productive
    assert stalled == pytest.approx(0.44, abs=0.03)
