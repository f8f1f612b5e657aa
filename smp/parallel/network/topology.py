"""Which ranks of a group are on which node, and the rates of the links. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smp.config import ConfigError


@dataclass(frozen=True)
class Topology:
    """Nodes of a group, each with its ranks; both in the order of sums.

    Attributes:
        nodes: ranks 0 .. size - 1 of the group, each on one node, in ascending order of first ranks.
        names: of the nodes, for messages.
    """

    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ()

    @staticmethod
    def of(hosts: Sequence[str]) -> Topology:
        """Ranks with the same text are on one node."""
        # In the order of first ranks, so that all ranks number the nodes alike.
        names = tuple(dict.fromkeys(hosts))
        return Topology(tuple(tuple(r for r, host in enumerate(hosts) if host == name) for name in names), names)

    @staticmethod
    def even(nodes: int, ranks_per_node: int) -> Topology:
        """Equal nodes of neighbouring ranks."""
        starts = range(0, nodes * ranks_per_node, ranks_per_node)
        ranks = tuple(tuple(range(start, start + ranks_per_node)) for start in starts)
        return Topology(ranks, tuple(f"node{number}" for number in range(nodes)))

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def locations(self) -> tuple[tuple[int, int], ...]:
        """(node, index in it) of each rank."""
        found = {rank: (a, i) for a, node in enumerate(self.nodes) for i, rank in enumerate(node)}
        return tuple(found[rank] for rank in range(self.size))

    @cached_property
    def crossings(self) -> int:
        """Most edges of a ring in the order of ranks that leave a node: 1 where neighbours share nodes."""
        nodes = [node for node, _ in self.locations]
        # Edges of the ring that leave a node, counted for each node.
        leaving = Counter(here for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if here != there)
        return max(leaving.values(), default=0)

    def beyond(self, rank: int) -> frozenset[int]:
        """The ranks of all nodes but this rank's."""
        return frozenset(range(self.size)) - set(self.nodes[self.locations[rank][0]])

    def name_of(self, rank: int) -> str:
        """Name of a rank's node."""
        node = self.locations[rank][0]
        return self.names[node] if self.names else f"node {node}"

    def part(self, ranks: Sequence[int]) -> Topology:
        """Topology of the group of these ranks, which gets them in this order as ranks 0, 1, ..."""
        return Topology.of([self.name_of(rank) for rank in ranks])

    def each_alone(self) -> Topology:
        """Topology of the same ranks with one rank per node: that of a flat collective."""
        return Topology(tuple((rank,) for rank in range(self.size)))

    @property
    def several_levels(self) -> bool:
        """Whether there are links of both kinds."""
        return len(self.nodes) > 1 and any(len(node) > 1 for node in self.nodes)

    def __str__(self) -> str:
        counts = sorted({len(node) for node in self.nodes})
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{_count(len(self.nodes), 'node')} of {_count(each, 'rank')}"


def _count(number: object, what: str) -> str:
    return f"{number} {what}{'' if str(number) == '1' else 's'}"


@dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        latency: seconds of a message without bytes.
        rate: bytes per second in each direction.
    """

    latency: float
    rate: float


@dataclass(frozen=True)
class Links:
    """Rates of a network.

    Attributes:
        between: of a node's uplink, which its ranks share.
        inside: of one rank within its node.
        call: seconds that a process spends on posting one message.
        add: bytes per second that a process adds up.
    """

    between: Link
    inside: Link
    call: float = 20e-6
    add: float = 3e9


def read_topology(path: str, world_size: int) -> tuple[Topology | None, Links | None]:
    """(nodes, links) of a file of --network-topology; what it leaves out is None.

    JSON: ``{"nodes": [[0, 1], [2, 3]], "between": {"gbit_per_s": 0.4, "latency_us": 100}, "inside": {...}}``. Nodes
    list the ranks of the run; ``between`` is a node's uplink, ``inside`` one rank's link in its node.

    Raises:
        ConfigError: the file is not this, or is of another number of ranks.
    """
    try:
        with open(path, encoding="utf-8") as file:
            said: Any = json.load(file, object_pairs_hook=_each_once)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--network-topology {path}: {error}") from None
    known = {"nodes", "between", "inside"}
    # Links come in pairs: with one kind alone nothing can be predicted.
    if not isinstance(said, dict) or not said or not set(said) <= known or (("between" in said) != ("inside" in said)):
        raise ConfigError(f"--network-topology {path}: a JSON object with nodes, or between and inside, or all three")
    nodes = _nodes(path, said["nodes"], world_size) if "nodes" in said else None
    links = (
        Links(_link(path, "between", said["between"]), _link(path, "inside", said["inside"]))
        if "inside" in said
        else None
    )
    return nodes, links


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; raises ValueError for a repeated key, of which Python's reader would take the last
    value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return found


def _nodes(path: str, said: Any, world_size: int) -> Topology:
    lists = isinstance(said, list) and all(isinstance(node, list) and node for node in said)
    ranks = _flat(said) if lists else []
    # ``type(...) is``: JSON's true is an int for isinstance.
    if not all(type(rank) is int for rank in ranks) or sorted(ranks) != list(range(world_size)):
        raise ConfigError(
            f"--network-topology {path}: nodes has to name each of the ranks 0 to {world_size - 1} of this run once, "
            "and no empty node"
        )
    hosts = {rank: f"node{number}" for number, node in enumerate(said) for rank in node}
    return Topology.of([hosts[rank] for rank in range(world_size)])


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


def _link(path: str, name: str, said: Any) -> Link:
    try:
        # ``set`` of a number is a TypeError; strings and lists fail here or at the index below.
        if set(said) != {"latency_us", "gbit_per_s"}:
            raise ValueError(said)
        link = Link(float(said["latency_us"]) / 1e6, float(said["gbit_per_s"]) * 1e9 / 8)
    except (TypeError, KeyError, ValueError):
        # Not a link: refused below, with the same message as numbers out of range.
        link = Link(-1.0, 0.0)
    if not (0 <= link.latency < 1e3 and 0 < link.rate < 1e15):
        raise ConfigError(
            f"--network-topology {path}: {name} needs gbit_per_s above 0 and latency_us of at least 0, no "
            f"other key, not {said}"
        )
    return link
