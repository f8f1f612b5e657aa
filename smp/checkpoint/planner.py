"""Which shard of which tensor every rank writes or reads.

torch's distributed checkpoint (DCP) does the resharding: it intersects boxes of the file with boxes of the memory.
These planners tell it the boxes, for two reasons. Where FSDP2 cuts what TP has cut unevenly, torch's offsets are wrong
(2.13: 33 rows over tp 2, then shard 4; :func:`smp.parallel.boxes.local_box` has the right ones). And vocabulary
padding, which depends on the layout, is cut off.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from smp.checkpoint.entries import DTYPES, CheckpointError, TensorEntry
from smp.checkpoint.overlap import shared_memory
from smp.checkpoint.reader import narrow
from smp.checkpoint.tensor_file import rows_of_a_shard
from smp.parallel.boxes import Box, local_box

_NAMED_AT_MOST = 8


@dataclass(frozen=True)
class LocalShard:
    """What this rank holds of one tensor, without padding: ``data``, a view, is the ``box`` of a whole of ``shape``."""

    shape: torch.Size
    box: Box
    data: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))


def local_shards(state: Mapping[str, Any], logical_rows: Mapping[str, int]) -> dict[str, LocalShard]:
    """The shard of every tensor of ``state`` that this rank holds; raises as :func:`smp.checkpoint.save`."""
    unknown = sorted(set(logical_rows) - set(state))
    if unknown:
        raise CheckpointError(f"logical_rows names tensors that are not in the state: {_listed(unknown)}")
    return {name: _local_shard(name, tensor, logical_rows.get(name)) for name, tensor in state.items()}


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
    box, data = local_box(tensor), tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if box.empty and data.numel() == 0:
        data = data.new_empty(box.sizes)  # an empty shard may have lost its other dimensions in memory
    assert tuple(data.shape) == box.sizes, f"{name}: local shape {tuple(data.shape)} is not that of {box}"
    if rows is None:
        return LocalShard(tensor.shape, box, data)
    if tensor.ndim == 0 or not 0 <= rows <= tensor.shape[0]:
        raise CheckpointError(f"{name} of shape {tuple(tensor.shape)} cannot have {rows} logical rows")
    real = min(max(rows - box.offsets[0], 0), box.sizes[0])
    return LocalShard(torch.Size((rows, *tensor.shape[1:])), Box(box.offsets, (real, *box.sizes[1:])), data[:real])


class ManifestSavePlanner(DefaultSavePlanner):
    """Every rank offers its boxes; torch's planner lets one rank write each and spreads replicas over the ranks."""

    def __init__(self, logical_rows: Mapping[str, int]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.logical_rows = logical_rows
        self.shards: dict[str, LocalShard] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.shards = local_shards(state_dict, self.logical_rows)

    def create_local_plan(self) -> SavePlan:
        """One item per shard; a tensor without any element keeps one empty box, so that it is not forgotten."""
        kept = [(name, shard) for name, shard in self.shards.items() if not shard.box.empty or 0 in shard.shape]
        return SavePlan([_write_item(name, shard, box) for name, shard in kept for box in _cut(shard)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Refuse ranks that disagree about a tensor, which merging their boxes would hide; then merge."""
        seen: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for item in (item for plan in all_plans for item in plan.items):
            assert item.tensor_data is not None
            what = (item.tensor_data.size, item.tensor_data.properties.dtype)
            if seen.setdefault(item.index.fqn, what) != what:
                raise CheckpointError(f"ranks disagree about {item.index.fqn}: {seen[item.index.fqn]} and {what}")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        shard, written = self.shards[write_item.index.fqn], write_item.tensor_data
        assert written is not None
        if not shard.shape:
            return shard.data
        return shard.data.narrow(0, written.chunk.offsets[0] - shard.box.offsets[0], written.chunk.sizes[0])


def _cut(shard: LocalShard) -> Iterator[Box]:
    """The boxes of a local shard to write, cut between rows where it is too large for one."""
    box = shard.box
    if not shard.shape or box.empty:
        yield box
        return
    rows = rows_of_a_shard(shard.data.nbytes // box.sizes[0])
    for first in range(0, box.sizes[0], rows):
        count = min(rows, box.sizes[0] - first)
        yield Box((box.offsets[0] + first, *box.offsets[1:]), (count, *box.sizes[1:]))


def _write_item(name: str, shard: LocalShard, box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    written = TensorWriteData(chunk, TensorProperties(shard.data.dtype), shard.shape)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=written)


class ManifestLoadPlanner(LoadPlanner):
    """Every rank asks for its boxes, in place. What does not fit is collected from all ranks into one error."""

    def __init__(
        self, entries: Mapping[str, TensorEntry], logical_rows: Mapping[str, int], allow_unread: bool | str
    ) -> None:
        self.entries, self.logical_rows, self.allow_unread = entries, logical_rows, allow_unread
        self.shards: dict[str, LocalShard] = {}
        self.stored: dict[str, TensorStorageMetadata] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.shards = local_shards(state_dict, self.logical_rows)
        self.stored = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}

    def create_local_plan(self) -> LoadPlan:
        """Reads of all tensors that fit; names and misfits travel along as planner data."""
        misfits = {name: text for name, shard in self.shards.items() if (text := self._misfit(name, shard))}
        misfits |= shared_memory({n: shard.data for n, shard in self.shards.items() if n not in misfits}, self.entries)
        items: list[ReadItem] = []
        for name, shard in self.shards.items():
            if name not in misfits and not shard.box.empty:
                items += create_read_items_for_chunk_list(name, self.stored[name], [shard.chunk])
        return LoadPlan(items, planner_data=(list(self.shards), misfits))

    def _misfit(self, name: str, shard: LocalShard) -> str | None:
        if name not in self.stored:
            return "missing in the checkpoint"
        stored = self.stored[name]
        if stored.size != shard.shape:
            return f"shape {tuple(stored.size)} in the checkpoint, {tuple(shard.shape)} here"
        if stored.properties.dtype != shard.data.dtype:
            return f"dtype {stored.properties.dtype} in the checkpoint, {shard.data.dtype} here"
        return None

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise one error, on all ranks, that names every tensor that does not fit on any of them."""
        problems = {name: text for plan in global_plan for name, text in plan.planner_data[1].items()}
        wanted = {name for plan in global_plan for name in plan.planner_data[0]}
        unread = sorted(self.stored.keys() - wanted)
        if isinstance(self.allow_unread, str):
            unread = [name for name in unread if not name.startswith(self.allow_unread)]
        if self.allow_unread is not True:
            problems |= dict.fromkeys(unread, "in the checkpoint but not expected")
        if problems:
            raise CheckpointError(_listed(f"{name} ({text})" for name, text in problems.items()))
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The piece of local storage that an item fills, so that nothing is left to commit."""
        return narrow(self.shards[read_item.dest_index.fqn].data, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more
