"""docs/planning-errors.md is what the formula says of the published runs, and as good as it claims."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from smp.planner.devices import DEVICES, ShareErrors
from smp.planner.published.errors import PAGE, factors, page, percentile, row_of
from smp.planner.published.fit import cost, scaled
from smp.planner.published.runs import Factors, Run, runs, sources
from smp.planner.step_time import StepModel

ROOT = Path(__file__).parents[2]


def listed() -> str:
    return (ROOT / PAGE).read_text(encoding="utf-8")


def test_every_run_has_a_source_and_a_third_is_held_out() -> None:
    rows = runs()
    assert len(rows) >= 60 and {run.source for run in rows} == set(sources())
    assert all(one.address for one in sources().values())
    assert 0.28 < sum(run.held_out for run in rows) / len(rows) < 0.38
    # A run says once what came out of it.
    said = Counter(repr([v for k, v in vars(run).items() if k not in ("tokens", "tflops")]) for run in rows)
    assert max(said.values()) == 1
    assert all((run.tokens is None) != (run.tflops is None) for run in rows)


def test_what_is_held_out_does_not_depend_on_what_came_out() -> None:
    run = runs()[0]
    words = {name: getattr(run, name) for name in ("source", "gpu", "gpus", "model", "seq", "gbs")}
    assert len({Run(**words, tokens=tokens).held_out for tokens in (1.0, 2.0, 3.0, 4.0, 5.0)}) == 1


QUICK = [run for run in runs() if run.pp * run.vp <= 2][::12]
"""Without long pipelines, which take seconds to simulate."""


@pytest.mark.parametrize("run", QUICK, ids=lambda run: f"{run.source}-{run.model}-{run.gpus}")
def test_the_page_has_what_is_predicted(run: Run) -> None:
    assert row_of(run).line() in listed(), "run: python -m smp.planner.published.errors"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_page_is_current() -> None:
    assert page([row_of(run) for run in runs()]) == listed(), "run: python -m smp.planner.published.errors"


def test_held_out_errors_are_within_their_bounds() -> None:
    """By the lines of the page: median 8 %, 90th percentile 20 %."""
    rows = [line.split("|") for line in listed().splitlines() if line.count("|") == 10 and " % |" in line]
    errors = sorted(abs(float(re.sub("[ %]", "", row[8]))) for row in rows if row[9].strip() == "held out")
    assert len(rows) == len(runs()) and len(errors) == sum(run.held_out for run in runs())
    assert percentile(errors, 0.5) <= 8
    assert percentile(errors, 0.9) <= 20


def test_errors_of_shares_are_those_of_the_fitted_factors() -> None:
    """And the docs say of the interval what the page has counted."""
    names = {"product": "product_share", "attention": "attention_share", "memory": "memory_share", "link": "link_share"}
    for share, name in names.items():
        logs = [math.log(getattr(one, name)) for one in factors().values()]
        rms = math.sqrt(sum(value**2 for value in logs) / len(logs))
        assert getattr(ShareErrors(), share) == pytest.approx(rms, abs=0.005), share
    rows = [line.split("|") for line in listed().splitlines() if line.count("|") == 10 and " % |" in line]
    used = [abs(float(re.sub("[ %]", "", row[8]))) for row in rows if not row[9].strip()]
    assert sum(error <= 100 * ShareErrors().formula for error in used) / len(used) == pytest.approx(2 / 3, abs=0.02)
    (counted,) = re.findall(r"rows \((\d+) %\); .* predicts (\d+) % of the rows too fast", listed())
    said = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    assert f"inside in {counted[0]} %" in said and f"and {counted[1]} % of the rows are predicted too fast" in said
    (everything,) = re.findall(r"\| all \| 260 \| (\d+)\.\d \| (\d+)\.\d ", listed())
    assert "a median of {} %, at the 90th percentile by {} %".format(*everything) in said


def test_parts_scale_as_the_model_says() -> None:
    """The fit's first order beside the formula, for factors that move everything."""
    run = next(run for run in runs() if run.tp == 2 and run.pp == 1)
    now, then = Factors(), Factors(0.9, 0.9, 0.9, 0.9, 0.9)
    slow = StepModel(run.config, run.layout, then.of(DEVICES[run.gpu]), run.plan).predict().total
    parts = StepModel(run.config, run.layout, DEVICES[run.gpu], run.plan).predict()
    assert scaled(parts, now, then, fp8=False) == pytest.approx(slow, rel=0.03)
    assert cost([(run, parts)], now, now) < cost([(run, parts)], now, Factors(memory_share=0.01))
