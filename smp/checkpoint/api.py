"""Save and load one checkpoint folder, over all ranks of the default process group or in a single process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from smp.checkpoint.entries import CheckpointError, DamagedError, Manifest
from smp.checkpoint.folder import Folder
from smp.checkpoint.local import open_folder
from smp.checkpoint.lock import LockLostError, RunLock
from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.planner import ManifestLoadPlanner, ManifestSavePlanner
from smp.checkpoint.reader import ManifestReader
from smp.checkpoint.storage import ManifestWriter, discard_unfinished
from smp.config.command import exit_code
from smp.parallel.agree import on_rank_zero, rank

_NONE: Mapping[str, int] = {}


def save(
    state: Mapping[str, torch.Tensor],
    folder: Path | str | Folder,
    *,
    extra: Mapping[str, Any],
    logical_rows: Mapping[str, int] = _NONE,
    lock: RunLock | None = None,
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

    Returns:
        On rank 0, a line when files of the checkpoint before could not be removed; else nothing.

    Raises:
        TypeError: a value of ``state`` is not a tensor, or ``extra`` is not plain JSON.
        CheckpointError: anything else that went wrong on any rank; all ranks raise it. A checkpoint that was in the
            folder before is still readable, and what was written of the new one is deleted.
        LockLostError: a CheckpointError, when another job has taken ``lock``.
    """
    writer = ManifestWriter(open_folder(folder), extra, lock)
    run_save(state, writer, logical_rows)
    return writer.notes


def run_save(state: Mapping[str, torch.Tensor], writer: ManifestWriter, logical_rows: Mapping[str, int]) -> None:
    """DCP's save with our planner and a given writer; what a failure leaves behind is deleted."""
    with one_line(f"cannot save {writer.folder}"):
        try:
            state_dict_saver.save(dict(state), storage_writer=writer, planner=ManifestSavePlanner(logical_rows))
        except CheckpointException:
            if rank() == 0:  # all ranks are done with their files
                with suppress(OSError):  # the next start cleans up what cannot be deleted now
                    discard_unfinished(writer.folder)
            raise


def load(
    state: Mapping[str, torch.Tensor],
    folder: Path | str | Folder,
    *,
    logical_rows: Mapping[str, int] = _NONE,
    allow_unread: bool | str = False,
) -> dict[str, Any]:
    """Fill ``state`` in place from a checkpoint of any layout, and return its ``extra``. Every rank calls it.

    Every shard that is used is checked against its checksum. After an error the content of ``state`` is undefined.

    Args:
        state: tensors of the shapes and dtypes to read; ranks may hold different names.
        folder: the checkpoint's own folder.
        logical_rows: as in :func:`save`; rows after the real ones are left as they are.
        allow_unread: accept tensors in the checkpoint that no rank asks for; a text: those whose names begin with it.

    Raises:
        TypeError: a value of ``state`` is not a tensor.
        CheckpointError: not a complete checkpoint, or not this state: missing or unexpected tensors, other shapes,
            other dtypes (nothing is ever converted), two values for one memory, overlapping views. All ranks raise it.
        DamagedError: a CheckpointError, when the checkpoint is not what was saved.
    """
    opened = open_folder(folder)
    manifest = on_rank_zero(lambda: read_manifest(opened), CheckpointError)
    load_from(opened, manifest, state, logical_rows=logical_rows, allow_unread=allow_unread)
    return manifest.extra


def load_from(
    folder: Folder,
    manifest: Manifest,
    state: Mapping[str, torch.Tensor],
    *,
    logical_rows: Mapping[str, int] = _NONE,
    allow_unread: bool | str = False,
) -> None:
    """:func:`load` with a manifest that was read before, the same on all ranks."""
    planner = ManifestLoadPlanner(manifest.tensors, logical_rows, allow_unread)
    with one_line(f"cannot load {folder}"):
        state_dict_loader.load(dict(state), storage_reader=ManifestReader(folder, manifest), planner=planner)


@contextmanager
def one_line(action: str) -> Iterator[None]:
    """Turn what DCP gathered from failing ranks into one line; its traceback stays as the cause, and behind it an error
    that decides the exit code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as failure:
            errors = {where: error for where, (error, _) in failure.failures.items()}
            texts = dict.fromkeys(_text(where, error) for where, error in errors.items())
            failure.__cause__ = next((error for error in errors.values() if exit_code(error) == 1), None)
            raise _kind(list(errors.values()))(f"{action}: {'; '.join(texts)}") from failure


def _kind(errors: list[BaseException]) -> type[Exception]:
    """What to raise on all ranks; of these only when nothing else went wrong, because a loader goes on after damage."""
    for kind in (TypeError, DamagedError, LockLostError):
        if all(isinstance(error, kind) for error in errors):
            return kind
    return CheckpointError


def _text(where: int, error: BaseException) -> str:
    if isinstance(error, CheckpointError | TypeError):
        return str(error)
    return f"rank {where}: {type(error).__name__}: {error}"
