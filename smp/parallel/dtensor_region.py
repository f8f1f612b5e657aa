"""Which part of a whole tensor a rank has, from its DTensor placements."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from smp.parallel.region import Cut, Region, region_at


def cuts_of(tensor: DTensor) -> list[Cut]:
    """The cuts that made this tensor's parts, in the order in which they were made.

    FSDP2 cuts the local rows of a tensor that TP has cut before, and notes that as ``_StridedShard``: its mesh
    dimension stands to the left of TP's, but was applied after it.

    Raises:
        ValueError: for a placement that is neither a shard nor a replica.
    """
    plain, strided = [], []
    for mesh_dim, placement in enumerate(tensor.placements):
        # Asked first: it is a Shard as well.
        if isinstance(placement, _StridedShard):
            strided.append(Cut(mesh_dim, placement.dim))
        elif isinstance(placement, Shard):
            plain.append(Cut(mesh_dim, placement.dim))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"placement {placement} has no region")
    # TP's cuts first: FSDP2 cut what they left.
    return plain + strided


def local_region(tensor: torch.Tensor) -> Region:
    """The region of the global tensor that this rank's local part covers.

    Raises:
        ValueError: for a placement that is neither a shard nor a replica.
    """
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    return region_at(tensor.shape, cuts_of(tensor), tensor.device_mesh.shape, coordinate)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, on the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """``part``, of this rank, as a DTensor that is cut as ``tensor`` is, evenly or not."""
    shape, stride = tensor.shape, tensor.stride()
    # With shape and stride, which ``from_local`` would otherwise compute as if all parts were equal.
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
