"""Secondary shards: a second copy of the weights, sharded over a few ranks of one node (hpZ of ZeRO++, arXiv
2306.10209).

The forward pass gathers a unit over all ranks that shard it. Each rank then keeps 1 / ``size`` of the gathered weights,
so that ``size`` neighbours on a node hold all of them, and the backward pass gathers from these neighbours: nothing
crosses an uplink. Both passes compute with the same bits. From the first forward pass on each rank holds (bytes of the
gathered weights) / ``size`` more.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.parallel.collectives import all_gather_flat

Parts = Mapping[str, tuple[DeviceMesh | None, int]]
"""By a name for messages: a mesh, 1-D ``(shard)`` or 2-D ``(replicate, shard)``, and the number of neighbours of the
shard dimension that hold a second copy of the weights. Without a mesh, or with a number below two, nothing is kept."""


class SecondaryShards:
    """Secondary shards of all units that one process group shards.

    Attributes:
        group: the ranks that hold them together, this one among them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._units: list[SecondaryShard] = []

    def of_a_unit(self) -> SecondaryShard:
        """A new secondary shard, for one more FSDP unit."""
        self._units.append(SecondaryShard(self.group))
        return self._units[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's secondary shards so far."""
        return sum(0 if unit.own is None else unit.own.nbytes for unit in self._units)


class SecondaryShard:
    """The secondary shard of one FSDP unit.

    Attributes:
        own: this rank's part of what was gathered last; None before the first time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self.own: torch.Tensor | None = None

    def keep(self, gathered: torch.Tensor) -> None:
        """Copy this rank's part of the whole unit, (n x ranks of the group)."""
        # Equal parts: the buffer is a multiple of the ranks that shard, and these of ``size``.
        part = gathered.chunk(self._size)[self._rank]
        # Memory once, then written over in every forward pass.
        if self.own is None or self.own.shape != part.shape or self.own.dtype != part.dtype:
            self.own = torch.empty_like(part)
        self.own.copy_(part)

    def gather(self, output: torch.Tensor, *, async_op: bool) -> dist.Work | None:
        """All-gather the kept parts of the group's ranks into ``output``, the whole unit."""
        work: dist.Work | None = all_gather_flat(output, self.own, group=self._group, async_op=async_op)
        return work


def secondary_shards(parts: Parts, timeout: timedelta | None = None) -> dict[str, SecondaryShards]:
    """Groups for secondary shards, by the name of the group that shards; every rank of these groups calls this.

    Raises:
        ValueError: a number of neighbours does not divide those that shard.
    """
    made: dict[str, SecondaryShards] = {}
    for mesh, size in parts.values():
        if mesh is None or size < 2:
            continue
        group = mesh.get_group(mesh.ndim - 1)
        neighbours = neighbours_of(group, size)
        # Only its members make it: other ranks have other neighbours.
        inner = dist.new_group(neighbours, timeout=timeout, use_local_synchronization=True)
        assert inner is not None, "this rank is in it"
        made[group.group_name] = SecondaryShards(inner)
    return made


def neighbours_of(group: dist.ProcessGroup, size: int) -> list[int]:
    """The ranks, of the default group, that hold secondary shards with this one.

    Raises:
        ValueError: ``size`` does not divide the group.
    """
    if group.size() % size:
        raise ValueError(f"secondary shards over {size} of {group.size()} ranks: not divisible")
    # Neighbours in the group: with tp fastest and full nodes they are on one node, which
    # :func:`with_secondary_shards` checks.
    first = group.rank() // size * size
    return dist.get_process_group_ranks(group)[first : first + size]
