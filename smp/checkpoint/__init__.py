"""Checkpoints: a JSON manifest and checksummed safetensors files, readable under any layout. No pickle anywhere.

Read ``api`` first: one folder saved and loaded by all ranks. ``dcp_planner`` says who writes and reads which shard,
:mod:`smp.checkpoint.format` has the files, :mod:`smp.checkpoint.folders` what they lie in,
:mod:`smp.checkpoint.background` saves while training continues, ``recovery`` cleans up after a crash.

Names are looked up when they are used: the process that writes in the background starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp.checkpoint.api import load, save
    from smp.checkpoint.background.async_saver import AsyncSaver, Saved, async_save
    from smp.checkpoint.folders.latest import commit_latest, find
    from smp.checkpoint.folders.lock import LockLostError, RunLock
    from smp.checkpoint.folders.retention import Retention, prune
    from smp.checkpoint.format.entries import CheckpointError, DamagedError, Manifest, Shard, TensorEntry
    from smp.checkpoint.format.manifest import read_manifest
    from smp.checkpoint.state import (
        collect_logical_rows,
        materialize_optimizer_state,
        restore_optimizer_scalars,
        training_state,
    )
    from smp.checkpoint.verification import verify

_WHERE = {
    "AsyncSaver": "smp.checkpoint.background.async_saver",
    "CheckpointError": "smp.checkpoint.format.entries",
    "DamagedError": "smp.checkpoint.format.entries",
    "LockLostError": "smp.checkpoint.folders.lock",
    "Manifest": "smp.checkpoint.format.entries",
    "Retention": "smp.checkpoint.folders.retention",
    "RunLock": "smp.checkpoint.folders.lock",
    "Saved": "smp.checkpoint.background.async_saver",
    "Shard": "smp.checkpoint.format.entries",
    "TensorEntry": "smp.checkpoint.format.entries",
    "async_save": "smp.checkpoint.background.async_saver",
    "collect_logical_rows": "smp.checkpoint.state",
    "commit_latest": "smp.checkpoint.folders.latest",
    "find": "smp.checkpoint.folders.latest",
    "load": "smp.checkpoint.api",
    "materialize_optimizer_state": "smp.checkpoint.state",
    "prune": "smp.checkpoint.folders.retention",
    "read_manifest": "smp.checkpoint.format.manifest",
    "restore_optimizer_scalars": "smp.checkpoint.state",
    "save": "smp.checkpoint.api",
    "training_state": "smp.checkpoint.state",
    "verify": "smp.checkpoint.verification",
}

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "DamagedError",
    "LockLostError",
    "Manifest",
    "Retention",
    "RunLock",
    "Saved",
    "Shard",
    "TensorEntry",
    "async_save",
    "collect_logical_rows",
    "commit_latest",
    "find",
    "load",
    "materialize_optimizer_state",
    "prune",
    "read_manifest",
    "restore_optimizer_scalars",
    "save",
    "training_state",
    "verify",
]


# PEP 562: a module's own ``__getattr__`` is asked for names that it does not have.
def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'smp.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
