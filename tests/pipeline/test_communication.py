"""Which messages have certainly arrived when another one does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Action, Op, Schedule, counterpart, needs
from smp.pipeline.communication import known_to_have_arrived
from smp.pipeline.schedules import build_schedule
from tests.pipeline.strategies import Sizes, sizes


def most_under_way(schedule: Schedule, rank: int) -> int:
    """Sent messages at once that a rank does not know to have arrived."""
    arrived, under_way, most = known_to_have_arrived(schedule, rank), set[Action](), 0
    for action in schedule.actions[rank]:
        if action.op in SEND:
            under_way.add(action)
        for need in needs(schedule, action) if action.op in COMPUTE else ():
            under_way -= set(arrived.get(need, ()) if need.op in RECEIVE else ())
        most = max(most, len(under_way))
    return most


def test_an_answer_says_that_the_question_has_arrived() -> None:
    """By hand, of two ranks with 1f1b: a gradient comes when the activation of its micro-batch was read."""
    schedule = build_schedule("1f1b", 2, 3)
    first = known_to_have_arrived(schedule, 0)
    for i in range(3):
        assert first[Action(Op.RECEIVE_GRADIENT, 0, i)] == [Action(Op.SEND_ACTIVATION, 0, i)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_more_messages_wait_for_an_answer_in_a_longer_step(name: str, ranks: int) -> None:
    short, long = (build_schedule(name, ranks, ranks * times) for times in (4, 16))  # type: ignore[arg-type]
    assert all(most_under_way(long, rank) == most_under_way(short, rank) < 4 * ranks for rank in range(ranks))


@settings(max_examples=40, deadline=None)
@given(sizes(most_ranks=6, most_micro_batches=16))
def test_what_has_arrived_was_read_before_the_answer_was_sent(size: Sizes) -> None:
    """In the other rank's order; and no message is known of twice."""
    schedule = build_schedule(*size)
    for rank in range(schedule.ranks):
        seen: list[Action] = []
        for answer, sent in known_to_have_arrived(schedule, rank).items():
            other = schedule.actions[schedule.peer(answer)]
            at = other.index(counterpart(answer))
            before = {need for action in other[:at] if action.op in COMPUTE for need in needs(schedule, action)}
            assert {counterpart(action) for action in sent} <= before
            seen += sent
        assert len(seen) == len(set(seen)) and all(action.op in SEND for action in seen)
