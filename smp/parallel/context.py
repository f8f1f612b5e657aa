"""``ParallelContext``: every mesh and process group of a run, as one value.

Ranks lie on a mesh ``(pp, dp_replicate, dp_shard, cp, tp)``, tp fastest: neighbours share a TP group, so the most
frequent traffic stays inside a node. These are the meshes that the other packages use:

===================  ================================================  ==========================================
field                ranks                                             used by
===================  ================================================  ==========================================
tp                   share every matrix                                layers
cp                   hold slices of the same sequences                 attention, the cut of a batch
ep, expert_fsdp      hold different experts; share the same ones       expert layers and their sharding
ep_tp                hold parts of one copy of all experts             parameters of experts; expert layers
fsdp                 (dp_replicate,) dp_shard x cp                     hybrid FSDP of all other parameters
pp                   hold consecutive layers                           the pipeline
loss_meshes          compute different parts of one loss               the loss, metrics
===================  ================================================  ==========================================

Nothing above this file looks up a mesh dimension by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.config import Layout
from smp.parallel.collectives import Group
from smp.parallel.network.secondary import Parts
from smp.parallel.network.select_collectives import NetworkCollectives

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions of the ranks, slowest first."""


@dataclass(frozen=True)
class ParallelContext:
    """Meshes and groups of one rank. A mesh that is None has one rank.

    Attributes:
        tp: 1-D, the ranks that share every matrix.
        sequence_parallel: the residual stream is split over ``tp`` along the tokens.
        fsdp: 1-D ``(dp_shard)`` or 2-D ``(dp_replicate, dp_shard)``, on a common root with ``tp``. A replicate
            dimension of size one is left out: FSDP2 would run its all-reduce path, one copy per gradient, for nothing.
        pp, cp: 1-D.
        cp_exchange: what attention exchanges over: ``cp``, or 2-D ``(p2p, a2a)`` of the same ranks, of which neighbours
            exchange heads and the others keys.
        ep: 1-D, the ranks that hold different experts; None: experts are sharded as all other parameters.
        ep_tp: 2-D ``(ep, tp)``, over which the parameters of experts lie; None without ``ep``: they lie on ``tp``. Its
            ``tp`` are those neighbours of ``tp`` that cut an expert's width: all, or with expert tensor parallelism of
            a smaller size some; the others' ranks are then among ``ep`` and ``expert_fsdp``.
        expert_fsdp: as ``fsdp``, of the parameters of experts, on a common root with ``ep_tp``.
        loss_meshes: 1-D meshes over which the parts of a loss are summed, one after the other.
        collectives: how FSDP's gathers and sums over ``fsdp`` and ``expert_fsdp`` run; None: flat.
        data_rank, data_size: index and number of the shares that a batch is cut into; equal over tp, cp and pp.
    """

    tp: DeviceMesh
    sequence_parallel: bool = False
    fsdp: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    cp_exchange: DeviceMesh | None = None
    ep: DeviceMesh | None = None
    ep_tp: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None
    loss_meshes: tuple[DeviceMesh, ...] = ()
    collectives: NetworkCollectives | None = None
    data_rank: int = 0
    data_size: int = 1

    @staticmethod
    def of(mesh: DeviceMesh | ParallelContext, *, sequence_parallel: bool = False) -> ParallelContext:
        """A context of tensor parallelism alone from a plain 1-D mesh, for layers in a model of one's own. A context is
        returned as it is.

        Raises:
            ValueError: the mesh has more than one dimension, or the context contradicts ``sequence_parallel``.
        """
        if isinstance(mesh, ParallelContext):
            if sequence_parallel and not mesh.sequence_parallel:
                raise ValueError("this context has no sequence parallelism: say so where it is made")
            return mesh
        if mesh.ndim != 1:
            raise ValueError(f"a one-dimensional mesh is needed, got dimensions {mesh.mesh_dim_names}")
        return ParallelContext(tp=mesh, sequence_parallel=sequence_parallel)

    def meshes(self) -> dict[str, DeviceMesh]:
        """The 1-D meshes that are not None, by name."""
        found = {name: getattr(self, name) for name in ("pp", "cp", "ep", "tp")}
        if self.fsdp is not None:
            # A 1-D mesh is dp_shard alone.
            names = ("dp_replicate", "dp_shard")[-self.fsdp.ndim :]
            found |= {name: self.fsdp[name] if self.fsdp.ndim > 1 else self.fsdp for name in names}
        return {name: mesh for name, mesh in found.items() if mesh is not None}

    def groups(self) -> list[dist.ProcessGroup]:
        """The distinct process groups of all dimensions of all meshes, and the default group."""
        meshes = [getattr(self, one.name) for one in fields(self)] + list(self.loss_meshes)
        found = [mesh.get_group(dim) for mesh in meshes if isinstance(mesh, DeviceMesh) for dim in range(mesh.ndim)]
        default = [dist.group.WORLD] if dist.group.WORLD is not None else []
        # Meshes share groups, such as ``cp`` and ``cp_exchange`` without a second level.
        return list(dict.fromkeys([*default, *found]))

    @property
    def tp_group(self) -> Group:
        """The group of ``tp`` as constants that a compiled graph can hold."""
        return Group.of(self.tp)

    @property
    def shared_by(self) -> Group | None:
        """The group over which gradients of replicated weights (norms, biases after a sum) are summed: under sequence
        parallelism that of ``tp``, whose ranks use them on different tokens; else None."""
        return self.tp_group if self.sequence_parallel else None

    @property
    def ep_group(self) -> Group | None:
        """The group of ``ep``; None: every rank has all experts."""
        return None if self.ep is None else Group.of(self.ep)

    @property
    def expert_tp_group(self) -> Group:
        """The ranks that share every matrix of an expert: those of ``tp``, or some of them."""
        return self.tp_group if self.ep_tp is None else _group_of(self.ep_tp, 1)

    @property
    def data_groups(self) -> tuple[Group, ...]:
        """Groups that together hold the ranks of ``fsdp``: those with different tokens, but for the slices of sequence
        parallelism. A sum over all of them is one over the micro-batches that these ranks compute at the same time."""
        mesh = self.fsdp
        if mesh is None:
            return ()
        return tuple(_group_of(mesh, dim) for dim in range(mesh.ndim))

    def secondary_parts(self, size: int) -> Parts:
        """The argument of :func:`with_secondary_shards` for ``size`` neighbours. For experts the number is
        ``size`` divided by the number of different sets of experts that these neighbours hold."""
        ep = 1 if self.ep is None else self.ep.size()
        # With fewer ranks cutting an expert's width, the others of ``tp`` hold different experts or shards.
        tp_per_etp = self.tp.size() // self.expert_tp_group.size
        return {"parameters": (self.fsdp, size), "experts": (self.expert_fsdp, size * tp_per_etp // ep)}

    @property
    def has_fsdp(self) -> bool:
        """Whether weights are sharded or replicated by FSDP. A whole model on one data-parallel rank needs none."""
        meshes = [mesh for mesh in (self.fsdp, self.expert_fsdp) if mesh is not None]
        # Parts of a pipeline keep FSDP: each micro-batch in flight would hold cast weights of its own.
        return self.fsdp is not None and (self.pp_size > 1 or any(mesh.size() > 1 for mesh in meshes))

    @property
    def cp_group(self) -> Group | None:
        """The group of ``cp``; None: sequences are not cut."""
        return None if self.cp is None else Group.of(self.cp)

    @property
    def cp_rank(self) -> int:
        """Which part of every sequence is this rank's."""
        return 0 if self.cp is None else self.cp.get_local_rank()

    @property
    def cp_size(self) -> int:
        """Number of parts that sequences are cut into."""
        return 1 if self.cp is None else self.cp.size()

    @property
    def pp_rank(self) -> int:
        """This rank's place in the pipeline."""
        return 0 if self.pp is None else self.pp.get_local_rank()

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return 1 if self.pp is None else self.pp.size()

    @property
    def world_size(self) -> int:
        """All processes of the run."""
        return self.data_size * self.cp_size * self.tp.size() * self.pp_size

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank is the one that counts its tokens: ranks of tp, cp and pp read the same samples."""
        return self.tp.get_local_rank() == 0 and self.cp_rank == 0 and self.pp_rank == 0

    def sum_loss(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of ``value`` over the ranks that compute different parts of a loss, in place, outside of autograd."""
        # Not over ``tp``: its ranks have the same loss.
        # One dimension after the other: a sum over all ranks of their product.
        for mesh in self.loss_meshes:
            if mesh.size() > 1:
                dist.all_reduce(value, group=mesh.get_group())
        return value


def build_context(
    layout: Layout,
    device_type: str,
    timeout: timedelta | None = None,
    *,
    sequence_parallel: bool = False,
    heads_group: int = 1,
    replica_backend: str | None = None,
    backend: Callable[[Sequence[int]], str | None] = lambda ranks: None,
    progress: Callable[[], None] = lambda: None,
) -> ParallelContext:
    """The context of this rank for ``layout`` over all ranks of the default process group.

    Args:
        layout: degrees; their product is the world size (checked with a readable error in ``smp.config`` before).
        device_type: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL).
        timeout: of every group's collectives; by default torch's. (``init_device_mesh`` knows no timeout.)
        sequence_parallel: of the context.
        heads_group: neighbours of a ``cp`` group that exchange heads while keys travel between such groups; with 1, or
            all of them, there is one kind of exchange.
        replica_backend: of the groups that sum gradients over replicas; None: as of all others.
        backend: (ranks of a group) -> its backend; None: the default group's.
        progress: called when one more group has been made; thousands of ranks have thousands of groups.
    """
    backends = {"dp_replicate": replica_backend}
    sizes = [int(getattr(layout, name)) for name in MESH_DIMS]
    pp, replicas, shard, cp, tp = sizes
    # Numbers of processes in the order of the dimensions, tp fastest: views of this one tensor give all groups.
    ranks = torch.arange(math.prod(sizes))
    names: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "tp")
    # dp_shard and cp are one dimension here, because FSDP shards over both.
    make = partial(
        _mesh, device_type=device_type, timeout=timeout, backends=backends, backend=backend, progress=progress
    )
    dense = make(ranks.view(pp, replicas, shard * cp, tp), names)
    cp_mesh, exchange = _cp_meshes(ranks, cp, tp, heads_group, make)
    ep, ep_tp, expert_fsdp = _expert_meshes(layout, ranks, make)
    return ParallelContext(
        tp=dense["tp"],
        sequence_parallel=sequence_parallel,
        fsdp=_sharding(dense, "dp_shard"),
        pp=dense["pp"],
        cp=cp_mesh,
        cp_exchange=exchange,
        ep=ep,
        ep_tp=ep_tp,
        expert_fsdp=expert_fsdp,
        loss_meshes=(dense["dp_shard"], dense["dp_replicate"], dense["pp"]),
        # Ranks of one cp group read the same samples; they are neighbours in dp_shard x cp.
        data_rank=dense.get_local_rank("dp_replicate") * shard + dense.get_local_rank("dp_shard") // cp,
        data_size=replicas * shard,
    )


def with_experts_of(
    context: ParallelContext,
    layout: Layout,
    device_type: str,
    timeout: timedelta | None = None,
    *,
    progress: Callable[[], None] = lambda: None,
) -> ParallelContext:
    """``context`` of another model in the same run, whose experts are cut as ``layout`` says. Makes groups: all ranks
    call it together."""
    make = partial(
        _mesh, device_type=device_type, timeout=timeout, backends={}, backend=lambda ranks: None, progress=progress
    )
    ep, ep_tp, expert_fsdp = _expert_meshes(layout, torch.arange(context.world_size), make)
    # The collectives that were chosen are of this run's meshes: the other model's are flat.
    return replace(context, collectives=None, ep=ep, ep_tp=ep_tp, expert_fsdp=expert_fsdp)


def _expert_meshes(
    layout: Layout, ranks: torch.Tensor, make: Callable[..., DeviceMesh]
) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
    """``ep``, ``ep_tp`` and ``expert_fsdp`` of the context; None where experts are sharded as all other parameters."""
    if layout.ep == 1 and layout.expert_tp == layout.tp:
        return None, None, None
    # Neighbours within dp_shard x cp (x tp, but for those that cut an expert) hold different experts; what is left of
    # these ranks shards each expert.
    # The same ranks in the same order, cut into other dimensions.
    shape = (layout.pp, layout.dp_replicate, layout.expert_shard, layout.ep, layout.expert_tp)
    expert = make(ranks.view(shape), ("pp", "dp_replicate", "expert_shard", "ep", "tp"))
    return expert["ep"], expert["ep", "tp"], _sharding(expert, "expert_shard")


def _cp_meshes(
    ranks: torch.Tensor, cp: int, tp: int, heads_group: int, make: Callable[..., DeviceMesh]
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """``cp`` and ``cp_exchange`` of the context. The mesh of all parameters has no dimension for them: there dp_shard
    and cp are one, over which FSDP shards."""
    if cp == 1:
        return None, None
    slices = ranks.view(-1, cp, tp).movedim(-1, 0).reshape(-1, cp)  # a row: ranks with the same sequences
    # Ranks that differ in cp alone: they have the same tp index, and read the same samples.
    whole = make(slices, ("slices", "cp"))["cp"]
    if not 1 < heads_group < cp:
        return whole, whole
    # Neighbours, which share the fastest links, exchange heads; groups of them exchange keys.
    groups = slices.view(-1, cp // heads_group, heads_group)
    return whole, make(groups, ("slices", "p2p", "a2a"))["p2p", "a2a"]


def _group_of(mesh: DeviceMesh, dim: int) -> Group:
    """The group of one dimension."""
    return Group(mesh.get_group(dim).group_name, mesh.size(dim), mesh.get_local_rank(dim))


def _sharding(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """FSDP's mesh: 1-D, or with replicas 2-D (replicate, shard)."""
    return mesh[shard] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", shard]


def _mesh(
    ranks: torch.Tensor,
    names: tuple[str, ...],
    device_type: str,
    timeout: timedelta | None,
    backends: Mapping[str, str | None],
    backend: Callable[[Sequence[int]], str | None],
    progress: Callable[[], None],
) -> DeviceMesh:
    groups = []
    for dim, name in enumerate(names):
        # FSDP2 has no hook for its all-reduce over replicas, so that group gets a backend of its own.
        special = backends.get(name) if ranks.size(dim) > 1 else None
        groups.append(_make_group(ranks, dim, timeout, special, backend, progress))
    # From groups and not by ``init_device_mesh``, which knows no timeout.
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _make_group(
    ranks: torch.Tensor,
    dim: int,
    timeout: timedelta | None,
    special: str | None,
    backend: Callable[[Sequence[int]], str | None],
    progress: Callable[[], None],
) -> dist.ProcessGroup:
    """Make the groups of ranks that differ in ``dim`` only; returns this rank's."""
    # Every process makes all groups of a dimension, in one order, as torch demands.
    own = None
    # Rows of ranks that differ in this dimension only.
    for members in ranks.movedim(dim, -1).flatten(0, -2).tolist():
        group = dist.new_group(members, timeout=timeout, backend=special or backend(members))
        progress()
        own = group if dist.get_rank() in members else own
    assert own is not None, "each rank is in one of them"
    return own
