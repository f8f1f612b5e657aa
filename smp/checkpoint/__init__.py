"""Checkpoints: a JSON manifest and checksummed safetensors files, readable under any layout. No pickle anywhere.

Names are looked up when they are used: the process that writes in the background starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp.checkpoint.api import load, save
    from smp.checkpoint.async_saver import AsyncSaver, Saved, async_save
    from smp.checkpoint.entries import CheckpointError, DamagedError, Manifest, Shard, TensorEntry
    from smp.checkpoint.latest import commit_latest, find
    from smp.checkpoint.lock import LockLostError, RunLock
    from smp.checkpoint.manifest import read_manifest
    from smp.checkpoint.retention import Retention, prune
    from smp.checkpoint.state import (
        collect_logical_rows,
        materialize_optimizer_state,
        restore_optimizer_scalars,
        training_state,
    )
    from smp.checkpoint.verification import verify

_WHERE = {
    "AsyncSaver": "smp.checkpoint.async_saver",
    "CheckpointError": "smp.checkpoint.entries",
    "DamagedError": "smp.checkpoint.entries",
    "LockLostError": "smp.checkpoint.lock",
    "Manifest": "smp.checkpoint.entries",
    "Retention": "smp.checkpoint.retention",
    "RunLock": "smp.checkpoint.lock",
    "Saved": "smp.checkpoint.async_saver",
    "Shard": "smp.checkpoint.entries",
    "TensorEntry": "smp.checkpoint.entries",
    "async_save": "smp.checkpoint.async_saver",
    "collect_logical_rows": "smp.checkpoint.state",
    "commit_latest": "smp.checkpoint.latest",
    "find": "smp.checkpoint.latest",
    "load": "smp.checkpoint.api",
    "materialize_optimizer_state": "smp.checkpoint.state",
    "prune": "smp.checkpoint.retention",
    "read_manifest": "smp.checkpoint.manifest",
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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'smp.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
