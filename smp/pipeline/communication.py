"""The one pass that turns an order of computations into a complete schedule.

A schedule function decides only what is computed when; the rest follows. Rank 0 of two with 1F1B:

    computation   F0                         F1        B0                 F2        ...  B7
    complete      unshard F0 send0 receive0  F1 send1  B0        receive1 F2 send2  ...  B7 reduce reshard

- A result that another rank needs is sent right after it is computed.
- A receive is posted ``prefetch`` computations before the one that reads it, so that the message travels meanwhile, and
  in the order in which the other rank sends, because messages do not overtake each other.
- Parameters are unsharded ``prefetch`` computations before their first use and resharded after the last one, or around
  every use with ``reshard_after_use`` (computations that follow each other on one micro-batch share a use).
- The gradients of a stage are reduced once, right after its last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby

from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Action, Op, Schedule, completed, counterpart, needs


class _Rank:
    """The computations of one rank and what is inserted before and after each of them."""

    def __init__(self, compute: tuple[Action, ...]) -> None:
        self.compute = compute
        # By the index of a computation. Lists keep the order of insertion, which is the order of the actions there.
        self.before: defaultdict[int, list[Action]] = defaultdict(list)
        self.after: defaultdict[int, list[Action]] = defaultdict(list)

    def actions(self) -> Iterator[Action]:
        for index, action in enumerate(self.compute):
            yield from (*self.before[index], action, *self.after[index])


def add_communication(schedule: Schedule, prefetch: int = 1, reshard_after_use: bool = False) -> Schedule:
    """The schedule with its sends, receives, unshards, reshards and reduces.

    Args:
        schedule: computation only.
        prefetch: computations by which receives and unshards stand ahead of their use. More hides longer messages and
            holds more buffers.
        reshard_after_use: free the parameters between micro-batches: less memory, more all-gathers.

    Raises:
        ValueError: ``prefetch`` is negative, or a computation needs a result that no rank computes.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch is a number of computations, at least 0, not {prefetch}")
    ranks = [_Rank(compute) for compute in schedule.actions]
    # The order of these passes is the order of actions at one place: a gather begins before a receive is posted; a
    # message leaves before the reduction of gradients begins, which comes before the weights are freed.
    for rank in ranks:
        _unshard(rank, prefetch, reshard_after_use)
    _send_and_receive(schedule, ranks, prefetch)
    for rank in ranks:
        _reduce(rank)
        _reshard(rank, reshard_after_use)
    return replace(schedule, actions=tuple(tuple(rank.actions()) for rank in ranks))


def _send_and_receive(schedule: Schedule, ranks: list[_Rank], prefetch: int) -> None:
    for (source, destination), messages in _channels(schedule).items():
        # A receive stands no later than any receive after it in the channel: a minimum from the end.
        posts = accumulate((max(0, reader - prefetch) for _, reader, _ in reversed(messages)), min)
        for (writer, _, receive), post in zip(messages, reversed(list(posts)), strict=True):
            # The post was counted from the end, for the minimum; here messages go from the first to the last again.
            ranks[source].after[writer].append(counterpart(receive))
            ranks[destination].before[post].append(receive)


def _channels(schedule: Schedule) -> dict[tuple[int, int], list[tuple[int, int, Action]]]:
    """Messages (index of the computation that writes, index of the one that reads, receive) by (source, destination).

    In a channel they are in the order of their writers, which is the order of the sends.
    """
    done = {
        result: index
        for compute in schedule.actions
        for index, action in enumerate(compute)
        for result in completed(action)
    }
    channels: defaultdict[tuple[int, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for rank, compute in enumerate(schedule.actions):
        for reader, action in enumerate(compute):
            # Driven by the readers: a result that no other rank reads is not sent.
            for receive in (need for need in needs(schedule, action) if need.op in RECEIVE):
                # A send needs exactly one action: the one that computes what it sends.
                (result,) = needs(schedule, counterpart(receive))
                if result not in done:
                    raise ValueError(f"{schedule.name}: {action} of rank {rank} needs {result}, which no rank computes")
                channels[schedule.peer(receive), rank].append((done[result], reader, receive))
    return {channel: sorted(messages, key=lambda message: message[0]) for channel, messages in channels.items()}


def _uses(rank: _Rank, reshard_after_use: bool) -> list[tuple[int, int, int]]:
    """(stage, first, last index) of the stretches over which the parameters of a stage stay unsharded."""
    indexed = list(enumerate(rank.compute))
    if reshard_after_use:
        # ``groupby`` joins neighbours only, so a later computation on the same stage is a use of
        # its own.
        runs = [list(run) for _, run in groupby(indexed, key=lambda item: (item[1].stage, item[1].micro_batch))]
        return [(run[0][1].stage, run[0][0], run[-1][0]) for run in runs]
    # A later entry replaces an earlier one of its stage: this is the last use, and from the end the first.
    last = {action.stage: index for index, action in indexed}
    first = {action.stage: index for index, action in reversed(indexed)}
    # By first use, so that weights are gathered in the order in which they are needed.
    return [(stage, first[stage], last[stage]) for stage in sorted(last, key=first.__getitem__)]


def _unshard(rank: _Rank, prefetch: int, reshard_after_use: bool) -> None:
    free: dict[int, int] = {}  # index from which a stage is sharded again
    for stage, first, last in _uses(rank, reshard_after_use):
        # Not before the stage was freed: with ``reshard_after_use`` a stretch may follow the one before at once.
        rank.before[max(free.get(stage, 0), first - prefetch)].append(Action(Op.UNSHARD, stage))
        free[stage] = last + 1


def _reshard(rank: _Rank, reshard_after_use: bool) -> None:
    for stage, _, last in _uses(rank, reshard_after_use):
        rank.after[last].append(Action(Op.RESHARD, stage))


def _reduce(rank: _Rank) -> None:
    # A later entry replaces an earlier one: what is left is each stage's last weight gradient.
    weights = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    last = {action.stage: index for index, action in enumerate(rank.compute) if action.op in weights}
    for stage, index in last.items():
        rank.after[index].append(Action(Op.REDUCE, stage))


@lru_cache(maxsize=8)
def known_to_have_arrived(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """For each message that ``rank`` receives, the sends of its own that have arrived when it is there: those that the
    other rank's actions read before it was sent."""
    # The other rank runs its actions in order. A computation of its that reads this rank's message
    # stands before its next send to this rank, so that send proves that the message has arrived.
    found = dict[Action, list[Action]]()
    for other, actions in enumerate(schedule.actions):
        read: list[Action] = []
        for action in actions if other != rank else ():
            inputs = (need for need in needs(schedule, action) if need.op in RECEIVE and action.op in COMPUTE)
            read += [counterpart(need) for need in inputs if schedule.peer(need) == rank]
            if action.op in SEND and schedule.peer(action) == rank:
                found[counterpart(action)], read = read, []
    return found
