"""The three collectives as schedules, from nodes and numbers of chunks.

Between nodes a chunk crosses each uplink as rarely as can be: one rank of every other node, the piece's *handler*
there, receives it and passes it on inside. The handler has the owner's index in its node (modulo the node's ranks), so
that pieces split over all ranks of a node, in stripes. In a reduction a handler adds up its node's parts first, and
one sum per node crosses:

    mesh   owner -> handler of each other node -> the rest of its node     one hop; owners start with different nodes
    ring   owner -> handler of the next node -> ... -> of the last node    n - 1 hops; each uplink carries one stream

Receives of a gather are all posted first, in place: nothing is sorted afterwards. Those of a reduction are posted
``WINDOW`` sums ahead, which bounds the scratch memory. Chunks let both kinds of links work at once.

A flat collective is the same over ``Topology.each_alone``: one rank on each node.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smp.parallel.network.collective_schedule import Action, Kind, Op, Route, Schedule
from smp.parallel.network.topology import Topology

WINDOW = 8
"""Sums whose parts a rank is ready to receive."""


def all_gather(topology: Topology, chunks: Sequence[int], route: Route = "mesh") -> Schedule:
    """Every rank gets every piece. ``chunks``: of each rank's piece."""
    return schedule_of("all-gather", topology, chunks, route)


def reduce_scatter(topology: Topology, chunks: Sequence[int], route: Route = "mesh") -> Schedule:
    """Every rank gets the sum of its piece. ``chunks``: of each rank's piece."""
    return schedule_of("reduce-scatter", topology, chunks, route)


def all_reduce(topology: Topology, chunks: Sequence[int], route: Route = "mesh") -> Schedule:
    """Every rank gets the sum of all pieces. ``chunks``: of each piece, however the buffer is cut into pieces."""
    return schedule_of("all-reduce", topology, chunks, route)


def schedule_of(kind: Kind, topology: Topology, chunks: Sequence[int], route: Route) -> Schedule:
    """The schedule of a kind of collective."""
    if len(chunks) != topology.size or min(chunks, default=0) < 0:
        raise ValueError(f"{topology}: there are chunks of {len(chunks)} pieces: {list(chunks)}")
    sends = _sends_of(_Trees(topology, route), chunks)
    actions = tuple(_actions(kind, _Trees(topology, route), chunks, rank, sends) for rank in range(topology.size))
    return Schedule(kind, route, topology, tuple(chunks), actions)


def actions_of(kind: Kind, topology: Topology, chunks: Sequence[int], route: Route, rank: int) -> tuple[Action, ...]:
    """Actions of one rank alone, as in the whole schedule: what a process of many needs."""
    trees = _Trees(topology, route)
    return _actions(kind, trees, chunks, rank, _sends_of(trees, chunks))


_Sends = Callable[[int], list[Action]]


def _sends_of(trees: _Trees, chunks: Sequence[int]) -> _Sends:
    return functools.cache(lambda rank: _gather_sends(trees, chunks, rank))


def _actions(kind: Kind, trees: _Trees, chunks: Sequence[int], rank: int, sends: _Sends) -> tuple[Action, ...]:
    reductions = [] if kind == "all-gather" else _reductions(trees, chunks, rank)
    return (*reductions, *([] if kind == "reduce-scatter" else _gathers(trees, chunks, rank, sends)))


@dataclass(frozen=True)
class _Trees:
    """The tree of every piece."""

    topology: Topology
    route: Route

    def handler(self, piece: int, node: int) -> int:
        """The rank of a node that a piece enters it through."""
        home, index = self.topology.locations[piece]
        ranks = self.topology.nodes[node]
        return piece if node == home else ranks[index % len(ranks)]

    def away(self, piece: int, node: int) -> int:
        """How many nodes behind the piece's own, counted around."""
        return (node - self.topology.locations[piece][0]) % len(self.topology.nodes)

    def hops(self, piece: int, node: int) -> int:
        """Uplinks between the owner and a node."""
        return self.away(piece, node) if self.route == "ring" else min(self.away(piece, node), 1)

    def onward(self, piece: int, node: int) -> list[int]:
        """Nodes that get a piece from this one."""
        count = len(self.topology.nodes)
        if self.route == "ring":
            return [(node + 1) % count] if self.away(piece, node) < count - 1 else []
        home = self.topology.locations[piece][0]
        # Each owner begins with the node after its own: uplinks into one node are not all busy at once.
        return [(home + step) % count for step in range(1, count)] if node == home else []

    def before(self, piece: int, node: int) -> int:
        """The node that this one gets a piece from."""
        home = self.topology.locations[piece][0]
        return (node - 1) % len(self.topology.nodes) if self.route == "ring" else home

    def source(self, piece: int, rank: int) -> int:
        """The rank that this one, not the owner, gets a piece from."""
        node = self.topology.locations[rank][0]
        # Inside of a node from its handler; the handler from the node before.
        handler = self.handler(piece, node)
        return handler if handler != rank else self.handler(piece, self.before(piece, node))

    def local(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node."""
        return self.topology.nodes[self.topology.locations[rank][0]]


def _gathers(trees: _Trees, chunks: Sequence[int], rank: int, sends: _Sends) -> list[Action]:
    """All receives, then its own chunks, then those that it passes on, in the order of their arrival."""
    sources = sorted({trees.source(piece, rank) for piece in range(len(chunks)) if piece != rank})
    receives = [
        Action(Op.RECEIVE, action.piece, action.chunk, (source,))
        for source in sources
        for action in sends(source)
        if action.peer == rank
    ]
    return receives + sends(rank)


def _gather_sends(trees: _Trees, chunks: Sequence[int], rank: int) -> list[Action]:
    node = trees.topology.locations[rank][0]
    handled = [piece for piece in range(len(chunks)) if trees.handler(piece, node) == rank]
    # Chunks in the order in which they arrive: own ones first, then by chunk and hops; of equal
    # ones those of nearer nodes.
    order = sorted(
        (-1 if piece == rank else chunk + trees.hops(piece, node), trees.away(piece, node), chunk, piece)
        for piece in handled
        for chunk in range(chunks[piece])
    )
    made = []
    for _, _, chunk, piece in order:
        # Across the uplink first: it is the slower link, and other nodes wait for it.
        others = [trees.handler(piece, other) for other in trees.onward(piece, node)]
        others += [other for other in trees.local(rank) if other != rank]
        made += [Action(Op.SEND, piece, chunk, (other,)) for other in others]
    return made


def _reductions(trees: _Trees, chunks: Sequence[int], rank: int) -> list[Action]:
    """Actions of one rank: parts to the handlers of its node, and sums of those that it handles."""
    node = trees.topology.locations[rank][0]
    last = len(trees.topology.nodes) - 1
    # chunks whose sums have a longer way go first, and each node begins with another one's
    # Uplinks that a sum has still to pass, on the way to its owner.
    rest = {piece: (last if trees.route == "ring" else 1) - trees.hops(piece, node) for piece in range(len(chunks))}
    order = sorted(
        (chunk + rest[piece], rest[piece], -trees.away(piece, node), piece, chunk)
        for piece, count in enumerate(chunks)
        for chunk in range(count)
    )
    actions: list[Action] = []
    # What others of the node handle waits for nothing, but sent all at once it holds up what has to cross first.
    for _, level in itertools.groupby(order, key=lambda entry: entry[:2]):
        given: list[Action] = []
        made: list[Action] = []
        for *_, piece, chunk in level:
            (made if trees.handler(piece, node) == rank else given).extend(_reduction(trees, piece, chunk, rank))
        actions += given + made
    return _with_receives(rank, actions)


def _reduction(trees: _Trees, piece: int, chunk: int, rank: int) -> list[Action]:
    node = trees.topology.locations[rank][0]
    handler = trees.handler(piece, node)
    if handler != rank:
        return [Action(Op.SEND, piece, chunk, (handler,))]
    made = []
    if len(trees.local(rank)) > 1:
        # Two sums: of this node's ranks, then with the sums of nodes that send to this one. The
        # order of the parts is fixed, and so are the bits.
        made.append(Action(Op.REDUCE, piece, chunk, trees.local(rank)))
    if below := trees.onward(piece, node):
        # The order of a sum: by node on a mesh; on a ring what came round, and then this node's.
        nodes = sorted([node, *below]) if trees.route == "mesh" else [*below, node]
        made.append(Action(Op.REDUCE, piece, chunk, tuple(trees.handler(piece, other) for other in nodes)))
    if rank != piece:
        made.append(Action(Op.SEND, piece, chunk, (trees.handler(piece, trees.before(piece, node)),)))
    return made


def _with_receives(rank: int, actions: list[Action]) -> list[Action]:
    """``actions`` with receives: those of a sum are posted right after the sum ``WINDOW`` before it."""
    sums = [action for action in actions if action.op is Op.REDUCE]
    posted = [
        [Action(Op.RECEIVE_PART, *action.key, (source,)) for source in action.ranks if source != rank]
        for action in sums
    ]
    made = [receive for receives in posted[:WINDOW] for receive in receives]
    coming = iter(posted[WINDOW:])
    for action in actions:
        made.append(action)
        if action.op is Op.REDUCE:
            made += next(coming, [])
    return made
