"""A collective as data: for every rank, the list of actions that it runs in order.

The buffer of a collective is cut into pieces, one for each rank, and a piece into chunks:

    all-gather       piece r is what rank r gives; in the end all have all pieces
    reduce-scatter   all ranks have all pieces; in the end rank r has the sum of piece r
    all-reduce       the one, then the other

A piece travels along a tree over the ranks whose root is its owner: down in a gather, up in a reduction, where each
rank of the tree adds up, in a fixed order, what comes from below. ``schedules`` makes the trees; everything else reads
this one value: ``validate_collective`` proves it, ``simulate_collective`` times it, ``run`` executes it. Sizes are not
in it: chunk c of k is the c-th k-th of its piece, whatever that is.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from smp.parallel.network.topology import Topology

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Route = Literal["mesh", "ring"]


class Op(Enum):
    """Kinds of action."""

    SEND = "send"
    RECEIVE = "receive"
    """Receive a chunk and overwrite this rank's data of it."""
    RECEIVE_PART = "receive_part"
    """Receive a chunk into scratch memory, for a later REDUCE."""
    REDUCE = "reduce"
    """Add parts that were received to what this rank has, in the order of ``ranks``."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does with a chunk.

    Attributes:
        ranks: of a message the one rank at its other end; of a sum whose parts, this rank's own among them.
    """

    op: Op
    piece: int
    chunk: int
    ranks: tuple[int, ...]

    @property
    def peer(self) -> int:
        """The rank at the other end of a message."""
        return self.ranks[0]

    @property
    def key(self) -> tuple[int, int]:
        """Which chunk."""
        return self.piece, self.chunk

    def __str__(self) -> str:
        return f"{self.op.value}(piece {self.piece}, chunk {self.chunk}, {', '.join(map(str, self.ranks))})"


Message = tuple[int, int, int, int]  # source, destination, piece, chunk


@dataclass(frozen=True)
class Schedule:
    """Actions of every rank for one collective.

    A message hands its buffer over and the rank continues. It travels once both sides have posted it, and messages from
    one rank to another never overtake each other. A send waits for the chunk that it passes on, a sum for its parts.

    Attributes:
        route: how chunks travel between nodes: straight from their owners, or round all nodes.
        topology: what the schedule was made for.
        chunks: number of each piece's chunks; 0 of an empty one.
    """

    kind: Kind
    route: Route
    topology: Topology
    chunks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.size

    def __str__(self) -> str:
        return f"{self.kind} over {self.topology} by {self.route}"


def waits(rank: int, actions: Sequence[Action]) -> Iterator[tuple[Action, list[Message]]]:
    """Each action of a rank, with the messages that have to arrive before it runs."""
    # Chunks whose receive is posted, and that nothing has waited for yet.
    arriving: dict[tuple[int, int], int] = {}
    for action in actions:
        needed: list[Message] = []
        if action.op is Op.RECEIVE:
            arriving[action.key] = action.peer
        # Only the first send of a chunk waits: after it the chunk is there.
        elif action.op is Op.SEND and action.key in arriving:
            needed = [(arriving.pop(action.key), rank, *action.key)]
        elif action.op is Op.REDUCE:
            # A sum waits for its parts, each of which is a message.
            needed = [(source, rank, *action.key) for source in action.ranks if source != rank]
        yield action, needed


def span(size: int, chunks: int, chunk: int) -> tuple[int, int]:
    """(start, stop) of a chunk within a piece of ``size`` elements."""
    # Whole elements, and chunks that differ by one at most, for any size.
    return size * chunk // chunks, size * (chunk + 1) // chunks


def even_sizes(elements: int, parts: int) -> list[int]:
    """Sizes of ``parts`` pieces that differ by one element at most."""
    # The same rounding as :func:`span`'s, so both cut alike.
    return [elements * (i + 1) // parts - elements * i // parts for i in range(parts)]
