"""Save and load one checkpoint folder, over all ranks of a process group (by default all) or in a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp.checkpoint.all_ranks import on_all_ranks
from smp.checkpoint.commit import commit, discard_unfinished
from smp.checkpoint.dcp_planner import Item, LocalShard, assign, items_of, local_shards, misfits, require_fit
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.lock import RunLock
from smp.checkpoint.format.entries import CheckpointError, Manifest
from smp.checkpoint.format.manifest import check_extra, read_manifest
from smp.checkpoint.peer_files import PeerFolder
from smp.checkpoint.storage import Write, build_manifest, unused_suffix, write_items, write_tensors
from smp.checkpoint.tensor_slices import files_of, read_regions
from smp.parallel.agree import on_rank_zero, rank

_NONE: Mapping[str, int] = {}


def save(
    state: Mapping[str, torch.Tensor],
    folder: Path | str | Folder,
    *,
    extra: Mapping[str, Any],
    logical_rows: Mapping[str, int] = _NONE,
    lock: RunLock | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Write a checkpoint folder; when this returns it is complete and on disk. Every rank calls it.

    A checkpoint that is in the folder already is replaced, and stays readable until the new one is complete.

    Args:
        state: DTensors, and plain tensors that are equal on all ranks that have them. Ranks may hold different names
            (pipeline stages). Shards are written as they lie in memory, replicas by one of the ranks that have them.
        folder: the checkpoint's own folder, shared by all ranks: a path, or a URL such as ``s3://bucket/run/x``.
            ``latest`` is moved separately (``commit_latest``).
        extra: plain JSON that comes back from :func:`load`; rank 0's is written.
        logical_rows: tensor name -> rows of dimension 0 that are real. The rows after them are padding and not written.
        lock: the lock of the run's folder, on the rank that holds it. It is looked at again just before the commit.
        group: the ranks that call this, which together hold all of every tensor; by default all. "Rank 0" is its first.

    Returns:
        On rank 0, a line when files of the checkpoint before could not be removed; else nothing.

    Raises:
        TypeError: a value of ``state`` is not a tensor, or ``extra`` is not plain JSON.
        CheckpointError: anything else that went wrong on any rank; all ranks raise it. A checkpoint that was in the
            folder before is still readable, and what was written of the new one is deleted.
        LockLostError: a CheckpointError, when another job has taken ``lock``.
    """
    opened = open_folder(folder)
    notes: list[str] = []

    # Runs on rank 0 when the data files of all ranks are on disk. The lock comes last: a job that was stopped for
    # minutes may have lost it while files were written.
    def finish(manifest: Manifest) -> None:
        if lock is not None:
            lock.check()
        notes.extend(commit(opened, manifest))

    run_save(state, opened, extra, logical_rows, partial(write_tensors, opened), finish, group)
    return notes


def run_save(
    state: Mapping[str, torch.Tensor],
    folder: Folder,
    extra: Mapping[str, Any],
    logical_rows: Mapping[str, int],
    write: Write,
    finish: Callable[[Manifest], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Agree on which rank writes which shard, let ``write`` write them, and give rank 0's ``finish`` the manifest.
    After a failure the files of this save are deleted."""
    # Filled by ``offer``, which runs on every rank inside of ``on_all_ranks``.
    prefix, shards = f"cannot save {folder}: ", dict[str, LocalShard]()

    def offer() -> list[Item]:
        check_extra(extra)
        shards.update(local_shards(state, logical_rows))
        return items_of(shards)

    # The suffix makes file names that are not in use, so files of a checkpoint that is there
    # already stay as they are.
    def plan(offered: list[list[Item]]) -> tuple[str, list[list[int]]]:
        chosen = assign(offered)
        folder.make()
        return unused_suffix(folder), chosen

    try:
        # The two exchanges of a save: what each rank has, and where its shards came to lie.
        suffix, chosen = on_all_ranks(prefix, offer, plan, group)
        file = f"shard_{rank(group):05d}{suffix}.safetensors"
        items = items_of(shards)
        # Replicas are in several ranks' lists, and each was given to one of them.
        mine = [items[number] for number in chosen[rank(group)]]

        def write_mine(by_key: Mapping[str, Item]) -> dict[str, str]:
            return write(file, {key: shards[item.name].rows(item) for key, item in by_key.items()})

        on_all_ranks(
            prefix, partial(write_items, file, mine, write_mine), lambda w: finish(build_manifest(w, extra)), group
        )
    except (CheckpointError, TypeError):
        if rank(group) == 0:  # all ranks are done with their files
            with suppress(OSError):  # the next start cleans up what cannot be deleted now
                discard_unfinished(folder)
        raise


def load(
    state: Mapping[str, torch.Tensor],
    folder: Path | str | Folder,
    *,
    logical_rows: Mapping[str, int] = _NONE,
    allow_unread: bool | str | tuple[str, ...] = False,
) -> dict[str, Any]:
    """Fill ``state`` in place from a checkpoint of any layout, and return its ``extra``. Every rank calls it.

    Every shard that is used is checked against its checksum. After an error the content of ``state`` is undefined.

    Args:
        state: tensors of the shapes and dtypes to read; ranks may hold different names.
        folder, logical_rows: as in :func:`save`; rows after the real ones are left as they are.
        allow_unread: accept tensors in the checkpoint that no rank asks for; texts: those whose names begin so.

    Raises:
        TypeError: a value of ``state`` is not a tensor.
        CheckpointError: not a complete checkpoint, or not this state: missing or unexpected tensors, other shapes,
            other dtypes (nothing is ever converted), two values for one memory, overlapping views. All ranks raise it.
        DamagedError: a CheckpointError, when the checkpoint is not what was saved.
    """
    opened = open_folder(folder)
    # One rank reads it for all: storage is asked once, and all ranks see the same content even if it is replaced now.
    manifest = on_rank_zero(lambda: read_manifest(opened), CheckpointError)
    load_from(opened, manifest, state, logical_rows=logical_rows, allow_unread=allow_unread)
    return manifest.extra


def load_from(
    folder: Folder,
    manifest: Manifest,
    state: Mapping[str, torch.Tensor],
    *,
    logical_rows: Mapping[str, int] = _NONE,
    allow_unread: bool | str | tuple[str, ...] = False,
) -> None:
    """:func:`load` with a manifest that was read before, the same on all ranks."""
    prefix, shards = f"cannot load {folder}: ", dict[str, LocalShard]()

    def fit() -> tuple[list[str], dict[str, str]]:
        shards.update(local_shards(state, logical_rows))
        return list(shards), misfits(shards, manifest.tensors)

    # All ranks agree that everything fits before a tensor of one of them is written to.
    on_all_ranks(prefix, fit, lambda found: require_fit(found, manifest.tensors, allow_unread))
    # Contiguous or not: ``read_regions`` fills views.
    regions = {name: (shard.region.offsets, shard.data) for name, shard in shards.items()}
    if isinstance(folder, PeerFolder):
        files = files_of(manifest, regions)
        on_all_ranks(prefix, lambda: folder.bring(files), lambda _: None)
    on_all_ranks(prefix, lambda: read_regions(folder, manifest, regions), lambda _: None)
