"""--check-replicas-interval: ranks that hold the same numbers compare them, bit for bit.

Weights and optimizer moments that are replicated (over ``dp_replicate``; norms over ``tp``) go through the same sums
and updates on all of their ranks, so they are equal to the last bit, until a bit flips in the memory or the arithmetic
of one rank. From there on replicas drift apart in silence, and a checkpoint has whichever copy was written.

The checksum of a tensor is the sum of its 32-bit words, each times an odd number that depends on its place, modulo
2^64. A change within one word is a product of two factors, one odd and one below 2^32 in magnitude and not 0: it is
never 0 modulo 2^64. So every change of one word is found, and of several all but one in 2^64.

Of three or more copies the majority is right: the others get theirs. Of two nobody knows which one is right: the run
ends, and starts again from its newest checkpoint, which was compared before it was written.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from smp.parallel.agree import any_rank, gather, rank
from smp.parallel.dtensor_region import local_part

CHUNK = 1 << 20
"""Words that are multiplied at a time: what the checksum needs of memory is 16 bytes for each."""


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ.

    Attributes:
        name: of the tensor, as in a checkpoint.
        ranks: that have a copy, in order.
        wrong: those that are not what the majority has; all, if there is none.
        source: a rank with a right copy; None: no majority.
    """

    name: str
    ranks: tuple[int, ...]
    wrong: tuple[int, ...]
    source: int | None


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Checksum of a plain tensor, int64 0-dim on the tensor's device; see this module."""
    words = _words(tensor.detach())
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # Odd factors: an even one would lose the highest bit of a word. int64 arithmetic wraps modulo
    # 2^64.
    odd = 2 * torch.arange(min(CHUNK, words.numel()), device=words.device) + 1
    for i, chunk in enumerate(words.split(CHUNK)):
        total += (chunk.long() * (odd[: len(chunk)] + 2 * i * CHUNK)).sum()
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as int32 (n,), or as uint8 (n,) where they are no whole, aligned words."""
    # A view of the storage where the tensor is contiguous; ``view(dtype)`` needs an aligned offset.
    flat = tensor.contiguous().view(-1)
    if flat.nbytes % 4 or flat.storage_offset() * flat.itemsize % 4:
        return flat.view(torch.uint8)
    return flat.view(torch.int32)


def differences(tensors: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Replicated tensors whose copies differ, of all ranks, the same list on each of them. Every rank calls it.

    Args:
        tensors: of this rank, as a checkpoint has them; those that are no DTensors have no copies that are known of.
    """
    found: list[Difference] = []
    for names in _by_mesh(tensors).values():
        first = tensors[names[0]]
        assert isinstance(first, DTensor)
        # One exchange for all tensors of a mesh.
        sums = torch.stack([checksum(local_part(tensors[name])) for name in names])
        ranks, copies = _of_all_copies(first, sums)
        found += [one for i, name in enumerate(names) if (one := _compared(name, ranks, copies[:, i].tolist()))]
    if not any_rank(bool(found)):
        return []
    # Each set of copies once, by its first rank.
    own = [one for one in found if one.ranks[0] == rank()]
    return [one for part in gather(own) for one in part]


def _by_mesh(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[object, ...], list[str]]:
    """Names of the replicated tensors, by mesh and dimensions of the copies; in the same order on all ranks, as the
    exchange needs."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and (dims := _replicated(tensor)):
            mesh = tensor.device_mesh
            # By its text: meshes of equal ranks share a group, whatever object they are.
            groups.setdefault((str(mesh), mesh.mesh_dim_names, dims), []).append(name)
    return groups


def _replicated(tensor: DTensor) -> tuple[int, ...]:
    """Mesh dimensions with more than one rank over which the tensor is replicated."""
    mesh = tensor.device_mesh
    return tuple(i for i, how in enumerate(tensor.placements) if isinstance(how, Replicate) and mesh.size(i) > 1)


def _of_all_copies(tensor: DTensor, sums: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """(ranks that have copies of this rank's shards, their checksums (copies, tensors))."""
    mesh, values = tensor.device_mesh, sums[None]
    # The coordinate of this rank, with a slice in each replicated dimension: the ranks of its
    # copies.
    kept: list[int | slice] = [*(mesh.get_coordinate() or ())]
    # From the last dimension on, so that copies come in the order in which the mesh has their ranks.
    for dim in reversed(_replicated(tensor)):
        kept[dim] = slice(None)
        parts = [torch.empty_like(values) for _ in range(mesh.size(dim))]
        # (1, tensors) -> (copies, tensors)
        dist.all_gather(parts, values, group=mesh.get_group(dim))
        values = torch.cat(parts)
    return tuple(mesh.mesh[tuple(kept)].flatten().tolist()), values


def _compared(name: str, ranks: Sequence[int], sums: Sequence[int]) -> Difference | None:
    """The copies that differ from the majority; None: all are equal."""
    votes = Counter(sums)
    if len(votes) == 1:
        return None
    right, count = votes.most_common(1)[0]
    # A tie is no majority.
    if 2 * count <= len(sums):
        return Difference(name, tuple(ranks), tuple(ranks), None)
    wrong = tuple(one for one, total in zip(ranks, sums, strict=True) if total != right)
    return Difference(name, tuple(ranks), wrong, ranks[sums.index(right)])


@torch.no_grad()
def repair(found: Sequence[Difference], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy right shards over wrong ones. Every rank calls it with the same list, in which all have a majority."""
    own = rank()
    for one in found:
        assert one.source is not None
        for other in one.wrong:
            if own == one.source:
                # Over gloo, so tensors go by way of the host.
                dist.send(local_part(tensors[one.name]).detach().cpu().contiguous(), other)
            elif own == other:
                part = local_part(tensors[one.name]).detach()
                came = torch.empty(part.shape, dtype=part.dtype)
                dist.recv(came, one.source)
                part.copy_(came)


def describe(found: Sequence[Difference], iteration: int) -> list[str]:
    """A line for each set of ranks that are wrong. Every rank calls it."""
    # All ranks need the host names of the others for their lines.
    hosts = gather(socket.gethostname())
    by_ranks: dict[tuple[tuple[int, ...], int | None], list[str]] = {}
    for one in found:
        by_ranks.setdefault((one.wrong, one.source), []).append(one.name)
    lines = []
    for (wrong, source), names in by_ranks.items():
        told = ", ".join(f"rank {one} on {hosts[one]}" for one in wrong)
        which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other tensors"
        fault = f"{which} of {told}" if source is not None else f"{which} differ between {told}"
        lines.append(
            f"iteration {iteration}: silent corruption: {fault}"
            + ("; repaired from rank " + str(source) if source is not None else ", and no majority says which is right")
        )
    return lines
