"""Simulates a collective: start and end of every message, from latencies and rates of links, and bytes of each uplink.

A node's uplink carries one byte after the other in each direction, and so does a rank's link inside of its node. A
message starts when both sides have posted it and the sender's link is free; it ends ``latency`` after its last byte has
left the slower of both ends. Posting and adding take the process's own time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from smp.parallel.network.collective_schedule import Action, Message, Op, Schedule, span, waits
from smp.parallel.network.topology import Links, Topology
from smp.parallel.network.validate_collective import ScheduleError, message_of


@dataclass(frozen=True, slots=True)
class Span:
    """A message, or a sum (``source`` is ``destination``), and when it travels."""

    source: int
    destination: int
    piece: int
    chunk: int
    start: float
    end: float


@dataclass
class Timeline:
    """All messages and sums of a collective, with their times.

    Attributes:
        sent, received: bytes of each node's uplink.
    """

    spans: list[Span] = field(default_factory=list)
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    received: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def end(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.end for span in self.spans), default=0.0)


def simulate(schedule: Schedule, sizes: Sequence[int], links: Links, network: Topology | None = None) -> Timeline:
    """The timeline of a valid schedule that starts at 0.

    Args:
        sizes: bytes of each piece.
        network: where the ranks really are; by default what the schedule was made for.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    return _Network(schedule, sizes, links, network or schedule.topology).run()


class _Network:
    """Clocks of ranks and links. Actions run in the order of their times, so that links serve who comes first."""

    def __init__(self, schedule: Schedule, sizes: Sequence[int], links: Links, network: Topology) -> None:
        self.schedule, self.sizes, self.links, self.locations = schedule, sizes, links, network.locations
        self.programs = [list(waits(rank, actions)) for rank, actions in enumerate(schedule.actions)]
        self.position = [0] * schedule.size
        self.queue: list[tuple[float, bool, int, int]] = []
        self.posted: set[Message] = set()
        self.arrival: dict[Message, float] = {}
        self.asleep: dict[Message, int] = {}  # what a rank waits for
        self.free: defaultdict[tuple[str, int, bool], float] = defaultdict(float)  # kind, number, outwards -> when
        self.timeline = Timeline()

    def run(self) -> Timeline:
        for rank in range(self.schedule.size):
            self._come_back(0.0, rank)
        while self.queue:
            now, *_, rank = heapq.heappop(self.queue)
            self._act(now, rank)
        stuck = [rank for rank, program in enumerate(self.programs) if self.position[rank] < len(program)]
        if stuck:
            raise ScheduleError(f"{self.schedule}: deadlock of ranks {stuck}")
        return self.timeline

    def _come_back(self, time: float, rank: int) -> None:
        """Go on with a rank at that time; of those at the same time receives come first, and ranks take turns."""
        position = self.position[rank]
        if position < len(self.programs[rank]):
            op = self.programs[rank][position][0].op
            # Of actions at one time receives go first, then what stands earlier in its rank's list.
            heapq.heappush(self.queue, (time, op in (Op.SEND, Op.REDUCE), position, rank))

    def _act(self, now: float, rank: int) -> None:
        action, needed = self.programs[rank][self.position[rank]]
        # Asleep until the message's arrival is known: :meth:`_travel` wakes the rank.
        missing = next((message for message in needed if message not in self.arrival), None)
        if missing is not None:
            self.asleep[missing] = rank
            return
        ready = max((self.arrival[message] for message in needed), default=now)
        # Messages are under way: look again when the last one has arrived.
        if ready > now:
            self._come_back(ready, rank)
            return
        self.position[rank] += 1
        self._come_back(now + self._take(now, rank, action), rank)

    def _take(self, now: float, rank: int, action: Action) -> float:
        """Run an action; returns how long the process is busy with it."""
        if action.op is Op.REDUCE:
            # n parts are n - 1 additions.
            busy = self._bytes(action.key) * (len(action.ranks) - 1) / self.links.add
            self.timeline.spans.append(Span(rank, rank, *action.key, now, now + busy))
            return busy
        message = message_of(rank, action)
        assert message is not None, "not a sum"
        # The second side to post a message starts it.
        if message in self.posted:
            self._travel(now, message)
        self.posted.add(message)
        return self.links.call

    def _travel(self, now: float, message: Message) -> None:
        source, destination, *key = message
        size = self._bytes((key[0], key[1]))
        (here, _), (there, _) = self.locations[source], self.locations[destination]
        inside = here == there
        kind, link = ("rank", self.links.inside) if inside else ("node", self.links.between)
        ends = (source, destination) if inside else (here, there)
        out, into = (kind, ends[0], True), (kind, ends[1], False)
        start = max(now, self.free[out])
        # The link is busy for the bytes, not for the latency.
        self.free[out] = start + size / link.rate
        # The receiving end carries one byte after the other as well.
        self.free[into] = max(start, self.free[into]) + size / link.rate
        self.arrival[message] = self.free[into] + link.latency
        # Only what leaves a node crosses its uplink.
        if not inside:
            self.timeline.sent[here] += size
            self.timeline.received[there] += size
        self.timeline.spans.append(Span(source, destination, key[0], key[1], start, self.arrival[message]))
        if message in self.asleep:
            self._come_back(max(now, self.arrival[message]), self.asleep.pop(message))

    def _bytes(self, key: tuple[int, int]) -> int:
        start, stop = span(self.sizes[key[0]], self.schedule.chunks[key[0]], key[1])
        return stop - start
