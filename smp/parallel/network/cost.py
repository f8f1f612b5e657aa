"""Predicted time of a collective by formula, and the fastest way to run it. Imports no torch; any number of nodes.

n nodes of P ranks, N ranks, S bytes of the whole buffer, B an uplink's rate, L a rank's inside of its node:

    flat gather     a ring in the order of ranks, N - 1 steps       (N - 1)/N S / min(B, L) and all hops' latencies
    flat reduce-scatter and all-reduce of gloo                      twice that
    between nodes   one chunk of k            A = hops x latency + (n - 1)/n S / (k B)
    inside          one chunk                 I = (P - 1) x latency + (P - 1)/P S / (k L)
    two levels                                T = k max(A, I) + min(A, I), and calls and sums of the busiest process
    all-reduce      the sum of both

With unequal nodes the busiest counts. What a ring's link carries when ranks of a node are not neighbours is counted,
too. On unequal nodes, or where both kinds of links are about as fast, the formulas are off by up to a half. So what
is best by formula is simulated, message by message, as far as that takes no longer than a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from smp.parallel.network.collective_schedule import Kind, Route, even_sizes
from smp.parallel.network.fabric import ring
from smp.parallel.network.schedules import schedule_of
from smp.parallel.network.simulate_collective import simulate
from smp.parallel.network.topology import Links, Topology

CHUNKS = (1, 2, 3, 4, 8, 16)
"""Numbers of chunks that are tried."""
FINER = (6, 12)
"""Numbers of chunks that are tried after ``CHUNKS``, in groups of up to about 16 ranks."""
MESSAGES = 60_000
"""Most messages that are simulated to choose a way for a size, once, in about a second. In groups of up to 16 ranks
that is enough for all ways; in larger ones for those that are best by formula; above 170 to 240 ranks not even for one,
and the formula alone decides. Of 30 unequal groups of 17 to 40 ranks it picked a way more than 5 % off the best in 9,
at worst 2.7 times as slow."""
MEETING = 1.05
"""Streams of several nodes that meet at a node's uplink do not share it evenly, which no formula here knows: a mesh has
to be predicted to be so much faster than a ring. (By TCP on 4 nodes of 2 ranks it took 1.07 to 1.25 times as long.)"""
LEAST_CHUNK = 64 << 10
"""Bytes below which a piece is not cut into more chunks: posting messages would take longer than they save."""


@dataclass(frozen=True)
class Way:
    """A way to run a collective.

    Attributes:
        route: between nodes; None: flat, as the process group does it.
        chunks: of each piece.
    """

    route: Route | None = None
    chunks: int = 1

    def __str__(self) -> str:
        return "flat" if self.route is None else f"hierarchical by {self.route}, {self.chunks} chunks"


FLAT = Way()


def flat_ring(kind: Kind, topology: Topology, links: Links, size: int, *, gloo: bool = True) -> float:
    """Seconds of a ring over all ranks that knows no nodes.

    Args:
        size: bytes of the whole buffer.
        gloo: a reduce-scatter is an all-reduce of which most is thrown away. NCCL's is not.
    """
    nodes, ranks = topology.nodes, topology.size
    if ranks == 1:
        return 0.0
    inside = any(len(node) > 1 for node in nodes)
    # A ring is as fast as its slowest link; streams that leave a node share its uplink.
    rate = min([links.between.rate / max(1, topology.crossings)] * (len(nodes) > 1) + [links.inside.rate] * inside)
    hops = (ranks - len(nodes)) * links.inside.latency + (len(nodes) - 1) * links.between.latency
    once = ring(ranks, size, rate, hops + 2 * (ranks - 1) * links.call)
    # A ring all-reduce is a reduce-scatter and an all-gather.
    twice = kind == "all-reduce" or (kind == "reduce-scatter" and gloo)
    return once * (2 if twice else 1)


def two_levels(kind: Kind, topology: Topology, links: Links, size: int, way: Way) -> float:
    """Seconds of a hierarchical collective over equal pieces; ``size``: bytes of the whole buffer."""
    if kind == "all-reduce":
        halves: tuple[Kind, Kind] = ("all-gather", "reduce-scatter")
        return sum(two_levels(half, topology, links, size, way) for half in halves)
    nodes, chunks = [len(node) for node in topology.nodes], way.chunks
    ranks, count, most = topology.size, len(nodes), max(len(node) for node in topology.nodes)
    piece = size / ranks
    crossing, hops = 0.0, 0
    if count > 1:
        following = [*nodes[1:], nodes[0]]
        # Pieces that leave each node: on a ring all except those of the next node, which end there; on
        # a mesh its own pieces, once for each other node.
        out = [ranks - n if way.route == "ring" else (count - 1) * m for n, m in zip(following, nodes, strict=True)]
        # The busiest uplink, outwards or inwards: a node receives all pieces but its own.
        crossing = max(max(o, ranks - m) for o, m in zip(out, nodes, strict=True)) * piece
        hops = count - 1 if way.route == "ring" else 1
    # pieces that the busiest rank handles; each goes to all others of its node, or comes from them
    others = Counter(nodes)
    handled = max(sum(-(-other // mine) * times for other, times in others.items()) for mine in others)
    # A and I of the module docstring, for one chunk.
    between = hops * links.between.latency + crossing / chunks / links.between.rate
    inside = (most > 1) * (links.inside.latency + handled * (most - 1) * piece / chunks / links.inside.rate)
    messages = chunks * (2 * handled * (most - 1) + 2 * (count - 1))
    adding = 0.0 if kind == "all-gather" else handled * (most - 1) + count - 1
    # What the process itself does, of which no link can hide more than there is.
    own = messages * links.call + adding * piece / links.add
    # Chunks pass both levels like a pipeline: the slower one is always busy, the faster one is seen once.
    return max(chunks * max(between, inside) + min(between, inside), own)


def ways(topology: Topology, piece: int, numbers: Sequence[int] = CHUNKS) -> Iterable[Way]:
    """Candidate hierarchical ways for pieces of ``piece`` bytes, with each of ``numbers`` of chunks."""
    for chunks in numbers:
        if chunks == 1 or piece // chunks >= LEAST_CHUNK:
            yield Way("mesh", chunks)
            if len(topology.nodes) > 2:
                yield Way("ring", chunks)


def weight(way: Way, topology: Topology) -> float:
    """Factor of a predicted time where ways are compared, see ``MEETING``."""
    return MEETING if way.route == "mesh" and len(topology.nodes) > 2 else 1.0


def least_chunks(topology: Topology, piece: int) -> Way:
    """A good way where links are not known: pieces of so many bytes in chunks of 256 KiB; round all nodes, unless
    there are but two or messages are so short that their latency counts."""
    ring = len(topology.nodes) > 2 and piece >= LEAST_CHUNK
    return Way("ring" if ring else "mesh", max(1, min(CHUNKS[-1], piece // (256 << 10))))


@dataclass(frozen=True)
class Policy:
    """Which way each collective of a group goes: a function of kind and bytes, the same on all ranks.

    Attributes:
        topology: of the group.
        links: None: not known, the way depends on sizes alone.
        allow_flat: False: always hierarchical.
        hierarchical: False: always flat.
        smallest: bytes below which it is flat.
    """

    topology: Topology
    links: Links | None = None
    allow_flat: bool = True
    hierarchical: bool = True
    smallest: int = 0
    _known: dict[tuple[Kind, int], Way] = field(default_factory=dict, init=False, compare=False, repr=False)

    def way(self, kind: Kind, size: int) -> Way:
        """How a collective with a whole buffer of ``size`` bytes is to run."""
        if not self.hierarchical or size < self.smallest:
            return FLAT
        # Decided once for each size: FSDP calls with a few sizes, thousands of times.
        if (kind, size) not in self._known:
            self._known[kind, size] = self._decide(kind, size)
        return self._known[kind, size]

    def _decide(self, kind: Kind, size: int) -> Way:
        piece = size // self.topology.size
        if self.links is None:
            return least_chunks(self.topology, piece)
        tried = [*([FLAT] if self.allow_flat else []), *ways(self.topology, piece)]
        # Finer ones last: in a large group they would replace ways that differ more.
        finer = list(ways(self.topology, piece, FINER))
        for some in (tried, finer):
            some.sort(key=lambda way: self._formula(kind, size, way) * weight(way, self.topology))
        tried += finer
        sent = accumulate(messages(kind, self.topology, way) for way in tried)
        # Best by formula first, so the limit cuts off what is least promising.
        tried = [way for way, total in zip(tried, sent, strict=True) if total <= MESSAGES] or tried[:1]
        return min(tried, key=lambda way: self.seconds(kind, size, way) * weight(way, self.topology))

    def seconds(self, kind: Kind, size: int, way: Way) -> float:
        """Predicted seconds."""
        assert self.links is not None, "nothing is predicted without links"
        if messages(kind, self.topology, way) <= MESSAGES:
            return simulated(kind, self.topology, self.links, size, way)
        return self._formula(kind, size, way)

    def _formula(self, kind: Kind, size: int, way: Way) -> float:
        assert self.links is not None, "nothing is predicted without links"
        if way.route is None:
            return flat_ring(kind, self.topology, self.links, size)
        return two_levels(kind, self.topology, self.links, size, way)


def messages(kind: Kind, topology: Topology, way: Way) -> int:
    """Number of messages of all ranks: each chunk goes to all ranks but one, or comes from them."""
    twice = kind == "all-reduce" or (kind == "reduce-scatter" and way == FLAT)
    return (2 if twice else 1) * topology.size * (topology.size - 1) * way.chunks


def simulated(kind: Kind, topology: Topology, links: Links, size: int, way: Way) -> float:
    """Seconds by the simulator, a flat collective as gloo does it; see :func:`flat_ring` and :func:`two_levels`."""
    sizes, chunks = even_sizes(size, topology.size), [way.chunks] * topology.size
    if way.route is not None:
        return simulate(schedule_of(kind, topology, chunks, way.route), sizes, links).end
    # gloo's reduce-scatter is an all-reduce of which most is thrown away.
    kind = "all-reduce" if kind == "reduce-scatter" else kind
    return simulate(schedule_of(kind, topology.each_alone(), chunks, "ring"), sizes, links, topology).end
