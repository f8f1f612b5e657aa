"""Any box of a stored tensor, without a model and without a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from smp.checkpoint.entries import DTYPES, Manifest, Shard
from smp.checkpoint.folder import Folder
from smp.checkpoint.manifest import check_files
from smp.checkpoint.read_ahead import Wanted, read_ahead
from smp.checkpoint.reader import ManifestReader, opened_file, require_checksum
from smp.checkpoint.tensor_file import raw_bytes
from smp.checkpoint.verify import check_slot


def read_box(
    folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The elements of tensor ``name`` from ``offsets`` on, ``sizes`` many in each dimension.

    Every shard that the box meets is read once, a few megabytes at a time, and checked against its checksum.

    Raises:
        DamagedError, CheckpointError: as :func:`smp.checkpoint.load`.
    """
    entry = manifest.tensors[name]
    met = [shard for shard in entry.shards if _common(shard.offsets, shard.sizes, offsets, sizes) is not None]
    check_files(folder, manifest, {shard.file for shard in met})  # before memory is asked for
    out = torch.empty(tuple(sizes), dtype=DTYPES[entry.dtype])
    read_box_into(folder, manifest, name, offsets, out)
    return out


def read_box_into(folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
    """:func:`read_box` into ``out``, a CPU tensor of the stored dtype whose shape is that of the box."""
    reader = ManifestReader(folder, replace(manifest, tensors={name: manifest.tensors[name]}))  # of all it takes longer
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(out.shape))
    stored: Any = reader.read_metadata().state_dict_metadata[name]
    items = create_read_items_for_chunk_list(name, stored, [chunk])
    reader.read_data(LoadPlan(items), _Into(out))  # type: ignore[arg-type]


def read_blocks(
    folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """What :func:`read_box` reads, in blocks of a few megabytes: where each begins in the box, and its elements.

    The next block takes the same memory. A checksum is known when its shard ends: what came before an error is nothing
    to rely on.

    Raises:
        DamagedError, CheckpointError: as :func:`smp.checkpoint.load`.
    """
    entry = manifest.tensors[name]
    for shard in entry.shards:
        if _common(shard.offsets, shard.sizes, offsets, sizes) is None:
            continue
        with opened_file(folder, manifest, shard.file, [name]) as (source, slots):
            hashed = xxhash.xxh3_64()
            wanted = Wanted(check_slot(slots, name, shard, entry.dtype))
            with closing(read_ahead(source, [wanted])) as blocks:
                for block in blocks:
                    hashed.update(raw_bytes(block.rows))
                    if (found := _within(shard, block.first, block.rows, offsets, sizes)) is not None:
                        yield found
            require_checksum(name, shard, hashed.hexdigest())


def _within(
    shard: Shard, first: int, rows: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """The part of some rows of a shard that lies in a box, and where in the box."""
    if not shard.sizes:
        return (), rows.view(())
    start = (shard.offsets[0] + first, *shard.offsets[1:])
    common = _common(start, rows.shape, offsets, sizes)
    if common is None:
        return None
    for dim, (begin, end) in enumerate(common):
        rows = rows.narrow(dim, begin - start[dim], end - begin)
    return tuple(begin - offset for (begin, _), offset in zip(common, offsets, strict=True)), rows


def _common(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Begin and end, by dimension, of what two boxes share; None when that is nothing."""
    ends = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    ranges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in ends]
    return ranges if all(begin < end for begin, end in ranges) else None


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
