"""The numbers and pictures in docs/pipeline.md are the simulator's."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from smp.pipeline.actions import SEND
from smp.pipeline.schedules import SCHEDULES, build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import Timeline
from smp.pipeline.validate_schedule import peak_activations
from tools.plot_pipeline import to_text

DOC = Path(__file__).parents[2] / "docs" / "pipeline.md"


def predict(name: str, link: Fraction = Fraction(0)) -> Timeline:
    schedule = build_schedule(name, 4, 8)
    time = Fraction(1, schedule.chunks)
    return simulate(schedule, [StageCosts(time, time, time)] * schedule.stages, link)


def rows() -> Iterator[str]:
    """Lines of the table for 4 ranks and 8 micro-batches."""
    for name in SCHEDULES:
        schedule, timeline = build_schedule(name, 4, 8), predict(name)
        peaks = ", ".join(f"{peak / schedule.chunks:g}" for peak in peak_activations(schedule))
        messages = sum(action.op in SEND for actions in schedule.actions for action in actions)
        slow = float(predict(name, Fraction(1, 10)).step_time)
        step, bubble = float(timeline.step_time), float(timeline.bubble[0])
        share = float(timeline.bubble_fraction)
        yield f"| `{name}` | {step:g} | {bubble:g} | {share:.1%} | {peaks} | {messages} | {slow:g} |"


def test_the_table_is_the_simulators() -> None:
    text = DOC.read_text(encoding="utf-8")
    for row in rows():
        assert row in text


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_the_pictures_are_the_simulators(name: str) -> None:
    assert to_text(predict(name)) in DOC.read_text(encoding="utf-8")
