"""Simulates a schedule: start and end of every action, from the time that each stage takes.

A rank has three engines. It computes; its channels carry messages; one stream moves parameters and gradients between
data-parallel ranks (unshard, reduce). They run at the same time: only a computation waits, for its message and for its
parameters. A channel, from one rank to another, carries one message at a time, from when both sides have posted it.

Numbers are taken as they come: integers and fractions give exact results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Action, Op, Schedule, counterpart, needs
from smp.pipeline.timeline import Span, Timeline
from smp.pipeline.validate_schedule import execution_order


@dataclass(frozen=True)
class StageCosts:
    """Times of one stage: for one micro-batch, and for one collective over its parameters or gradients."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    unshard: float = 0
    reduce: float = 0

    @property
    def total(self) -> float:
        """Time of all computation for one micro-batch."""
        return self.forward + self.backward_input + self.backward_weight

    def of(self, op: Op) -> float:
        """Time that an action takes once it runs; a whole backward is the sum of its parts."""
        if op is Op.BACKWARD:
            return self.backward_input + self.backward_weight
        return 0 if op is Op.RESHARD else getattr(self, op.value)


def simulate(schedule: Schedule, costs: Sequence[StageCosts], link: float = 0) -> Timeline:
    """The timeline of a valid schedule that starts at 0, from the costs of its stages and the time of one message.

    Raises:
        ValueError: ``costs`` is for another number of stages, or a time is negative.
        ScheduleError: the schedule deadlocks.
    """
    if len(costs) != schedule.stages:
        raise ValueError(f"{schedule.name} has {schedule.stages} stages, there are costs for {len(costs)}")
    if min(link, *(time for stage in costs for time in astuple(stage))) < 0:
        raise ValueError(f"times are at least 0, not {costs} and {link} per message")
    engines = _Engines(schedule, costs, link)
    # In this order all that an action waits for has its time already.
    for rank, position in execution_order(schedule):
        engines.run(rank, schedule.actions[rank][position])
    return Timeline(schedule.ranks, tuple(engines.spans))


class _Engines:
    """Clocks of all ranks. Actions are run in an order in which nothing is waited for that has not been run."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts], link: float) -> None:
        self.schedule, self.costs, self.link = schedule, costs, link
        self.clock: list[float] = [0] * schedule.ranks  # until when a rank has gone through its actions
        self.stream: list[float] = [0] * schedule.ranks  # until when its collectives on parameters last
        self.channel: defaultdict[tuple[int, int], float] = defaultdict(int)  # until when a channel is taken
        self.posted: dict[Action, float] = {}  # receive -> when the first of the two sides posted the message
        self.ready: dict[Action, float] = {}  # receive or unshard -> when the data is there
        self.spans: list[Span] = []

    def run(self, rank: int, action: Action) -> None:
        if action.op in COMPUTE:
            self._compute(rank, action)
        elif action.op in SEND | RECEIVE:
            self._post(rank, action)
        else:
            self._parameters(rank, action)

    def _span(self, rank: int, action: Action, start: float) -> float:
        """Record the action; returns its end."""
        time = self.link if action.op in SEND | RECEIVE else self.costs[action.stage].of(action.op)
        span = Span(rank, action, start, start + time)
        self.spans.append(span)
        return span.end

    def _compute(self, rank: int, action: Action) -> None:
        waits = [need for need in needs(self.schedule, action) if need.op in RECEIVE]
        waits.append(Action(Op.UNSHARD, action.stage))
        # The rank, its messages and its weights: the last of them to be there begins the computation.
        start = max(self.clock[rank], *(self.ready[wait] for wait in waits))
        self.clock[rank] = self._span(rank, action, start)

    def _parameters(self, rank: int, action: Action) -> None:
        if action.op is Op.RESHARD:
            self._span(rank, action, self.clock[rank])
            return
        # Collectives on weights and gradients queue on a stream of their own, and the rank continues meanwhile.
        start = max(self.clock[rank], self.stream[rank])
        self.stream[rank] = self.ready[action] = self._span(rank, action, start)

    def _post(self, rank: int, action: Action) -> None:
        """Post one end of a message. It starts when the second end is posted."""
        send, receive = (action, counterpart(action)) if action.op in SEND else (counterpart(action), action)
        # Only the first side is here: no time passes for it, as with ``isend`` and ``irecv``.
        if receive not in self.posted:
            self.posted[receive] = self.clock[rank]
            return
        source, destination = (self.schedule.rank_of(end.stage) for end in (send, receive))
        # Both sides have posted it, and the channel has carried all messages before it.
        start = max(self.posted[receive], self.clock[rank], self.channel[source, destination])
        self._span(source, send, start)
        # One message, two spans: both ends show it for as long as it travels.
        self.channel[source, destination] = self.ready[receive] = self._span(destination, receive, start)
