"""Which part of the whole tensor a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: where it starts and how large it is, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether the box holds no element."""
        return 0 in self.sizes


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part ``index`` when ``size`` rows are cut as ``torch.chunk`` cuts them."""
    rows = -(-size // parts)
    start = min(index * rows, size)
    return start, min(rows, size - start)


def local_box(tensor: torch.Tensor) -> Box:
    """The box of the global tensor that this rank's local part covers.

    FSDP2 cuts the local rows of a tensor that TP has cut before, and notes that as ``_StridedShard``: its mesh
    dimension stands to the left of TP's, but was applied after it. torch's own offset arithmetic assumes even shards
    there; this one repeats the cuts in the order in which they were made, so uneven and empty shards come out right.

    Raises:
        ValueError: for a placement that is neither a shard nor a replica.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    cuts = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    plain = [c for c in cuts if not isinstance(c[0], _StridedShard)]
    strided = [c for c in cuts if isinstance(c[0], _StridedShard)]
    for placement, parts, index in plain + strided:
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ValueError(f"placement {placement} has no box")
        start, sizes[placement.dim] = chunk(sizes[placement.dim], parts, index)
        offsets[placement.dim] += start
    return Box(tuple(offsets), tuple(sizes))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, on the same memory: all of it unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """``part``, of this rank, as a DTensor that is cut as ``tensor`` is, evenly or not."""
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
