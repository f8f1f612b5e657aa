"""Any box of a stored tensor, without a model and without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from smp.checkpoint.entries import DTYPES, Manifest
from smp.checkpoint.folder import Folder
from smp.checkpoint.reader import ManifestReader


def read_box(
    folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The elements of tensor ``name`` from ``offsets`` on, ``sizes`` many in each dimension.

    Every shard that the box meets is read once, a few megabytes at a time, and checked against its checksum.

    Raises:
        DamagedError, CheckpointError: as :func:`smp.checkpoint.load`.
    """
    out = torch.empty(tuple(sizes), dtype=DTYPES[manifest.tensors[name].dtype])
    read_box_into(folder, manifest, name, offsets, out)
    return out


def read_box_into(folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
    """:func:`read_box` into ``out``, a CPU tensor of the stored dtype whose shape is that of the box."""
    reader = ManifestReader(folder, manifest)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(out.shape))
    stored: Any = reader.read_metadata().state_dict_metadata[name]
    items = create_read_items_for_chunk_list(name, stored, [chunk])
    reader.read_data(LoadPlan(items), _Into(out))  # type: ignore[arg-type]


class _Into:
    """What a reader asks a planner for: where an item goes."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        target = self.out
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        """It was filled in place."""
