"""Files of copies in the memory of nodes: where ranks are, who keeps whose file, and how a file goes from one node to
another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.spare_files import SpareNode
from smp.parallel.agree import gather, rank

PIECE = 1 << 26
"""Bytes of a message between nodes."""
# Apart from other messages between the same two ranks.
_TAG = 711


@dataclass(frozen=True)
class Location:
    """Where a rank is.

    Attributes:
        node: number of its node.
        local_rank: number on that node.
    """

    node: int
    local_rank: int


def next_nodes(locations: Sequence[Location]) -> list[int | None]:
    """For each rank, the rank of the next node that keeps a copy of its file; None where there is one node."""
    nodes = sorted({location.node for location in locations})
    members = {node: [r for r, location in enumerate(locations) if location.node == node] for node in nodes}
    if len(nodes) == 1:
        return [None] * len(locations)
    # A ring: the last node's copies are on the first.
    following = dict(zip(nodes, nodes[1:] + nodes[:1], strict=True))
    return [(there := members[following[p.node]])[p.local_rank % len(there)] for p in locations]


class PeerFolder(LocalFolder):
    """A copy in this node's memory. Before files are read, those that a node lacks are sent to it.

    Args:
        path: on this node.
        locations: of all ranks.
        held: names of the files that each node has.
        group: for messages between nodes.
        spare: nodes that do not train.
    """

    def __init__(
        self,
        path: Path,
        locations: Sequence[Location],
        held: Mapping[int, frozenset[str]],
        group: dist.ProcessGroup | None,
        spare: Sequence[SpareNode] = (),
    ) -> None:
        super().__init__(path)
        self.locations, self.held, self.group, self.spare = locations, held, group, spare

    def bring(self, files: frozenset[str]) -> None:
        """Bring ``files``, which this rank is going to read, to this node. Every rank calls it.

        Raises:
            OSError: this rank could not write one; it has taken part all the same.
        """
        failures: list[OSError] = []
        wanted: dict[int, set[str]] = {}
        for location, names in zip(self.locations, gather(files), strict=True):
            wanted.setdefault(location.node, set()).update(names)
        # The first rank of each node: ``reversed`` lets lower ones overwrite.
        leaders = {location.node: r for r, location in reversed(list(enumerate(self.locations)))}
        # Sorted: sender and receiver have to go through the same files in one order.
        for node in sorted(wanted):
            for number, name in enumerate(sorted(wanted[node] - self.held.get(node, frozenset()))):
                sources = [leaders[n] for n in sorted(self.held) if name in self.held[n]]
                if not sources:
                    if rank() == leaders[node]:
                        failures += self._fetch(name)
                    continue
                # Several nodes that have it share the work.
                source = sources[(node + number) % len(sources)]
                if rank() == source:
                    send(self.local / name, leaders[node], self.group)
                elif rank() == leaders[node]:
                    try:
                        receive(self.local / name, source, self.group)
                    except OSError as error:
                        failures.append(error)
        if failures:
            raise failures[0]

    def _fetch(self, name: str) -> list[OSError]:
        """Fetch a file from a node that does not train."""
        copy = self.local.name
        try:
            next(node for node in self.spare if name in node.copies.get(copy, ())).fetch(copy, name, self.local / name)
        except OSError as error:
            return [error]
        return []


def send(path: Path, to: int, group: dist.ProcessGroup | None) -> None:
    """Send a file, or -1 for one that does not exist, as the other rank waits for an answer."""
    # Mapped, not read: the file is in memory already. "c": torch takes no array that cannot be written.
    data = torch.from_numpy(np.memmap(path, np.uint8, "c")) if path.exists() else None
    dist.send(torch.tensor([-1 if data is None else len(data)]), to, group=group, tag=_TAG)
    for piece in () if data is None else data.split(PIECE):
        dist.send(piece, to, group=group, tag=_TAG)


def receive(path: Path, source: int, group: dist.ProcessGroup | None) -> None:
    """Write what a rank sends.

    Raises:
        OSError: it has nothing, or it cannot be written; all of it has been received all the same.
    """
    # All is received even after a failed write: the sender would block otherwise.
    size, failure = torch.zeros(1, dtype=torch.int64), list[OSError]()
    dist.recv(size, source, group=group, tag=_TAG)
    if size < 0:
        raise OSError(f"rank {source} has nothing to send")
    for start in range(0, int(size), PIECE):
        piece = torch.empty(min(int(size) - start, PIECE), dtype=torch.uint8)
        dist.recv(piece, source, group=group, tag=_TAG)
        try:
            with path.open("ab" if start else "wb") as file:
                piece.numpy().tofile(file)
        except OSError as error:
            failure.append(error)
    if failure:
        raise failure[0]
