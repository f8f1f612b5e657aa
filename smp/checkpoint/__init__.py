"""Checkpoints: a JSON manifest and checksummed safetensors files, readable under any layout. No pickle anywhere."""

from smp.checkpoint.api import load, save
from smp.checkpoint.async_save import AsyncSaver, Saved, async_save
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
from smp.checkpoint.verify import verify

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
