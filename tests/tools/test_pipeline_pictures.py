import json
from math import inf, nan

import pytest

from smp.pipeline.actions import COMPUTE, Action, Op
from smp.pipeline.schedules import build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import Span, Timeline, to_trace
from tools.plot_pipeline import color, computations, draw, from_trace, to_text

FIRST = {"stage": 0, "micro_batch": 0}


@pytest.fixture
def timeline() -> Timeline:
    return simulate(build_schedule("zb-v", 2, 4), [StageCosts(0.25, 0.25, 0.25, 0.5, 0.5)] * 4, link=0.125)


def test_a_trace_gives_the_timeline_back(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(to_trace(timeline, "zb-v")))
    assert from_trace(trace) == timeline
    assert trace["otherData"]["title"] == "zb-v"


def test_the_trace_is_chromes_format(timeline: Timeline) -> None:
    events = to_trace(timeline, "zb-v")["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    forward = next(event for event in complete if event["cat"] == "forward")
    assert forward == {
        "ph": "X", "name": "F0", "cat": "forward", "pid": 0, "tid": 0,
        "ts": 500_000.0, "dur": 250_000.0, "args": {"stage": 0, "micro_batch": 0},
    }  # fmt: skip
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


def test_events_of_a_profiler_are_left_out(timeline: Timeline) -> None:
    trace = to_trace(timeline, "zb-v")
    trace["traceEvents"].append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 0, "dur": 1})
    trace["traceEvents"].append({"ph": "i", "name": "mark", "ts": 0})
    assert from_trace(trace) == timeline


@pytest.mark.parametrize(
    "trace",
    [
        {},
        {"traceEvents": []},
        {"traceEvents": [{"name": "no ph"}]},
        {"traceEvents": [{"ph": "X", "cat": "forward", "pid": 0, "ts": 0, "dur": 1}]},
        {"traceEvents": [{"ph": "X", "cat": "forward", "pid": 0, "ts": None, "dur": 1, "args": {"stage": 0}}]},
        *(
            {"traceEvents": [{"ph": "X", "cat": "forward", "pid": 0, "ts": start, "dur": duration, "args": FIRST}]}
            for start, duration in ((0, 0), (0, -1), (0, nan), (nan, 1), (0, inf), (inf, 1))
        ),
    ],
)
def test_what_is_not_a_trace_is_refused(trace: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a trace of a pipeline"):
        from_trace(trace)


def test_bars_are_the_computations() -> None:
    pytest.importorskip("matplotlib")
    spans = [
        Span(0, Action(Op.FORWARD, 0, 3), 10.0, 11.0),
        Span(0, Action(Op.SEND_ACTIVATION, 0, 3), 11.0, 11.5),
        Span(1, Action(Op.FORWARD, 3, 3), 11.5, 12.0),
    ]
    timeline = Timeline(2, tuple(spans))
    assert computations(timeline) == [spans[0], spans[2]]
    assert color(Op.FORWARD, 0) != color(Op.FORWARD, 1)
    (axes,) = draw([("measured", timeline)]).axes
    first, second = axes.patches
    assert (first.get_x(), first.get_width(), second.get_x(), second.get_width()) == (0, 1, 1.5, 0.5)
    assert [text.get_text() for text in axes.texts] == ["3", "3"]
    assert first.get_facecolor() != second.get_facecolor()  # stage 3 is a second chunk


def test_text_shows_order_and_time() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2), [StageCosts()] * 2)
    assert to_text(timeline).splitlines() == [
        "rank 0  F0 F1       B0...    B1...",
        "rank 1     F0 B0... F1 B1...",
    ]


def test_text_has_room_for_long_numbers() -> None:
    timeline = simulate(build_schedule("gpipe", 1, 101), [StageCosts()])
    assert to_text(timeline).split()[:4] == ["rank", "0", "F0..", "F1.."]
    assert "F99. F100 B0" in to_text(timeline)


def test_the_figure_has_a_panel_per_timeline_and_a_bar_per_computation(timeline: Timeline) -> None:
    pytest.importorskip("matplotlib")
    axes = draw([("predicted", timeline), ("measured", timeline)]).axes
    bars = sum(span.action.op in COMPUTE for span in timeline.spans)
    assert [len(panel.patches) for panel in axes] == [bars] * 2
    assert [panel.get_title(loc="left").split(":")[0] for panel in axes] == ["predicted", "measured"]
    assert axes[0].get_xlim() == axes[1].get_xlim()
