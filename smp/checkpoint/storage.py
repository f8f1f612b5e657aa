"""The files of a save: one safetensors file per rank, then the manifest.

Every rank that has something to write writes one file. Rank 0 writes the manifest after all of them are on disk; until
then the folder is not a checkpoint. A save over an existing checkpoint takes new file names and the manifest is
replaced in one step, so that the folder is readable at every moment: as the old one, then as the new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from smp.checkpoint.commit import SHARD_FILE
from smp.checkpoint.dcp_planner import Item
from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.entries import Manifest, Shard, TensorEntry
from smp.checkpoint.format.manifest import check_extra
from smp.checkpoint.format.tensor_bytes import lay_out, raw_bytes
from smp.checkpoint.format.tensor_file import shard_keys, write_file

Write = Callable[[str, Mapping[str, torch.Tensor]], dict[str, str]]
"""(file, tensors by key) -> checksums by key. Writes a data file."""


def unused_suffix(folder: Folder) -> str:
    """A suffix that makes names of data files which nothing in the folder has, committed or left by a crash."""
    used = [match for name in folder.names() if (match := SHARD_FILE.match(name))]
    # Above every generation that is there, so that neither a committed file nor one that a crash left is written to.
    generation = max((int(match[1] or 0) + 1 for match in used), default=0)
    return f".{generation}" if generation else ""


def write_items(
    file: str, items: Sequence[Item], write: Callable[[Mapping[str, Item]], Mapping[str, str]]
) -> list[tuple[Item, Shard]]:
    """Let ``write`` write items into a file, if there are any; it gets them by key, and returns checksums by key."""
    keys = shard_keys([(item.name, item.first, item.count) for item in items])
    hashes = write(dict(zip(keys, items, strict=True))) if items else {}
    return [
        (i, Shard(file, key, i.region.offsets, i.region.sizes, hashes[key])) for i, key in zip(items, keys, strict=True)
    ]


def write_tensors(folder: Folder, file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write a data file durably; returns checksums by key."""
    layout = lay_out(tensors)
    # what lies contiguous in CPU memory is written from there; only other tensors are copied, one at a time
    # A generator: each copy is free again before the next is made.
    data = ((slot.key, raw_bytes(tensors[slot.key].cpu().contiguous())) for slot in layout.slots)
    return write_file(folder, file, layout, data)


def build_manifest(written: Iterable[Sequence[tuple[Item, Shard]]], extra: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote. Sizes of files are filled in by :func:`smp.checkpoint.commit.commit`."""
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
