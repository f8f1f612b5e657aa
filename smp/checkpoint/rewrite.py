"""A checkpoint written again into another number of files, or into other storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from smp.checkpoint.commit import commit, discard_unfinished
from smp.checkpoint.dcp_planner import Item
from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.entries import CheckpointError, Manifest, Shard
from smp.checkpoint.format.manifest import check_files, read_manifest
from smp.checkpoint.format.tensor_bytes import DTYPES, lay_out, raw_bytes
from smp.checkpoint.format.tensor_file import rows_of_a_shard, write_file
from smp.checkpoint.storage import build_manifest, write_items
from smp.checkpoint.tensor_slices import read_region_into


def rewrite(
    source: Folder, target: Folder, files: int, progress: Callable[[int], None] = lambda count: None
) -> Manifest:
    """Write the checkpoint ``source`` into the empty folder ``target``, as ``files`` data files of about equal size.

    Tensors keep their bits and ``extra`` stays. What is read is checked; what is written is committed with the manifest
    at the end. Fewer files are written when there are not so many rows. ``progress`` is told the number of bytes after
    each piece. Memory: the largest piece of a tensor in one of the files.

    Raises:
        CheckpointError: ``target`` is not empty, or something cannot be read or written; nothing is left.
    """
    manifest = read_manifest(source)
    check_files(source, manifest, manifest.files)
    if target.names():
        raise CheckpointError(f"{target} is not empty")
    target.make()
    try:
        written = []
        for number, items in enumerate(cut(manifest, files)):
            memory = torch.empty(
                max(i.count * i.row_size for i in items), dtype=torch.uint8
            )  # one buffer for all pieces
            data = partial(_read, source, manifest, memory, progress)
            written.append(write_shards(target, f"shard_{number:05d}.safetensors", items, data))
        commit(target, build_manifest(written, manifest.extra))
    except BaseException as error:
        # BaseException: Ctrl-C in a conversion of hours leaves nothing half-written.
        discard_unfinished(target)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} cannot be written ({error})") from error
        raise
    return read_manifest(target)


def cut(manifest: Manifest, files: int) -> Iterator[list[Item]]:
    """The pieces of each file: all tensors one after the other, split between rows where a file is full."""
    tensors = [Item.whole(name, entry.shape, entry.dtype) for name, entry in manifest.tensors.items()]
    # Rounded up, so that there are never more files than asked for.
    limit = max(1, -(-sum(whole.count * whole.row_size for whole in tensors) // files))
    pieces: list[Item] = []
    room = limit
    for whole in tensors:
        first = 0
        while first < max(whole.count, 1):
            # Rows that fill the file, at least one: a row is never cut, so a file may become larger.
            until_full = max(1, -(-room // max(whole.row_size, 1)))  # or more than full
            count = min(whole.count - first, until_full, rows_of_a_shard(whole.row_size))
            pieces.append(whole.rows(first, count))
            first, room = first + max(count, 1), room - count * whole.row_size
            if room <= 0:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces


def _read(
    source: Folder, manifest: Manifest, memory: torch.Tensor, progress: Callable[[int], None], item: Item
) -> Iterator[memoryview]:
    piece = memory[: item.count * item.row_size].view(DTYPES[item.dtype]).view(item.region.sizes)
    read_region_into(source, manifest, item.name, item.region.offsets, piece)
    yield raw_bytes(piece)
    progress(piece.nbytes)


def write_shards(
    target: Folder, file: str, items: Sequence[Item], data: Callable[[Item], Iterable[memoryview]]
) -> list[tuple[Item, Shard]]:
    """Write one new data file of a checkpoint, durably; :func:`smp.checkpoint.commit.commit` makes it one in the end.

    ``data`` gives the bytes of an item, in parts of any size whose memory may be used again.
    """

    def write(by_key: Mapping[str, Item]) -> dict[str, str]:
        # Only sizes are needed to lay a file out; the data come later, piece by piece.
        metas = {k: torch.empty(i.region.sizes, dtype=DTYPES[i.dtype], device="meta") for k, i in by_key.items()}
        layout = lay_out(metas)
        return write_file(target, file, layout, ((s.key, part) for s in layout.slots for part in data(by_key[s.key])))

    return write_items(file, items, write)
