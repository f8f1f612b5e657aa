"""Proof that a schedule of a collective is right, wherever it comes from.

1. Every channel by itself: what rank a sends to rank b is what b receives from a, in the same order.
2. All ranks together: no rank waits forever.
3. What is where: in the end every rank has what the collective promises, and no part is in a sum twice or missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest

from smp.parallel.network.collective_schedule import Action, Message, Op, Schedule, waits


class ScheduleError(ValueError):
    """A schedule that is wrong or cannot run. The message names rank, position and action."""


Parts = frozenset[int]  # whose contributions a chunk holds


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, which names rank, position and action, unless the schedule is right."""
    if len(schedule.actions) != schedule.size:
        raise ScheduleError(f"{schedule}: actions of {len(schedule.actions)} ranks")
    _check_channels(schedule)
    _check_contents(schedule)


def _check_channels(schedule: Schedule) -> None:
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op is Op.SEND:
                sent[rank, action.peer].append(action)
            elif action.op is not Op.REDUCE:
                received[action.peer, rank].append(action)
    for channel in sorted(sent.keys() | received.keys()):
        for number, (send, receive) in enumerate(zip_longest(sent[channel], received[channel])):
            if send is None or receive is None or send.key != receive.key:
                raise ScheduleError(
                    f"{schedule}: message {number} from rank {channel[0]} to rank {channel[1]}: {send} meets {receive}"
                )


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(rank, action), each after all that it waits for.

    Raises:
        ScheduleError: deadlock; the message says where every unfinished rank stands.
    """
    programs = [list(waits(rank, actions)) for rank, actions in enumerate(schedule.actions)]
    position = [0] * schedule.size
    there: set[Message] = set()  # messages that both sides have posted
    posted: set[Message] = set()  # by one side
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                action, needed = program[position[rank]]
                if not there.issuperset(needed):
                    break
                if (message := message_of(rank, action)) is not None:
                    # The second side that posts a message makes it travel.
                    (there if message in posted else posted).add(message)
                yield rank, action
                position[rank] += 1
                moved = True
    stuck = [rank for rank, program in enumerate(programs) if position[rank] < len(program)]
    if stuck:
        stuck_at = "; ".join(f"rank {r}, position {position[r]}, {programs[r][position[r]][0]}" for r in stuck)
        raise ScheduleError(f"{schedule}: deadlock: {stuck_at}")


def message_of(rank: int, action: Action) -> Message | None:
    """The message that an action of a rank sends or receives; None for a sum."""
    if action.op is Op.REDUCE:
        return None
    ends = (rank, action.peer) if action.op is Op.SEND else (action.peer, rank)
    return *ends, *action.key


def _check_contents(schedule: Schedule) -> None:
    ranks, gathers = range(schedule.size), schedule.kind == "all-gather"
    keys = [(piece, chunk) for piece in ranks for chunk in range(schedule.chunks[piece])]
    # In the beginning: in a gather each rank has its own piece, else each has a contribution to all.
    has: list[dict[tuple[int, int], Parts]] = [
        {key: frozenset({rank}) for key in keys if not gathers or key[0] == rank} for rank in ranks
    ]
    under_way: dict[Message, Parts] = {}
    arriving: list[dict[tuple[int, int], int]] = [{} for _ in ranks]
    for rank, action in execution_order(schedule):
        _apply(schedule, rank, action, has[rank], under_way, arriving[rank])
    for rank in ranks:
        for key, source in arriving[rank].items():  # nothing passed these on
            has[rank][key] = under_way[source, rank, *key]
        for piece, chunk in keys:
            if schedule.kind == "reduce-scatter" and piece != rank:
                continue
            wanted = frozenset({piece}) if gathers else frozenset(ranks)
            found = has[rank].get((piece, chunk), frozenset())
            if found != wanted:
                raise ScheduleError(
                    f"{schedule}: in the end rank {rank} has parts {sorted(found)} of piece {piece}, chunk {chunk}, "
                    f"not {sorted(wanted)}"
                )


def _apply(
    schedule: Schedule,
    rank: int,
    action: Action,
    has: dict[tuple[int, int], Parts],
    under_way: dict[Message, Parts],
    arriving: dict[tuple[int, int], int],
) -> None:
    key = action.key
    if action.op is Op.RECEIVE:
        arriving[key] = action.peer
    elif action.op is Op.SEND:
        if key in arriving:
            has[key] = under_way[arriving.pop(key), rank, *key]
        if key not in has:
            raise ScheduleError(f"{schedule}: rank {rank}, {action}: it has nothing of it")
        # What the chunk holds when it is sent.
        under_way[rank, action.peer, *key] = has[key]
    elif action.op is Op.REDUCE:
        parts = [has[key] if source == rank else under_way[source, rank, *key] for source in action.ranks]
        # A rank's contribution in two parts would count twice in the sum.
        if sum(map(len, parts)) != len(frozenset().union(*parts)):
            raise ScheduleError(f"{schedule}: rank {rank}, {action}: a part is added twice")
        has[key] = frozenset().union(*parts)
