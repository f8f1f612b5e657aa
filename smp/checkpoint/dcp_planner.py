"""Which shard of which tensor every rank writes or reads.

Two things need care. Where FSDP2 cuts what TP has cut unevenly, torch's own offsets are wrong (2.13: 33 rows over tp 2,
then shard 4; :func:`smp.parallel.dtensor_region.local_region` has the right ones). And vocabulary padding, which
depends on the layout, is cut off.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.checkpoint.format.entries import ELEMENT_SIZES, CheckpointError, TensorEntry
from smp.checkpoint.format.tensor_bytes import DTYPE_NAMES, DTYPES
from smp.checkpoint.format.tensor_file import rows_of_a_shard
from smp.checkpoint.overlap import shared_memory
from smp.parallel.dtensor_region import local_part, local_region
from smp.parallel.region import Region

# Of a list of names in an error: all would fill the screen.
_NAMED_AT_MOST = 8


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of one tensor, without padding: ``data``, a view, is the part at ``region`` of the whole, of
    ``shape``."""

    shape: tuple[int, ...]
    region: Region
    data: torch.Tensor

    def rows(self, item: Item) -> torch.Tensor:
        """The rows of ``item``, as a view."""
        return self.data.narrow(0, item.first - self.region.offsets[0], item.count) if self.shape else self.data


@dataclass(frozen=True)
class Item:
    """A part of a tensor to write: the tensor's shape, dtype by its name in the file, and region. A 0-dim tensor counts
    as one row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    region: Region

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], dtype: str) -> Item:
        """The item of a whole tensor."""
        return Item(name, shape, dtype, Region((0,) * len(shape), shape))

    @property
    def first(self) -> int:
        """Number of the first row."""
        return self.region.offsets[0] if self.shape else 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.region.sizes[0] if self.shape else 1

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return math.prod(self.region.sizes[1:]) * ELEMENT_SIZES[self.dtype]

    def rows(self, first: int, count: int) -> Item:
        """``count`` rows of this item, from its row ``first`` on."""
        if not self.shape:
            return self
        (start, *offsets), (_, *sizes) = self.region.offsets, self.region.sizes
        return replace(self, region=Region((start + first, *offsets), (count, *sizes)))

    def cut(self) -> list[Item]:
        """This item, split between rows if it is too large for one shard."""
        step = rows_of_a_shard(self.row_size)
        return [self.rows(first, min(step, self.count - first)) for first in range(0, self.count or 1, step)]


def local_shards(state: Mapping[str, Any], logical_rows: Mapping[str, int]) -> dict[str, LocalShard]:
    """This rank's shard of every tensor of ``state``; raises as :func:`smp.checkpoint.save`."""
    # A wrong name would not be cut: padding of this layout would be in the file, and no other layout could read it.
    unknown = sorted(set(logical_rows) - set(state))
    if unknown:
        raise CheckpointError(f"logical_rows names tensors that are not in the state: {_listed(unknown)}")
    return {name: _local_shard(name, tensor, logical_rows.get(name)) for name, tensor in sorted(state.items())}


@torch.no_grad()
def _local_shard(name: str, tensor: Any, rows: int | None) -> LocalShard:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{name} is of type {type(tensor).__name__}, not a tensor: numbers and the like belong in extra"
        )
    if tensor.dtype not in DTYPES.values():
        raise TypeError(f"{name} has dtype {tensor.dtype}, which the checkpoint format does not have")
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and holds no data")
    region, data = local_region(tensor), local_part(tensor)
    if region.empty and data.numel() == 0:
        data = data.new_empty(region.sizes)  # the local tensor of an empty shard may have lost its other dimensions
    assert tuple(data.shape) == region.sizes, f"{name}: local shape {tuple(data.shape)} is not that of {region}"
    if rows is None:
        return LocalShard(tuple(tensor.shape), region, data)
    if tensor.ndim == 0 or not 0 <= rows <= tensor.shape[0]:
        raise CheckpointError(f"{name} of shape {tuple(tensor.shape)} cannot have {rows} logical rows")
    # Of the rows that are real, those in this rank's region: the last ranks may have some, or none.
    real = min(max(rows - region.offsets[0], 0), region.sizes[0])
    return LocalShard((rows, *tensor.shape[1:]), Region(region.offsets, (real, *region.sizes[1:])), data[:real])


def items_of(shards: Mapping[str, LocalShard]) -> list[Item]:
    """Items that a rank could write. A tensor without any element keeps one empty item, so that it is in the
    checkpoint."""
    kept = [(name, shard) for name, shard in shards.items() if not shard.region.empty or 0 in shard.shape]
    return [i for n, s in kept for i in Item(n, s.shape, DTYPE_NAMES[s.data.dtype], s.region).cut()]


def assign(offered: Sequence[Sequence[Item]]) -> list[list[int]]:
    """Numbers of the items that each rank writes: an item that several ranks have goes to the one with the least to
    write so far.

    Raises:
        CheckpointError: ranks disagree about a tensor.
    """
    # Runs on rank 0 over what all ranks offered. Ranks and items come in a fixed order, so equal sizes
    # always give the same choice.
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
    # Replicas: equal regions of one tensor on several ranks.
    holders: dict[tuple[str, Region], list[tuple[int, int]]] = defaultdict(list)
    for rank, items in enumerate(offered):
        for number, item in enumerate(items):
            what = item.shape, item.dtype
            if seen.setdefault(item.name, what) != what:
                raise CheckpointError(f"ranks disagree about {item.name}: {seen[item.name]} and {what}")
            holders[item.name, item.region].append((rank, number))
    chosen: list[list[int]] = [[] for _ in offered]
    size = [0] * len(offered)
    for held in holders.values():
        rank, number = min(held, key=lambda one: size[one[0]])
        chosen[rank].append(number)
        size[rank] += offered[rank][number].count * offered[rank][number].row_size
    return chosen


def misfits(shards: Mapping[str, LocalShard], stored: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Tensors that cannot be loaded, and why."""
    found = {name: text for name, shard in shards.items() if (text := _misfit(shard, stored.get(name)))}
    # Only those that fit otherwise: a problem per tensor is enough.
    return found | shared_memory({n: shard.data for n, shard in shards.items() if n not in found}, stored)


def _misfit(shard: LocalShard, stored: TensorEntry | None) -> str | None:
    if stored is None:
        return "missing in the checkpoint"
    # Before any data are read: shapes without padding are equal in all layouts.
    if stored.shape != shard.shape:
        return f"shape {stored.shape} in the checkpoint, {shard.shape} here"
    if DTYPES[stored.dtype] != shard.data.dtype:
        return f"dtype {DTYPES[stored.dtype]} in the checkpoint, {shard.data.dtype} here"
    return None


def require_fit(
    found: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    stored: Iterable[str],
    allow_unread: bool | str | tuple[str, ...],
) -> None:
    """Raise one error that names every tensor that does not fit on some rank; ``found`` is (names, misfits) of each."""
    problems = {name: text for _, misfit in found for name, text in misfit.items()}
    # Over all ranks: a stage of a pipeline asks for its own tensors only.
    unread = sorted(set(stored) - {name for names, _ in found for name in names})
    if isinstance(allow_unread, str | tuple):
        unread = [name for name in unread if not name.startswith(allow_unread)]
    if allow_unread is not True:
        problems |= dict.fromkeys(unread, "in the checkpoint but not expected")
    if problems:
        raise CheckpointError(_listed(f"{name} ({text})" for name, text in problems.items()))


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more
