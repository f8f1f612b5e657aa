"""Timelines worked out by hand; test_schedules compares with the formulas."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Action, Op, Schedule, counterpart
from smp.pipeline.schedules import build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import Timeline
from smp.pipeline.validate_schedule import ScheduleError
from tests.pipeline.strategies import Sizes, sizes, times

F, B = Op.FORWARD, Op.BACKWARD


def spans(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    """Computations of a rank."""
    return [
        (f"{span.action.op.value[0]}{span.action.micro_batch}", span.start, span.end)
        for span in timeline.spans
        if span.rank == rank and span.action.op in COMPUTE
    ]


def test_two_ranks_two_micro_batches() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2), [StageCosts()] * 2)
    assert spans(timeline, 0) == [("f0", 0, 1), ("f1", 1, 2), ("b0", 4, 6), ("b1", 7, 9)]
    assert spans(timeline, 1) == [("f0", 1, 2), ("b0", 2, 4), ("f1", 4, 5), ("b1", 5, 7)]
    assert timeline.step_time == 9
    assert timeline.work == (6, 6) and timeline.bubble == (3, 3)
    assert timeline.bubble_fraction == pytest.approx(1 / 3)


def test_unequal_stages() -> None:
    """The slow second stage computes without a break; the first waits for it."""
    costs = [StageCosts(forward=1, backward_input=1, backward_weight=1), StageCosts(2, 2, 2)]
    timeline = simulate(build_schedule("1f1b", 2, 2), costs)
    assert spans(timeline, 1) == [("f0", 1, 3), ("b0", 3, 7), ("f1", 7, 9), ("b1", 9, 13)]
    assert spans(timeline, 0) == [("f0", 0, 1), ("f1", 1, 2), ("b0", 7, 9), ("b1", 13, 15)]
    assert timeline.work == (6, 12) and timeline.bubble == (9, 3)


def test_a_message_takes_its_time_and_waits_for_both_sides() -> None:
    early, late = (build_schedule("gpipe", 2, 2, prefetch=prefetch) for prefetch in (1, 0))
    costs = [StageCosts()] * 2
    assert spans(simulate(early, costs, link=0.5), 1)[:2] == [("f0", 1.5, 2.5), ("f1", 2.5, 3.5)]
    # Posted only after the first forward, the second message starts at 2.5.
    assert spans(simulate(late, costs, link=0.5), 1)[:2] == [("f0", 1.5, 2.5), ("f1", 3.0, 4.0)]


def test_a_channel_carries_one_message_at_a_time() -> None:
    timeline = simulate(build_schedule("gpipe", 2, 3, prefetch=3), [StageCosts()] * 2, link=2)
    activations = [span for span in timeline.spans if span.action.op is Op.SEND_ACTIVATION]
    assert [(span.start, span.end) for span in activations] == [(1, 3), (3, 5), (5, 7)]


def test_unshard_delays_the_first_use_and_runs_beside_computation() -> None:
    costs = [StageCosts(unshard=3)] * 4
    kept = simulate(build_schedule("interleaved", 2, 2, 2), costs)
    assert spans(kept, 0)[0] == ("f0", 3, 4)
    # The second chunk is unsharded while the first one computes: from 4, when micro-batch 1 starts, to 7.
    second = [span for span in kept.spans if span.rank == 0 and span.action == Action(F, 2, 0)]
    assert [span.start for span in second] == [7]
    schedules = [build_schedule("1f1b", 2, 4, reshard_after_use=flag) for flag in (False, True)]
    once, always = (simulate(schedule, costs[:2]).step_time for schedule in schedules)
    assert always > once


def test_collectives_of_a_rank_run_one_after_the_other() -> None:
    timeline = simulate(build_schedule("interleaved", 2, 2, 2, prefetch=9), [StageCosts(unshard=3)] * 4)
    unshards = [span for span in timeline.spans if span.rank == 0 and span.action.op is Op.UNSHARD]
    assert [(span.action.stage, span.start, span.end) for span in unshards] == [(0, 0, 3), (2, 3, 6)]


def test_the_step_ends_with_the_last_reduction() -> None:
    costs = [StageCosts(reduce=5), StageCosts()]
    assert simulate(build_schedule("1f1b", 2, 2), costs).step_time == 9 + 5
    # Stage 1 ends its backward 2 earlier, so that 2 of its 5 pass beside computation.
    assert simulate(build_schedule("1f1b", 2, 2), costs[::-1]).step_time == 9 + 3


@settings(max_examples=60, deadline=None)
@given(sizes(most_ranks=6, most_micro_batches=16), st.data(), times)
def test_timelines_are_possible(size: Sizes, data: st.DataObject, link: int) -> None:
    """With any costs no rank computes two things at once, and a forward starts after its message has come."""
    schedule = build_schedule(*size)
    costs = [StageCosts(*(data.draw(times) for _ in range(5))) for _ in range(schedule.stages)]
    timeline = simulate(schedule, costs, link)
    assert len(timeline.spans) == sum(map(len, schedule.actions))
    at = {span.action: span for span in timeline.spans}
    for rank in range(schedule.ranks):
        computed = [span for span in timeline.spans if span.rank == rank and span.action.op in COMPUTE]
        assert all(one.end <= other.start for one, other in pairwise(computed))
    for action, span in at.items():
        if action.op in SEND:
            assert at[counterpart(action)].end == span.start + link
        if action.op is F and Action(Op.RECEIVE_ACTIVATION, action.stage, action.micro_batch) in at:
            assert span.start >= at[Action(Op.RECEIVE_ACTIVATION, action.stage, action.micro_batch)].end
    assert min(timeline.bubble) >= 0
    assert {action.op for action in at} >= ({F} if schedule.ranks == 1 else {F} | SEND | RECEIVE)


@settings(max_examples=40, deadline=None)
@given(sizes(most_ranks=6, most_micro_batches=16), times, st.integers(2, 5))
def test_time_scales(size: Sizes, time: int, factor: int) -> None:
    schedule = build_schedule(*size)

    def step_time(scale: int) -> float:
        return simulate(schedule, [StageCosts(time * scale, scale, scale)] * schedule.stages, link=scale).step_time

    assert step_time(factor) == factor * step_time(1)


def test_costs_have_to_fit() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="1f1b has 2 stages, there are costs for 3"):
        simulate(schedule, [StageCosts()] * 3)
    with pytest.raises(ValueError, match="at least 0"):
        simulate(schedule, [StageCosts(), StageCosts(forward=-1)])
    with pytest.raises(ValueError, match="at least 0"):
        simulate(schedule, [StageCosts()] * 2, link=-1)


def test_a_deadlock_is_an_error() -> None:
    empty = Schedule("hand-made", 2, 1, 1, ((), (Action(F, 1, 0),)))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(empty, [StageCosts()] * 2)
