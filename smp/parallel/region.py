"""Shards of a tensor as regions (offsets and sizes), computed from cuts. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """A rectangular part of a tensor: where it starts and how large it is, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether the region holds no element."""
        return 0 in self.sizes


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part ``index`` when ``size`` rows are cut as ``torch.chunk`` cuts them."""
    # The last parts may be shorter, or empty.
    # Rounded up, as torch.chunk does and FSDP2 with it.
    rows = -(-size // parts)
    start = min(index * rows, size)
    return start, min(rows, size - start)


@dataclass(frozen=True)
class Cut:
    """One cut of a tensor: its dimension ``dim`` over the ranks of dimension ``mesh_dim`` of its mesh."""

    mesh_dim: int
    dim: int


def region_at(shape: Sequence[int], cuts: Sequence[Cut], sizes: Sequence[int], coordinate: Sequence[int]) -> Region:
    """The region of a tensor of ``shape`` that the rank at ``coordinate`` of a mesh of ``sizes`` has after ``cuts``.

    torch's own offset arithmetic assumes even shards where two cuts meet; this one repeats the cuts in the order in
    which they were made, so uneven and empty shards come out right.
    """
    # Each cut works on what the cuts before have left.
    offsets, lengths = [0] * len(shape), list(shape)
    for cut in cuts:
        # The offset is within what is left of the dimension, so offsets of several cuts add up.
        start, lengths[cut.dim] = chunk(lengths[cut.dim], sizes[cut.mesh_dim], coordinate[cut.mesh_dim])
        offsets[cut.dim] += start
    return Region(tuple(offsets), tuple(lengths))
