"""Save and load one checkpoint folder, over all ranks of the default process group or in a single process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from smp.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from smp.checkpoint.planner import ManifestLoadPlanner, ManifestSavePlanner
from smp.checkpoint.storage import ManifestReader, ManifestWriter

_NONE: Mapping[str, int] = {}


def save(
    state: Mapping[str, torch.Tensor],
    folder: Path | str,
    *,
    extra: Mapping[str, Any],
    logical_rows: Mapping[str, int] = _NONE,
) -> None:
    """Write a checkpoint folder; when this returns it is complete and on disk. Every rank calls it.

    A checkpoint that is in the folder already is replaced, and stays readable until the new one is complete.

    Args:
        state: DTensors, and plain tensors that are equal on all ranks that have them. Ranks may hold different names
            (pipeline stages). Shards are written as they lie in memory, replicas by one of the ranks that have them.
        folder: the checkpoint's own folder, shared by all ranks. ``latest`` is moved separately (``commit_latest``).
        extra: plain JSON that comes back from :func:`load`; rank 0's is written.
        logical_rows: tensor name -> rows of dimension 0 that are real. The rows after them are padding and not written.

    Raises:
        TypeError: a value of ``state`` is not a tensor, or ``extra`` is not plain JSON.
        CheckpointError: anything else that went wrong on any rank; all ranks raise it. A checkpoint that was in the
            folder before is still readable.
    """
    folder = Path(folder)
    with _one_line(f"cannot save {folder}"):
        state_dict_saver.save(
            dict(state), storage_writer=ManifestWriter(folder, extra), planner=ManifestSavePlanner(logical_rows)
        )


def load(
    state: Mapping[str, torch.Tensor],
    folder: Path | str,
    *,
    logical_rows: Mapping[str, int] = _NONE,
    allow_unread: bool = False,
) -> dict[str, Any]:
    """Fill ``state`` in place from a checkpoint of any layout, and return its ``extra``. Every rank calls it.

    Every byte that is used is checked against its checksum first. After an error ``state`` is partly filled.

    Args:
        state: tensors of the shapes and dtypes to read; ranks may hold different names.
        folder: the checkpoint's own folder.
        logical_rows: as in :func:`save`; rows after the real ones are left as they are.
        allow_unread: accept tensors in the checkpoint that no rank asks for.

    Raises:
        TypeError: a value of ``state`` is not a tensor.
        CheckpointError: not a complete checkpoint, damaged, or not this state: missing or unexpected tensors, other
            shapes, other dtypes (nothing is ever converted). All ranks raise it.
    """
    folder = Path(folder)
    manifest = _read_on_rank_zero(folder)
    planner = ManifestLoadPlanner(logical_rows, allow_unread)
    with _one_line(f"cannot load {folder}"):
        state_dict_loader.load(dict(state), storage_reader=ManifestReader(folder, manifest), planner=planner)
    return manifest.extra


def _read_on_rank_zero(folder: Path) -> Manifest:
    """One read of the manifest for all ranks, so that they agree about it or about why there is none."""
    if not dist.is_initialized():
        return read_manifest(folder)
    box: list[Manifest | CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = read_manifest(folder)
        except (CheckpointError, OSError) as error:
            box[0] = CheckpointError(str(error))
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], CheckpointError):
        raise box[0]
    assert box[0] is not None
    return box[0]


@contextmanager
def _one_line(action: str) -> Iterator[None]:
    """Turn what DCP gathered from failing ranks into one line; its traceback stays as the cause."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as failure:
            errors = {rank: error for rank, (error, _) in failure.failures.items()}
            kind = TypeError if all(isinstance(e, TypeError) for e in errors.values()) else CheckpointError
            texts = dict.fromkeys(_text(rank, error) for rank, error in errors.items())
            raise kind(f"{action}: {'; '.join(texts)}") from failure


def _text(rank: int, error: BaseException) -> str:
    if isinstance(error, CheckpointError | TypeError):
        return str(error)
    return f"rank {rank}: {type(error).__name__}: {error}"
