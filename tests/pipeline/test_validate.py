"""The validator accepts what is right (test_schedules) and rejects every kind of mistake."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smp.pipeline.actions import COMPUTE, SEND, Action, Op, Schedule, completed, needs
from smp.pipeline.communication import add_communication
from smp.pipeline.schedules import SCHEDULES, build_schedule
from smp.pipeline.validate_schedule import (
    PassState,
    ScheduleError,
    pass_states,
    peak_activations,
    peak_losses,
    validate,
)
from tests.pipeline.strategies import Sizes, sizes

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741
Edit = Callable[[list[Action]], None]


def edited(schedule: Schedule, rank: int, edit: Edit) -> Schedule:
    """The schedule with an edit of one rank's list."""
    actions = [list(rank_actions) for rank_actions in schedule.actions]
    edit(actions[rank])
    return replace(schedule, actions=tuple(map(tuple, actions)))


def move(action: Action, to: Action) -> Edit:
    """Take an action out and put it back in front of another one."""

    def edit(actions: list[Action]) -> None:
        actions.remove(action)
        actions.insert(actions.index(to), action)

    return edit


def double(action: Action) -> Edit:
    return lambda actions: actions.insert(actions.index(action) + 1, action)


def drop(action: Action) -> Edit:
    return lambda actions: actions.remove(action)


def swap(one: Action, other: Action) -> Edit:
    def edit(actions: list[Action]) -> None:
        i, j = actions.index(one), actions.index(other)
        actions[i], actions[j] = actions[j], actions[i]

    return edit


def add(action: Action, at: int = 0) -> Edit:
    return lambda actions: actions.insert(at, action)


SEND_0, SEND_1 = (Action(Op.SEND_ACTIVATION, 0, index) for index in (0, 1))
RECEIVE_0, RECEIVE_1 = (Action(Op.RECEIVE_ACTIVATION, 1, index) for index in (0, 1))


@pytest.mark.parametrize(
    ("rank", "edit", "place", "problem"),
    [
        (0, drop(Action(F, 0, 3)), "rank 0, position 12, send_activation(stage 0, micro-batch 3)", "needs forward"),
        (1, drop(Action(B, 1, 3)), "send_gradient(stage 1, micro-batch 3)", "needs backward_input(stage 1, micro"),
        (
            0,
            drop(Action(B, 0, 3)),
            "rank 0, position 16, reduce(stage 0)",
            "needs backward_weight(stage 0, micro-batch 3)",
        ),
        (0, double(Action(B, 0, 1)), "rank 0, position 11, backward(stage 0, micro-batch 1)", "runs a second time"),
        (0, double(Action(F, 0, 1)), "rank 0, position 5, forward(stage 0, micro-batch 1)", "runs a second time"),
        (0, double(SEND_0), "position 3, send_activation(stage 0, micro-batch 0)", "runs a second time"),
        (0, double(Action(Op.REDUCE, 0)), "reduce(stage 0)", "runs a second time"),
        (0, drop(Action(Op.REDUCE, 0)), "rank 0, position 18, end of the step", "reduce(stage 0) never runs"),
        (
            0,
            move(Action(Op.REDUCE, 0), Action(B, 0, 3)),
            "reduce(stage 0)",
            "needs backward_weight(stage 0, micro-batch 3)",
        ),
        (
            1,
            swap(Action(F, 1, 1), Action(B, 1, 1)),
            "backward(stage 1, micro-batch 1)",
            "needs forward(stage 1, micro-ba",
        ),
        (
            0,
            move(SEND_0, Action(F, 0, 0)),
            "rank 0, position 1, send_activation",
            "needs forward(stage 0, micro-batch 0)",
        ),
        (1, drop(RECEIVE_0), "rank 1, position 1, forward(stage 1, micro-batch 0)", "needs receive_activation(stage 1"),
        (
            0,
            drop(SEND_0),
            "rank 0, position 4, send_activation(stage 0, micro-batch 1)",
            "received by rank 1, position",
        ),
        (
            1,
            swap(RECEIVE_0, RECEIVE_1),
            "forward(stage 1, micro-batch 0)",
            "needs receive_activation(stage 1, micro-batch 0)",
        ),
        (0, drop(Action(Op.UNSHARD, 0)), "rank 0, position 0, forward(stage 0, micro-batch 0)", "not unsharded"),
        (0, add(Action(Op.UNSHARD, 0)), "rank 0, position 1, unshard(stage 0)", "already unsharded"),
        (0, add(Action(Op.RESHARD, 0)), "rank 0, position 0, reshard(stage 0)", "not unsharded"),
        (0, drop(Action(Op.RESHARD, 0)), "rank 0, position 18, end of the step", "stage 0 is still unsharded"),
        (0, add(Action(F, 1, 0)), "rank 0, position 0, forward(stage 1, micro-batch 0)", "the rank owns stages 0"),
        (0, add(Action(F, 7, 0)), "rank 0, position 0, forward(stage 7, micro-batch 0)", "the rank owns stages 0"),
        (0, add(Action(F, 0, 4)), "rank 0, position 0, forward(stage 0, micro-batch 4)", "there are 4 micro-batches"),
        (0, add(Action(F, 0)), "rank 0, position 0, forward(stage 0)", "there are 4 micro-batches"),
        (
            0,
            add(Action(Op.REDUCE, 0, 1)),
            "rank 0, position 0, reduce(stage 0, micro-batch 1)",
            "there are 4 micro-batches",
        ),
        (0, add(Action(Op.SEND_GRADIENT, 0, 0)), "send_gradient(stage 0, micro-batch 0)", "no other rank"),
        (1, add(Action(Op.RECEIVE_GRADIENT, 1, 0)), "receive_gradient(stage 1, micro-batch 0)", "no other rank"),
    ],
)
def test_mistakes_in_1f1b_are_named(rank: int, edit: Edit, place: str, problem: str) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    validate(schedule)
    with pytest.raises(ScheduleError) as error:
        validate(edited(schedule, rank, edit))
    assert place in str(error.value) and problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rank", "edit", "problem"),
    [
        (0, move(Action(W, 0, 2), Action(I, 0, 2)), "needs backward_input(stage 0, micro-batch 2) before it"),
        (0, drop(Action(W, 0, 3)), "needs backward_weight(stage 0, micro-batch 3) before it"),
        (1, drop(Action(I, 1, 3)), "needs backward_input(stage 1, micro-batch 3) before it"),
        (0, add(Action(B, 0, 3), at=-3), "backward_input(stage 0, micro-batch 3) runs a second time"),
    ],
)
def test_mistakes_in_a_split_backward_are_named(rank: int, edit: Edit, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem.replace("(", r"\(").replace(")", r"\)")):
        validate(edited(build_schedule("zb-h1", 2, 4), rank, edit))


def test_a_stage_takes_its_input_from_a_neighbour_on_the_same_rank() -> None:
    """At the turn of the V stages 1 and 2 are both on rank 1."""
    with pytest.raises(ScheduleError, match="needs forward.stage 1, micro-batch 0. before it"):
        validate(edited(build_schedule("zb-v", 2, 4), 1, swap(Action(F, 1, 0), Action(F, 2, 0))))


def test_forward_only_has_no_backward() -> None:
    with pytest.raises(ScheduleError, match="the schedule is forward only"):
        validate(edited(build_schedule("1f1b", 2, 4, evaluation=True), 1, add(Action(B, 1, 0), at=4)))
    with pytest.raises(ScheduleError, match="backward_input.stage 0, micro-batch 0. never runs"):
        validate(replace(build_schedule("1f1b", 2, 4, evaluation=True), forward_only=False))


def test_messages_may_not_overtake() -> None:
    """Both receives stand before both forwards, but not in the order of the sends."""
    schedule = build_schedule("gpipe", 2, 4, prefetch=2)
    validate(schedule)
    with pytest.raises(ScheduleError, match="message 0 is sent by rank 0, position 2") as error:
        validate(edited(schedule, 1, swap(RECEIVE_0, RECEIVE_1)))
    assert "received by rank 1, position 1, receive_activation(stage 1, micro-batch 1)" in str(error.value)


def test_what_no_rank_computes_cannot_be_sent() -> None:
    order = SCHEDULES["1f1b"].schedule(2, 4, 1)
    with pytest.raises(ValueError, match="needs forward.stage 0, micro-batch 2., which no rank computes"):
        add_communication(edited(order, 0, drop(Action(F, 0, 2))))


@settings(max_examples=150, deadline=None)
@given(sizes(most_ranks=6, most_micro_batches=12), st.data())
def test_random_mutations_are_rejected(size: Sizes, data: st.DataObject) -> None:
    """Drop or double anything, or move an action in front of one that it needs."""
    schedule = build_schedule(*size)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    action = data.draw(st.sampled_from(schedule.actions[rank]))
    edit = data.draw(st.sampled_from(["drop", "double", "early"]))
    if edit == "early":
        causes = [cause for cause in schedule.actions[rank] if set(completed(cause)) & set(needs(schedule, action))]
        assume(causes)
        mutated = edited(schedule, rank, move(action, data.draw(st.sampled_from(causes))))
    else:
        mutated = edited(schedule, rank, {"drop": drop, "double": double}[edit](action))
    with pytest.raises(ScheduleError):
        validate(mutated)


def test_ranks_that_wait_for_each_other_deadlock() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it runs micro-batch 1, rank 1 the other way round."""
    ranks = [[(F, 0), (B, 0), (F, 1), (B, 1)], [(F, 0), (F, 1), (B, 0), (B, 1)]]
    actions = tuple(tuple(Action(op, stage, index) for op, index in rank) for stage, rank in enumerate(ranks))
    schedule = add_communication(Schedule("hand-made", 2, 2, 1, actions), prefetch=0)
    with pytest.raises(ScheduleError) as error:
        validate(schedule)
    assert "deadlock: rank 0, position" in str(error.value)
    assert "backward(stage 0, micro-batch 0)" in str(error.value) and "forward(stage 1, micro-batch 1)" in str(
        error.value
    )


@pytest.mark.parametrize(("name", "losses"), [("gpipe", 8), ("1f1b", 1), ("interleaved", 1), ("zb-h1", 1), ("zb-v", 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_that_wait_for_their_backward_pass(name: str, losses: int, ranks: int) -> None:
    assert peak_losses(build_schedule(name, ranks, 8)) == losses


@pytest.mark.parametrize("ranks", [1, 3])
def test_there_are_as_many_lists_as_ranks(ranks: int) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    with pytest.raises(ScheduleError, match=f"1f1b is for {ranks} ranks but has actions of 2"):
        validate(replace(schedule, ranks=ranks))


def test_what_waits_between_both_parts_of_a_backward_pass() -> None:
    """By hand: the last rank of two puts a weight part off until the next backward pass has run, the first none.
    Gradients of weights are there from the first weight part on, and its last one is followed by their reduction."""
    first, last = (list(states) for states in pass_states(build_schedule("zb-h1", 2, 4)))
    inputs = {(s.activations, s.pending) for s in first if s.op is Op.BACKWARD_INPUT}
    assert inputs == {(2, 1), (1, 1)}  # its own is kept when it begins, and pending when it ends
    assert {(s.activations, s.pending) for s in first if s.op is Op.BACKWARD_WEIGHT} == {(1, 0), (0, 0)}
    assert max(s.pending for s in last) == 2 and max(s.others + s.pending for s in last) == 2
    assert all(s.has_loss == (s.op is not Op.BACKWARD_WEIGHT) for s in last)
    assert all(s.losses - s.has_loss == s.others for s in last if s.op is not Op.BACKWARD_WEIGHT)
    assert {bool(s.with_gradients) for s in first if s.op is Op.BACKWARD_INPUT} == {False, True}
    assert {s.op for s in first if s.reduces} == {Op.BACKWARD_WEIGHT}
    assert not any(s.pending for states in pass_states(build_schedule("1f1b", 2, 4)) for s in states)


def test_what_a_rank_holds_in_each_pass() -> None:
    """By hand: the first of two ranks holds two of three micro-batches, and has gradients from its first backward pass
    on; the last one has a loss at each forward pass."""
    first, last = pass_states(build_schedule("1f1b", 2, 3))
    none, own = frozenset[int](), frozenset({0})

    def state(op: Op, loss: bool, held: int, done: frozenset[int], reduces: bool = False) -> PassState:
        return PassState(0, op, loss, held, held - 1, 0, int(loss), done, none, own, reduces)

    assert first == {
        state(F, False, 1, none),
        state(F, False, 2, none),
        state(B, False, 2, none),
        state(F, False, 2, own),
        state(B, False, 2, own),
        state(B, False, 1, own, reduces=True),
    }
    passes = {state(op, True, 1, done) for op in (F, B) for done in (none, own)}
    assert last == passes | {state(B, True, 1, own, reduces=True)}


def test_gradients_of_a_ranks_stages_come_one_after_the_other() -> None:
    states = pass_states(build_schedule("interleaved", 2, 2, 2))[0]
    first, last, both = frozenset[int](), frozenset({1}), frozenset({0, 1})
    coming = {(state.part, state.with_gradients) for state in states if state.op is B}
    assert coming == {(1, first), (1, last), (0, last), (0, both)}
    # The second stage's are reduced, and its weights freed, before the first stage's come.
    assert {(state.reduced, state.unsharded) for state in states if state.op is B and state.part == 0} == {
        (last, first | {0})
    }


def test_activations_are_counted_by_the_size_of_their_stage() -> None:
    schedule = build_schedule("interleaved", 2, 4, 2)
    both = peak_activations(schedule)
    assert peak_activations(schedule, [2.0] * 4) == tuple(2 * peak for peak in both)
    alone = peak_activations(schedule, (1.0, 1.0, 0.0, 0.0))  # of the first stage of each rank
    assert all(0 < one <= peak for one, peak in zip(alone, both, strict=True))
    assert max(state.activations for state in pass_states(schedule, (1.0, 1.0, 0.0, 0.0))[0]) == alone[0]
    zero_bubble = pass_states(build_schedule("zb-v", 2, 4, 2), (3.0, 0.0, 0.0, 0.0))[0]
    assert {state.pending for state in zero_bubble} == {0.0, 3.0}


def test_a_schedule_made_by_hand_is_completed_and_valid() -> None:
    """Any order will do, here backwards in the reverse order of forwards, whole on one rank and split on the other."""
    first = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)]
    last = [(F, 0), (F, 1), (F, 2), (I, 2), (I, 1), (W, 2), (I, 0), (W, 0), (W, 1)]
    actions = tuple(tuple(Action(op, stage, index) for op, index in rank) for stage, rank in enumerate([first, last]))
    schedule = add_communication(Schedule("hand-made", 2, 3, 1, actions))
    validate(schedule)
    assert peak_activations(schedule) == (3, 3)
    assert sum(action.op in SEND for rank in schedule.actions for action in rank) == 6
    assert sum(action.op in COMPUTE for rank in schedule.actions for action in rank) == 15
