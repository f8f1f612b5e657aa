"""The one device mesh of a run.

Dimensions, slowest first: ``(pp, dp_replicate, dp_shard, cp, tp)``. Neighbouring ranks share a TP group, so the
chattiest traffic stays inside a node. Hybrid FSDP shards over ``dp_shard`` and replicates over ``dp_replicate``; ``cp``
is the place of context parallelism and always 1 so far. Dimensions of size one keep their place: code that looks one up
never asks whether it exists.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Degrees(Protocol):
    """How many ways each dimension is split; ``smp.config.Layout`` is one."""

    @property
    def pp(self) -> int: ...
    @property
    def dp_replicate(self) -> int: ...
    @property
    def dp_shard(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp(self) -> int: ...


def build_mesh(layout: Degrees, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The mesh for ``layout`` over all ranks of the default process group.

    Args:
        layout: degrees; their product is the world size (checked with a readable error in ``smp.config`` before).
        device_type: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        timeout: of every group's collectives; by default torch's. (``init_device_mesh`` knows no timeout.)
    """
    sizes = tuple(int(getattr(layout, name)) for name in MESH_DIMS)
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    groups = [_own_group(ranks, dim, timeout) for dim in range(len(sizes))]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=MESH_DIMS)


def _own_group(ranks: torch.Tensor, dim: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make the groups of ranks that differ in ``dim`` only; this rank's own."""
    members = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
    return group


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The sub-mesh that FSDP works on: ``(dp_shard)`` alone, or ``(dp_replicate, dp_shard)`` with replicas.

    A replicate dimension of size one is left out: FSDP2 would run its all-reduce path, one copy per gradient, for
    nothing.
    """
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    return mesh["dp_replicate", "dp_shard"]


def data_rank(mesh: DeviceMesh) -> int:
    """Index of this rank's share of the batch, in ``range(dp_replicate * dp_shard)``; equal over its TP group."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")


def sum_over_parts(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum of ``value`` over the ranks that compute different parts of a loss: data-parallel and pipeline ranks.

    Outside autograd; works in place.
    """
    for name in ("dp_shard", "dp_replicate", "pp"):
        group = mesh.get_group(name)
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(value, group=group)
    return value
