"""Gather many sharded tensors, each whole on one rank (its owner), and scatter the results.

Some computations (Muon's orthogonalization) need a whole matrix, of which every rank has a part. If all ranks gathered
all matrices, each would receive every byte, and all would compute the same. Here n ranks share n matrices: each rank
gets one whole matrix, by an all-to-all in which it sends and receives about as much as it has. Results go back the same
way. A tensor that several mesh dimensions split is assembled one dimension after the other, the last one first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smp.parallel.collectives import all_gather_flat
from smp.parallel.dtensor_region import cuts_of
from smp.parallel.region import Cut, Region, region_at

Parts = Mapping[int, torch.Tensor]
"""This rank's parts of some of a round's tensors, by their number in the round."""


@dataclass(frozen=True)
class _Shared:
    """A tensor of ``shape`` that ``cuts`` split over a mesh, in the order in which they were made."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def region(self, undone: Sequence[Cut], at: tuple[int, int] | None = None) -> Region:
        """The region of a rank when some cuts are undone: of this rank, or of the one at index ``at[1]`` of mesh
        dimension ``at[0]``."""
        left = [cut for cut in self.cuts if cut not in undone]
        coordinate = list(self.coordinate)
        if at is not None:
            coordinate[at[0]] = at[1]
        return region_at(self.shape, left, self.sizes, coordinate)


def on_owners(
    tensors: Sequence[torch.Tensor],
    parts: Callable[[int], torch.Tensor],
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    put: Callable[[int, torch.Tensor], None],
) -> None:
    """Compute with whole tensors, each on one of the ranks that share it. Their last two dimensions are made whole;
    earlier ones, of stacked matrices, stay cut.

    Tensors go in rounds of as many as there are ranks, those of one shape together and the largest first, so that a
    rank has one whole tensor at a time and the ranks do equal work. Ranks that hold copies of a part do the same. All
    ranks that share a tensor call this with the same tensors.

    Args:
        tensors: what they look like, and how they are spread; a plain tensor is whole.
        parts: this rank's part of a tensor, by its index; asked for when its round comes.
        compute: from a tensor's index and the whole a result of the same shape.
        put: takes this rank's part of the result.
    """
    for numbers, order, mesh in _rounds(tensors):
        # A round is a function, so that none of its tensors, which are views of what was received, outlives it.
        _round(tensors, numbers, order, mesh, parts, compute, put)


def _round(
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    order: tuple[int, ...],
    mesh: DeviceMesh | None,
    parts: Callable[[int], torch.Tensor],
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    put: Callable[[int, torch.Tensor], None],
) -> None:
    """:func:`on_owners` of the tensors with these ``numbers``, one for each rank."""
    held: Parts = {k: parts(i) for k, i in enumerate(numbers)}
    stages = _stages([_shared(tensors[i]) for i in numbers], order, mesh, held[0].new_empty(0))
    # What each stage began with, for the way back.
    before = []
    for stage in stages:
        before.append(list(held))
        held = stage.collect(held)
    # One whole tensor on each rank; in the last round some have none.
    held = {k: compute(numbers[k], whole) for k, whole in held.items()}
    for stage in reversed(stages):
        held = stage.hand_out(held, before.pop())
    for k, part in held.items():
        put(numbers[k], part)


def _rounds(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], tuple[int, ...], DeviceMesh | None]]:
    """(numbers of tensors, mesh dimensions to join in that order, their mesh) of each round."""
    kinds: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = {}
    for number, tensor in enumerate(tensors):
        mesh, order = None, tuple[int, ...]()
        if isinstance(tensor, DTensor):
            mesh, first = tensor.device_mesh, tensor.ndim - 2
            # Cuts are undone from the last one made to the first; dimensions of one rank cut nothing.
            order = tuple(c.mesh_dim for c in reversed(cuts_of(tensor)) if c.dim >= first and mesh.size(c.mesh_dim) > 1)
        # Tensors that are cut alike can go in one round: their all-to-alls have the same groups.
        kinds.setdefault((mesh if order else None, order), []).append(number)
    for (mesh, order), numbers in kinds.items():
        ranks = 1 if mesh is None else math.prod(mesh.size(dim) for dim in order)
        # Those of one shape together: the ranks of a round then have equal work. The largest first: then the first
        # rank, which a dry run tries, has one of them.
        numbers.sort(key=lambda i: (-tensors[i].numel(), tuple(tensors[i].shape)))
        # As many as there are ranks: each owns one.
        for first in range(0, len(numbers), ranks):
            yield numbers[first : first + ranks], order, mesh


def _shared(tensor: torch.Tensor) -> _Shared:
    if not isinstance(tensor, DTensor):
        return _Shared(tuple(tensor.shape), (), (), ())
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    return _Shared(tuple(tensor.shape), tuple(cuts_of(tensor)), tuple(tensor.device_mesh.shape), tuple(coordinate))


def _stages(shared: list[_Shared], order: tuple[int, ...], mesh: DeviceMesh | None, like: torch.Tensor) -> list[_Stage]:
    out, turn = [], 1
    for count, dim in enumerate(order):
        assert mesh is not None
        out.append(_Stage(shared, mesh, dim, frozenset(order[:count]), turn, like))
        turn *= mesh.size(dim)
    return out


@dataclass(frozen=True)
class _Stage:
    """One dimension of the mesh, whose cuts are undone, and made again.

    Attributes:
        shared: the tensors of the round.
        mesh, dim: whose cuts.
        before: dimensions that were undone earlier.
        turn: product of their sizes: so many tensors in a row have one owner among the ranks of this dimension.
        like: a tensor of the dtype and device of the parts.
    """

    shared: list[_Shared]
    mesh: DeviceMesh
    dim: int
    before: frozenset[int]
    turn: int
    like: torch.Tensor

    def owner(self, number: int) -> int:
        # Mixed radix: over all stages each number of a round has an owner of its own.
        return number // self.turn % self.mesh.size(self.dim)

    def _region(self, number: int, rank: int | None) -> Region:
        """The region of ``rank`` of this dimension before the cut is undone; None: the owner's region afterwards."""
        shared = self.shared[number]
        undone = [c for c in shared.cuts if c.mesh_dim in self.before or (rank is None and c.mesh_dim == self.dim)]
        return shared.region(undone, None if rank is None else (self.dim, rank))

    def collect(self, held: Parts) -> Parts:
        """Send the parts to the owners; returns the tensors that this rank owns, assembled along this dimension."""
        ranks, mine = range(self.mesh.size(self.dim)), self.mesh.get_local_rank(self.dim)
        # In the order of numbers on both sides, so that nothing but elements has to be sent.
        own = [k for k in held if self.owner(k) == mine]
        sent = [[held[k] for k in held if self.owner(k) == rank] for rank in ranks]
        received = self._exchange(sent, [[self._region(k, rank).sizes for k in own] for rank in ranks])
        out = {k: held[k].new_empty(self._region(k, None).sizes) for k in own}
        for rank, parts in zip(ranks, received, strict=True):
            for k, part in zip(own, parts, strict=True):
                self._view(out[k], k, rank).copy_(part)
        return out

    def hand_out(self, held: Parts, numbers: Sequence[int]) -> Parts:
        """The reverse of :meth:`collect`: owners send parts back; returns this rank's parts of the tensors
        ``numbers``."""
        ranks, mine = range(self.mesh.size(self.dim)), self.mesh.get_local_rank(self.dim)
        of = [[k for k in numbers if self.owner(k) == rank] for rank in ranks]
        sent = [[self._view(held[k], k, rank) for k in held] for rank in ranks]
        received = self._exchange(sent, [[self._region(k, mine).sizes for k in part] for part in of])
        return {k: part for some, parts in zip(of, received, strict=True) for k, part in zip(some, parts, strict=True)}

    def _view(self, whole: torch.Tensor, number: int, rank: int) -> torch.Tensor:
        """The view of ``rank``'s part in an assembled tensor."""
        return _inside(whole, self._region(number, None), self._region(number, rank))

    def _exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[torch.Tensor]]:
        """Send a list of tensors to each rank, and receive from each a list with these shapes."""
        # One buffer for each rank: an all-to-all moves numbers, and both sides know the shapes from the cuts.
        flat = [torch.cat([part.reshape(-1) for part in parts]) if parts else self.like.new_empty(0) for parts in sent]
        sizes = [[math.prod(shape) for shape in some] for some in shapes]
        counts = [sum(some) for some in sizes]
        received = self.like.new_empty(sum(counts))
        group = self.mesh.get_group(self.dim)
        # Every rank of the dimension calls this in every round, also with nothing to send.
        dist.all_to_all_single(received, torch.cat(flat), counts, [part.numel() for part in flat], group=group)
        return [
            [piece.view(shape) for piece, shape in zip(part.split(size), some, strict=True)]
            for part, size, some in zip(received.split(counts), sizes, shapes, strict=True)
        ]


def gathered(part: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The whole tensor of ``shape`` of which every rank has a ``part``, cut as ``like`` is; on all ranks that share
    it, by an all-gather for each cut."""
    if not isinstance(like, DTensor):
        return part
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    shared = _Shared(tuple(shape), tuple(cuts_of(like)), tuple(mesh.shape), tuple(coordinate))
    undone: list[Cut] = []
    for cut in reversed(shared.cuts):
        regions = [shared.region(undone, (cut.mesh_dim, rank)) for rank in range(mesh.size(cut.mesh_dim))]
        # Uneven parts travel in buffers of the longest: an all-gather wants equal ones.
        longest = max(math.prod(region.sizes) for region in regions)
        sent = part.new_zeros(longest)
        sent[: part.numel()] = part.reshape(-1)
        received = part.new_empty(longest * len(regions))
        all_gather_flat(received, sent, group=mesh.get_group(cut.mesh_dim))
        undone.append(cut)
        outer = shared.region(undone)
        part = part.new_empty(outer.sizes)
        for region, flat in zip(regions, received.split(longest), strict=True):
            _inside(part, outer, region).copy_(flat[: math.prod(region.sizes)].view(region.sizes))
    return part


def _inside(tensor: torch.Tensor, outer: Region, inner: Region) -> torch.Tensor:
    """The view of region ``inner`` in ``tensor``, which holds region ``outer``."""
    for dim, (begin, start, size) in enumerate(zip(inner.offsets, outer.offsets, inner.sizes, strict=True)):
        # An empty part may begin after the end.
        tensor = tensor.narrow(dim, begin - start if size else 0, size)
    return tensor
