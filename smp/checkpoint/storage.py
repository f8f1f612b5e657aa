"""Writing behind torch's distributed checkpoint (DCP): one safetensors file per rank, then the manifest.

Every rank that has something to write writes one file. The coordinator (rank 0) writes the manifest after all of them
are on disk; until then the folder is not a checkpoint. A save over an existing checkpoint takes new file names and the
manifest is replaced in one step, so that the folder is readable at every moment: as the old one, then as the new.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from smp.checkpoint.entries import DTYPE_NAMES, CheckpointError, Manifest, Shard, TensorEntry
from smp.checkpoint.folder import Folder
from smp.checkpoint.lock import RunLock
from smp.checkpoint.manifest import MANIFEST, check_extra, read_manifest, write_manifest
from smp.checkpoint.tensor_file import lay_out, raw_bytes, shard_keys, write_file

SHARD_FILE = re.compile(r"shard_\d{5,}(?:\.(\d+))?\.safetensors")
OUR_FILES = re.compile(rf"({SHARD_FILE.pattern}(\.json)?|{re.escape(MANIFEST)})((\.[0-9a-f]+)?\.tmp)?")
"""All names that a save gives to files: data, reports of background writers, the manifest, and what replaces them."""


class ManifestWriter(StorageWriter):
    """Writes one checkpoint folder; the arguments are those of :func:`smp.checkpoint.save`."""

    def __init__(self, folder: Folder, extra: Mapping[str, Any], lock: RunLock | None = None) -> None:
        self.folder, self.extra, self.lock = folder, extra, lock
        self.notes: list[str] = []
        """On rank 0, after :meth:`finish`: what could not be done after the commit."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a writer belongs to its folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        check_extra(self.extra)  # before anything is written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # files are named centrally

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder and give every rank a file name that nothing in it has, committed or left by a crash."""
        self.folder.make()
        used = [match for name in self.folder.names() if (match := SHARD_FILE.match(name))]
        generation = max((int(match[1] or 0) + 1 for match in used), default=0)
        suffix = f".{generation}" if generation else ""
        return [replace(p, storage_data=f"shard_{rank:05d}{suffix}.safetensors") for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if there is anything in its plan, and bring it to disk."""
        found = (planner.resolve_data(item) for item in plan.items)
        tensors = [data.detach() for data in found if isinstance(data, torch.Tensor)]
        rows = [(i.index.fqn, *_rows(i.index.offset, t)) for i, t in zip(plan.items, tensors, strict=True)]
        keys = shard_keys(rows)
        by_key = dict(zip(keys, tensors, strict=True))
        hashes = self._write(plan.storage_data, by_key) if by_key else {}
        results = []
        for item, key in zip(plan.items, keys, strict=True):
            tensor = by_key[key]
            shard = Shard(plan.storage_data, key, tuple(item.index.offset or ()), tuple(tensor.shape), hashes[key])
            results.append(WriteResult(item.index, tensor.nbytes, shard))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Checksums by key."""
        layout = lay_out(tensors)
        # what lies contiguous in CPU memory is written from there; only other tensors are copied, one at a time
        data = ((slot.key, raw_bytes(tensors[slot.key].cpu().contiguous())) for slot in layout.slots)
        return write_file(self.folder, file, layout, data)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit with the manifest, then remove data files that it does not name."""
        if self.lock is not None:
            self.lock.check()
        self.notes = commit(self.folder, build_manifest(metadata, results, self.extra))


def _rows(offsets: Sequence[int] | None, tensor: torch.Tensor) -> tuple[int, int]:
    return (offsets[0], len(tensor)) if offsets else (0, 1)


def build_manifest(metadata: Metadata, results: Sequence[Sequence[WriteResult]], extra: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote. Sizes of files are filled in by :func:`commit`."""
    shards: dict[str, list[Shard]] = defaultdict(list)
    for result in (result for of_rank in results for result in of_rank):
        shards[result.index.fqn].append(result.storage_data)
    tensors = {}
    for name, stored in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(stored, TensorStorageMetadata)
        parts = tuple(sorted(shards[name], key=lambda shard: shard.offsets))
        tensors[name] = TensorEntry(tuple(stored.size), DTYPE_NAMES[stored.properties.dtype], parts)
    return Manifest(tensors, {}, check_extra(extra))


def commit(folder: Folder, manifest: Manifest) -> list[str]:
    """Write the manifest, with the sizes that the files have; then remove data files that it does not name.

    Returns:
        A line when they cannot be removed, which is no failure: the checkpoint is complete.

    Raises:
        CheckpointError: a file is not there.
    """
    files: dict[str, int] = {}
    for file in sorted({shard.file for entry in manifest.tensors.values() for shard in entry.shards}):
        if (size := folder.size(file)) is None:
            raise CheckpointError(f"rank 0 does not see {folder}/{file}: is the folder on a shared file system?")
        files[file] = size
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
    if MANIFEST in folder.names():
        try:
            return remove_unnamed(folder, read_manifest(folder).files)
        except CheckpointError:
            return []  # a load will say what is wrong with it
    left = remove_unnamed(folder, {})
    if folder.exists() and not folder.names():
        folder.remove()
    return left
