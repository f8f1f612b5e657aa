"""What a save leaves on storage: one safetensors file per rank, then the manifest.

Every rank that has something to write writes one file. Rank 0 writes the manifest after all of them are on disk; until
then the folder is not a checkpoint. A save over an existing checkpoint takes new file names and the manifest is
replaced in one step, so that the folder is readable at every moment: as the old one, then as the new.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from smp.checkpoint.entries import CheckpointError, Manifest, Shard, TensorEntry
from smp.checkpoint.folder import Folder
from smp.checkpoint.manifest import MANIFEST, check_extra, read_manifest, write_manifest
from smp.checkpoint.planner import Item
from smp.checkpoint.tensor_file import lay_out, raw_bytes, shard_keys, write_file

SHARD_FILE = re.compile(r"shard_\d{5,}(?:\.(\d+))?\.safetensors")
OUR_FILES = re.compile(rf"({SHARD_FILE.pattern}(\.json)?|{re.escape(MANIFEST)})((\.[0-9a-f]+)?\.tmp)?")
"""All names that a save gives to files: data, reports of background writers, the manifest, and what replaces them."""


Write = Callable[[str, Mapping[str, torch.Tensor]], dict[str, str]]
"""Writes a data file with these tensors by key; checksums by key."""


def unused_suffix(folder: Folder) -> str:
    """What makes names of data files that nothing in the folder has, committed or left by a crash."""
    used = [match for name in folder.names() if (match := SHARD_FILE.match(name))]
    # Above every generation that is there, so that neither a committed file nor one that a crash left is written to.
    generation = max((int(match[1] or 0) + 1 for match in used), default=0)
    return f".{generation}" if generation else ""


def write_items(
    file: str, items: Sequence[Item], write: Callable[[Mapping[str, Item]], Mapping[str, str]]
) -> list[tuple[Item, Shard]]:
    """Let ``write`` write items into a file, if there are any; it is told their keys, and returns checksums by key."""
    keys = shard_keys([(item.name, item.first, item.count) for item in items])
    hashes = write(dict(zip(keys, items, strict=True))) if items else {}
    return [(i, Shard(file, key, i.box.offsets, i.box.sizes, hashes[key])) for i, key in zip(items, keys, strict=True)]


def write_tensors(folder: Folder, file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write a data file durably; checksums by key."""
    layout = lay_out(tensors)
    # what lies contiguous in CPU memory is written from there; only other tensors are copied, one at a time
    # A generator: each copy is free again before the next is made.
    data = ((slot.key, raw_bytes(tensors[slot.key].cpu().contiguous())) for slot in layout.slots)
    return write_file(folder, file, layout, data)


def build_manifest(written: Iterable[Sequence[tuple[Item, Shard]]], extra: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote. Sizes of files are filled in by :func:`commit`."""
    shards: dict[str, list[Shard]] = defaultdict(list)
    items: dict[str, Item] = {}
    for item, shard in chain.from_iterable(written):
        items[item.name] = item
        shards[item.name].append(shard)
    tensors = {}
    for name, item in sorted(items.items()):
        # By offsets, so that the manifest does not show in which order ranks were heard.
        tensors[name] = TensorEntry(item.shape, item.dtype, tuple(sorted(shards[name], key=lambda s: s.offsets)))
    return Manifest(tensors, {}, check_extra(extra))


def commit(folder: Folder, manifest: Manifest) -> list[str]:
    """Write the manifest, with the sizes that the files have; then remove data files that it does not name.

    Returns:
        A line when they cannot be removed, which is no failure: the checkpoint is complete.

    Raises:
        CheckpointError: a file is not there.
    """
    files: dict[str, int] = {}
    # The sizes that rank 0 sees: on a file system that is not shared the other ranks' files are missing here.
    for file in sorted({shard.file for entry in manifest.tensors.values() for shard in entry.shards}):
        if (size := folder.size(file)) is None:
            raise CheckpointError(f"rank 0 does not see {folder}/{file}: is the folder on a shared file system?")
        files[file] = size
    # Names of data files first: a manifest that survives a crash must find all files that it names.
    folder.sync()
    write_manifest(folder, replace(manifest, files=files))
    try:
        remove_unnamed(folder, files)
    except OSError as error:
        return [f"WARNING: {folder} is complete; files of the checkpoint before could not be removed: {error}"]
    return []


def remove_unnamed(folder: Folder, named: Mapping[str, int]) -> list[str]:
    """Delete what saves left in a checkpoint folder beside its manifest and the files that it names; what it was."""
    left = [n for n in folder.names() if OUR_FILES.fullmatch(n) and n not in named and n != MANIFEST]
    for name in left:
        folder.delete(name)
    return left


def discard_unfinished(folder: Folder) -> list[str]:
    """Delete what a save that never committed left in ``folder``, and the folder with it when nothing else is there.

    A checkpoint that was there before stays, and so does any file that no save would have written. Nobody may be saving
    into the folder. Returns the names of the files that were deleted.
    """
    # A manifest is a complete checkpoint: only what it does not name may go.
    if MANIFEST in folder.names():
        try:
            return remove_unnamed(folder, read_manifest(folder).files)
        except CheckpointError:
            return []  # a load will say what is wrong with it
    left = remove_unnamed(folder, {})
    if folder.exists() and not folder.names():
        folder.remove()
    return left
