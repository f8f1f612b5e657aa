"""A checkpoint written again into another number of files, or into other storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from smp.checkpoint.box import read_box_into
from smp.checkpoint.entries import DTYPES, CheckpointError, Manifest, Shard, TensorEntry
from smp.checkpoint.folder import Folder
from smp.checkpoint.manifest import check_files, read_manifest
from smp.checkpoint.storage import commit, discard_unfinished
from smp.checkpoint.tensor_file import lay_out, raw_bytes, rows_of_a_shard, shard_keys, write_file

_Piece = tuple[str, int, int]  # name, first row, rows; a tensor without dimensions has one row
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


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
        shards: dict[str, list[Shard]] = {name: [] for name in manifest.tensors}
        for number, pieces in enumerate(cut(manifest, files)):
            file = f"shard_{number:05d}.safetensors"
            for name, shard in _write(source, manifest, target, file, pieces, progress):
                shards[name].append(shard)
        tensors = {n: TensorEntry(e.shape, e.dtype, tuple(shards[n])) for n, e in manifest.tensors.items()}
        commit(target, Manifest(tensors, {}, manifest.extra))
    except BaseException as error:
        discard_unfinished(target)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} cannot be written ({error})") from error
        raise
    return read_manifest(target)


def cut(manifest: Manifest, files: int) -> Iterator[list[_Piece]]:
    """Pieces of each file: all tensors one after the other, cut between rows where a file is full."""
    sizes = {name: math.prod(e.shape) * DTYPES[e.dtype].itemsize for name, e in manifest.tensors.items()}
    limit = max(1, -(-sum(sizes.values()) // files))
    pieces: list[_Piece] = []
    room = limit
    for name, entry in manifest.tensors.items():
        rows = entry.shape[0] if entry.shape else 1
        width, first = sizes[name] // max(rows, 1), 0
        while first < max(rows, 1):
            until_full = max(1, -(-room // max(width, 1)))  # or more than full
            count = min(rows - first, until_full, rows_of_a_shard(width))
            pieces.append((name, first, count))
            first, room = first + max(count, 1), room - count * width
            if room <= 0:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces


def _write(
    source: Folder,
    manifest: Manifest,
    target: Folder,
    file: str,
    pieces: list[_Piece],
    progress: Callable[[int], None],
) -> list[tuple[str, Shard]]:
    names = dict(zip(shard_keys(pieces), (name for name, _, _ in pieces), strict=True))
    boxes = {key: _box(manifest.tensors[n], first, count) for key, (n, first, count) in zip(names, pieces, strict=True)}
    dtypes = {key: DTYPES[manifest.tensors[name].dtype] for key, name in names.items()}
    bytes_of = {key: math.prod(sizes) * dtypes[key].itemsize for key, (_, sizes) in boxes.items()}
    memory = torch.empty(max(bytes_of.values(), default=0), dtype=torch.uint8)  # of one piece, never of two

    def data(key: str) -> Iterator[memoryview]:
        offsets, sizes = boxes[key]
        piece = memory[: bytes_of[key]].view(dtypes[key]).view(sizes)
        read_box_into(source, manifest, names[key], offsets, piece)
        yield raw_bytes(piece)
        progress(piece.nbytes)

    return [(names[shard.key], shard) for shard in write_shards(target, file, boxes, dtypes, data)]


def write_shards(
    target: Folder,
    file: str,
    boxes: Mapping[str, Box],
    dtypes: Mapping[str, torch.dtype],
    data: Callable[[str], Iterator[memoryview]],
) -> list[Shard]:
    """Write one new data file of a checkpoint, durably; :func:`smp.checkpoint.storage.commit` makes it one in the end.

    ``boxes`` (offsets and sizes) and ``dtypes`` are by key in the file. ``data`` gives the bytes of a key, in pieces of
    any size whose memory may be used again.
    """
    metas = {name: torch.empty(sizes, dtype=dtypes[name], device="meta") for name, (_, sizes) in boxes.items()}
    layout = lay_out(metas)
    hashes = write_file(target, file, layout, ((s.key, piece) for s in layout.slots for piece in data(s.key)))
    return [Shard(file, name, offsets, sizes, hashes[name]) for name, (offsets, sizes) in boxes.items()]


def _box(entry: TensorEntry, first: int, count: int) -> Box:
    """Offsets and sizes of some rows."""
    if not entry.shape:
        return (), ()
    return (first, *(0 for _ in entry.shape[1:])), (count, *entry.shape[1:])
