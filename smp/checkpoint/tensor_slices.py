"""Any region of a stored tensor, without a model and without a process group.

Every shard that the region meets is read once, a few megabytes at a time, and checked against its checksum. All
functions raise DamagedError and CheckpointError as :func:`smp.checkpoint.load`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import torch

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.entries import Manifest, Shard
from smp.checkpoint.format.manifest import check_files
from smp.checkpoint.format.tensor_bytes import DTYPES
from smp.checkpoint.read_ahead import Wanted, read_ahead
from smp.checkpoint.reader import Slice, check_slot, narrow, opened_file, read_slices, require_checksum


def read_region(
    folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The elements of tensor ``name`` from ``offsets`` on, ``sizes`` many in each dimension."""
    entry = manifest.tensors[name]
    met = [shard for shard in entry.shards if _common(shard.offsets, shard.sizes, offsets, sizes) is not None]
    # The sizes in the manifest bound what its shapes can ask for.
    check_files(folder, manifest, {shard.file for shard in met})  # before memory is asked for
    out = torch.empty(tuple(sizes), dtype=DTYPES[entry.dtype])
    read_region_into(folder, manifest, name, offsets, out)
    return out


def read_region_into(folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
    """:func:`read_region` into ``out``, a CPU tensor of the stored dtype whose shape is that of the region."""
    read_regions(folder, manifest, {name: (offsets, out)})


@torch.no_grad()
def read_regions(folder: Folder, manifest: Manifest, regions: Mapping[str, tuple[Sequence[int], torch.Tensor]]) -> None:
    """Fill tensors of any device, each with the region of its shape at the offsets given with it, by name."""
    # A file is opened once and read from front to back, whatever the number of tensors that want something of it.
    by_file: dict[str, dict[tuple[str, Shard], Slice]] = defaultdict(dict)
    for name, (offsets, out) in regions.items():
        for shard in manifest.tensors[name].shards:
            if (common := _common(shard.offsets, shard.sizes, offsets, out.shape)) is not None:
                begin, sizes = common
                # A view: a shard that a tensor takes as a whole is read straight into the tensor's memory.
                target = narrow(out, _minus(begin, offsets), sizes)
                by_file[shard.file][name, shard] = Slice(_minus(begin, shard.offsets), target)
    for file, slices in by_file.items():
        read_slices(folder, manifest, file, slices)


def files_of(manifest: Manifest, regions: Mapping[str, tuple[Sequence[int], torch.Tensor]]) -> frozenset[str]:
    """Names of the files that :func:`read_regions` reads."""
    return frozenset(
        shard.file
        for name, (offsets, out) in regions.items()
        for shard in manifest.tensors[name].shards
        if _common(shard.offsets, shard.sizes, offsets, out.shape) is not None
    )


def read_blocks(
    folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The contents of :func:`read_region` in blocks of a few megabytes: (offsets in the region, elements).

    The next block takes the same memory. A checksum is known when its shard ends: what came before an error is nothing
    to rely on.
    """
    for shard in manifest.tensors[name].shards:
        if _common(shard.offsets, shard.sizes, offsets, sizes) is None:
            continue
        with opened_file(folder, manifest, shard.file, [name]) as (source, slots):
            wanted = Wanted(check_slot(slots, name, shard, manifest))
            # A caller may stop early, and threads must not read on from a file that is closed.
            with closing(read_ahead(source, [wanted])) as blocks:
                for block in blocks:
                    require_checksum(name, shard, block)
                    # A 0-dim tensor was read as one row.
                    if not shard.sizes:
                        yield (), block.rows.view(())
                        continue
                    start = (shard.offsets[0] + block.first, *shard.offsets[1:])
                    if (common := _common(start, block.rows.shape, offsets, sizes)) is not None:
                        begin, count = common
                        yield _minus(begin, offsets), narrow(block.rows, _minus(begin, start), count)


def _common(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of the intersection of two regions; None when it is empty."""
    begin = tuple(map(max, offsets, other_offsets))
    ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes, strict=True)]
    shared = _minus(ends, begin)
    return (begin, shared) if all(size > 0 for size in shared) else None


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
