"""Make the attention core for a --cp-comm-type."""

from __future__ import annotations

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from smp.kernels.attention_cores.attention_core import AttentionCore, BlockCore
from smp.layers.context_parallel.gather import AllGatherAttention
from smp.layers.context_parallel.ring import RingAttention
from smp.layers.context_parallel.ulysses import UlyssesAttention
from smp.parallel.collectives import Group

CommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


def context_parallel_attention(core: BlockCore, mesh: DeviceMesh, comm_type: CommType) -> AttentionCore:
    """An attention core for sequences that are split over ``mesh``; it computes with ``core``.

    Args:
        core: computes blocks of queries and keys on this rank.
        mesh: 1-D, the ranks that hold parts of the same sequences; for ``a2a+p2p`` 2-D, (p2p, a2a): neighbours exchange
            heads.
        comm_type: Megatron's names. ``p2p``: a ring; ``all_gather``: of keys and values; ``a2a``: heads for tokens.

    The layouts that it gets have a ``cut``; without one every rank has whole sequences, and computes them alone.
    """
    if comm_type == "p2p":
        return RingAttention(core, Group.of(mesh))
    if comm_type == "all_gather":
        return AllGatherAttention(core, Group.of(mesh))
    if comm_type == "a2a":
        return UlyssesAttention(core, Group.of(mesh))
    # Neighbours, which share the fastest links, exchange heads.
    rings, heads = (Group.of(mesh[name]) for name in mesh.mesh_dim_names or ())
    return UlyssesAttention(RingAttention(core, rings), heads, rest=rings.size, part=rings.rank)
