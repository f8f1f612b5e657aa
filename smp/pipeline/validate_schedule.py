"""Proof that a schedule is right, wherever it comes from.

1. Every rank by itself: each micro-batch runs forward and backward (in one piece, or input part and weight part)
   exactly once through each stage of the rank; every action comes after what it needs; parameters are unsharded where
   they are used and sharded at the end; the gradients of each stage are reduced once, after its last backward.
2. Every channel by itself: what rank a sends to rank b is what b receives from a, in the same order.
3. All ranks together: no rank waits forever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from smp.pipeline.actions import COMPUTE, PARAMETERS, RECEIVE, SEND, Action, Op, Schedule, completed, counterpart, needs


class ScheduleError(ValueError):
    """A schedule that is wrong or cannot run. The message names rank, position and action."""


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, which names rank, position and action, unless the schedule is right."""
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError(f"{schedule.name} is for {schedule.ranks} ranks but has actions of {len(schedule.actions)}")
    for rank in range(schedule.ranks):
        _check_rank(schedule, rank)
    _check_channels(schedule)
    # The generator checks while it runs: taken to its end it has proven that no rank waits forever.
    deque(execution_order(schedule), maxlen=0)  # to the end, or it raises


def peak_activations(schedule: Schedule, sizes: Sequence[float] | None = None) -> tuple[float, ...]:
    """Most activations that each rank holds at once, in micro-batches of one stage.

    They live from the forward to the end of the (weight part of the) backward. A stage is 1 / chunks of a rank's
    layers: peaks of schedules with different chunks compare after division by chunks.

    Args:
        schedule: valid.
        sizes: of each stage, what a micro-batch through it counts; by default 1.
    """
    # A split backward keeps its activations until the weight part, which reads the layers' inputs.
    change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}
    return tuple(
        max(accumulate((change.get(one.op, 0) * _size(sizes, one.stage) for one in actions), initial=0))
        for actions in schedule.actions
    )


def _size(sizes: Sequence[float] | None, stage: int) -> float:
    return 1 if sizes is None else sizes[stage]


@dataclass(frozen=True)
class PassState:
    """Memory state of a rank during a pass of a micro-batch through one of its stages.

    Attributes:
        part: which of the rank's stages it goes through, counted from 0.
        op: a forward pass, a backward pass, or the input part or weight part of one.
        has_loss: the pass computes the model's loss, or begins with its gradient.
        activations: micro-batches of a stage whose backward pass (or its input part) is to come, this one included in
            all but weight parts, counted by ``sizes`` as in :func:`peak_activations`; ``others``: without it.
        pending: micro-batches whose weight part is to come after this pass, counted by ``sizes``.
        losses: micro-batches between their loss and its backward pass, this one included.
        with_gradients: parts that have gradients of earlier micro-batches.
        reduced: those of them whose gradients are reduced already.
        unsharded: parts whose weights are gathered.
        reduces: the part's gradients are reduced after the pass.
    """

    part: int
    op: Op
    has_loss: bool
    activations: float
    others: float
    pending: float
    losses: int
    with_gradients: frozenset[int]
    reduced: frozenset[int]
    unsharded: frozenset[int]
    reduces: bool


def pass_states(schedule: Schedule, sizes: Sequence[float] | None = None) -> tuple[frozenset[PassState], ...]:
    """For each rank, the states that its passes are in."""
    return tuple(
        frozenset(_states_of_rank(schedule, rank, actions, sizes)) for rank, actions in enumerate(schedule.actions)
    )


def _states_of_rank(
    schedule: Schedule, rank: int, actions: Sequence[Action], sizes: Sequence[float] | None
) -> Iterator[PassState]:
    parts = {stage: part for part, stage in enumerate(schedule.stages_of(rank))}
    last = {action.stage: action for action in actions if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)}
    waiting, pending, losses = 0.0, 0.0, 0
    done = reduced = unsharded = frozenset[int]()
    for action in actions:
        op, own = action.op, frozenset({parts[action.stage]} if action.stage in parts else ())
        match op:
            case Op.UNSHARD:
                unsharded |= own
            case Op.RESHARD:
                unsharded -= own
            case Op.REDUCE:
                reduced |= own
        if op not in COMPUTE:
            continue
        size, loss = _size(sizes, action.stage), action.stage == schedule.stages - 1 and op is not Op.BACKWARD_WEIGHT
        # Activations are there during the whole of a forward or backward pass; those of an input part become pending
        # block by block.
        others = waiting if op in (Op.FORWARD, Op.BACKWARD_WEIGHT) else waiting - size
        held = others + size * (op is not Op.BACKWARD_WEIGHT)
        pending += size * ((op is Op.BACKWARD_INPUT) - (op is Op.BACKWARD_WEIGHT))
        losses += loss * (op is Op.FORWARD)
        # ``add_communication`` reduces right after a stage's last backward pass.
        reduces = last.get(action.stage) == action
        part = parts[action.stage]
        yield PassState(part, op, loss, held, others, pending, losses, done, reduced, unsharded, reduces)
        waiting = held if op is Op.FORWARD else others
        losses -= loss * (op is not Op.FORWARD)
        done |= own if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) else frozenset()


def peak_losses(schedule: Schedule) -> int:
    """Most micro-batches that have gone forward through the last stage and not backward yet: for each of them a loss
    that has its gradients ready is kept, with one for the output matrix."""
    change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_INPUT: -1}
    last = schedule.stages - 1
    actions = (action for action in schedule.actions[schedule.rank_of(last)] if action.stage == last)
    return max(accumulate((change.get(action.op, 0) for action in actions), initial=0))


def _check_rank(schedule: Schedule, rank: int) -> None:
    done: set[Action] = set()
    unsharded: set[int] = set()
    for position, action in enumerate(schedule.actions[rank]):
        problem = _misplaced(schedule, rank, action) or _premature(schedule, action, done, unsharded)
        if problem:
            raise ScheduleError(f"{schedule.name}: {_at(schedule, rank, position)}: {problem}")
        # In the names of the two parts of a backward pass, so that both kinds of schedules are
        # checked by the same rules.
        done.update(completed(action))
        if action.op is Op.UNSHARD:
            unsharded.add(action.stage)
        elif action.op is Op.RESHARD:
            unsharded.remove(action.stage)
    # What never came is only known at the end.
    missing = [f"{action} never runs" for action in _expected(schedule, rank) if action not in done]
    problems = missing + [f"stage {stage} is still unsharded" for stage in sorted(unsharded)]
    if problems:
        raise ScheduleError(f"{schedule.name}: {_at(schedule, rank, len(schedule.actions[rank]))}: {problems[0]}")


def _expected(schedule: Schedule, rank: int) -> Iterator[Action]:
    ops = [Op.FORWARD] if schedule.forward_only else [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
    for stage in schedule.stages_of(rank):
        yield from (Action(op, stage, index) for index in range(schedule.micro_batches) for op in ops)
        if not schedule.forward_only:
            yield Action(Op.REDUCE, stage)


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str | None:
    """Why an action has no place on a rank at all, or None."""
    if not 0 <= action.stage < schedule.stages or schedule.rank_of(action.stage) != rank:
        return f"the rank owns stages {', '.join(map(str, schedule.stages_of(rank)))}"
    # Parameters belong to no micro-batch.
    allowed = [None] if action.op in PARAMETERS else range(schedule.micro_batches)
    if action.micro_batch not in allowed:
        return f"there are {schedule.micro_batches} micro-batches"
    if action.op in SEND | RECEIVE:
        neighbour = counterpart(action).stage
        if not 0 <= neighbour < schedule.stages or schedule.rank_of(neighbour) == rank:
            return "no other rank is at the other end"
    if schedule.forward_only and action.op not in {Op.FORWARD, Op.SEND_ACTIVATION, Op.RECEIVE_ACTIVATION} | PARAMETERS:
        return "the schedule is forward only"
    return None


def _premature(schedule: Schedule, action: Action, done: set[Action], unsharded: set[int]) -> str | None:
    """Why an action cannot come here, after ``done`` and with the ``unsharded`` stages, or None."""
    # Weights come first: unshard and reshard are checked by them alone, and a computation needs them gathered.
    gathered = action.stage in unsharded
    if action.op is Op.UNSHARD:
        return "its parameters are already unsharded" if gathered else None
    if action.op in COMPUTE | {Op.RESHARD} and not gathered:
        return "its parameters are not unsharded"
    if action.op is Op.RESHARD:
        return None
    # A computation that ran twice would count a micro-batch twice in the gradients.
    again = [result for result in completed(action) if result in done]
    if again:
        return f"{again[0]} runs a second time"
    missing = [need for need in needs(schedule, action) if need not in done]
    return f"needs {missing[0]} before it" if missing else None


def _check_channels(schedule: Schedule) -> None:
    """The k-th message that a rank sends to another one is the k-th that the other one receives from it."""
    sends: defaultdict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            if action.op in SEND:
                sends[rank, schedule.peer(action)].append((position, action))
            elif action.op in RECEIVE:
                receives[schedule.peer(action), rank].append((position, action))
    # Sorted, so that the same schedule always gives the same first error.
    for channel in sorted(sends.keys() | receives.keys()):
        for index, (send, receive) in enumerate(zip_longest(sends[channel], receives[channel])):
            if send is None or receive is None or counterpart(send[1]) != receive[1]:
                ends = [_end(schedule, *end) for end in zip(channel, (send, receive), strict=True)]
                raise ScheduleError(f"{schedule.name}: message {index} is sent by {ends[0]} but received by {ends[1]}")


def _end(schedule: Schedule, rank: int, end: tuple[int, Action] | None) -> str:
    return _at(schedule, rank, len(schedule.actions[rank]) if end is None else end[0])


def _at(schedule: Schedule, rank: int, position: int) -> str:
    """Rank, position and action, for messages."""
    actions = schedule.actions[rank]
    return f"rank {rank}, position {position}, {actions[position] if position < len(actions) else 'end of the step'}"


def execution_order(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """(rank, position) of every action, each after all that it waits for: the order in which the ranks can get through.

    Ranks are independent programs that meet in messages. If they can come to a point where each waits for another one,
    they do here: with messages that never overtake, what can run does not depend on which rank goes first.

    Raises:
        ScheduleError: deadlock; the message says where every unfinished rank stands.
    """
    # Round after round each rank goes as far as it can, until in one round no rank moves.
    position = [0] * schedule.ranks
    sent: set[Action] = set()  # the receives of the messages that are under way
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions) and _can_run(schedule, actions[position[rank]], sent):
                action = actions[position[rank]]
                if action.op in SEND:
                    sent.add(counterpart(action))
                yield rank, position[rank]
                position[rank] += 1
                moved = True
    stuck = [rank for rank in range(schedule.ranks) if position[rank] < len(schedule.actions[rank])]
    if stuck:
        positions = "; ".join(_at(schedule, rank, position[rank]) for rank in stuck)
        raise ScheduleError(f"{schedule.name}: deadlock: {positions}")


def _can_run(schedule: Schedule, action: Action, sent: set[Action]) -> bool:
    """Whether the action in front of a rank can run: only a computation waits, for the message that it reads."""
    # Sends and receives are posted and go on by themselves: they never hold a rank up.
    return action.op not in COMPUTE or all(need in sent for need in needs(schedule, action) if need.op in RECEIVE)
