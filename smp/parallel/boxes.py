"""Which part of a whole tensor a rank has: offsets and sizes, from its DTensor placements."""

from __future__ import annotations

from collections.abc import Sequence
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
    # The last parts may be shorter, or empty.
    rows = -(-size // parts)
    start = min(index * rows, size)
    return start, min(rows, size - start)


@dataclass(frozen=True)
class Cut:
    """One cut of a tensor: its dimension ``dim`` over the ranks of dimension ``mesh_dim`` of its mesh."""

    mesh_dim: int
    dim: int


def cuts_of(tensor: DTensor) -> list[Cut]:
    """The cuts that made this tensor's parts, in the order in which they were made.

    FSDP2 cuts the local rows of a tensor that TP has cut before, and notes that as ``_StridedShard``: its mesh
    dimension stands to the left of TP's, but was applied after it.

    Raises:
        ValueError: for a placement that is neither a shard nor a replica.
    """
    plain, strided = [], []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            strided.append(Cut(mesh_dim, placement.dim))
        elif isinstance(placement, Shard):
            plain.append(Cut(mesh_dim, placement.dim))
        elif not isinstance(placement, Replicate):
            raise ValueError(f"placement {placement} has no box")
    return plain + strided


def box_at(shape: Sequence[int], cuts: Sequence[Cut], sizes: Sequence[int], coordinate: Sequence[int]) -> Box:
    """The box of a tensor of ``shape`` that the rank at ``coordinate`` of a mesh of ``sizes`` has after ``cuts``.

    torch's own offset arithmetic assumes even shards where two cuts meet; this one repeats the cuts in the order in
    which they were made, so uneven and empty shards come out right.
    """
    # Each cut works on what the cuts before have left.
    offsets, lengths = [0] * len(shape), list(shape)
    for cut in cuts:
        start, lengths[cut.dim] = chunk(lengths[cut.dim], sizes[cut.mesh_dim], coordinate[cut.mesh_dim])
        offsets[cut.dim] += start
    return Box(tuple(offsets), tuple(lengths))


def local_box(tensor: torch.Tensor) -> Box:
    """The box of the global tensor that this rank's local part covers.

    Raises:
        ValueError: for a placement that is neither a shard nor a replica.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    return box_at(tensor.shape, cuts_of(tensor), tensor.device_mesh.shape, coordinate)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, on the same memory: all of it unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """``part``, of this rank, as a DTensor that is cut as ``tensor`` is, evenly or not."""
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
