"""Checkpoints: a JSON manifest and checksummed safetensors files, readable under any layout. No pickle anywhere."""

from smp.checkpoint.api import load, save
from smp.checkpoint.latest import commit_latest, find, iteration_folder, latest
from smp.checkpoint.manifest import CheckpointError, Manifest, Shard, TensorEntry, read_manifest
from smp.checkpoint.state import (
    collect_logical_rows,
    materialize_optimizer_state,
    restore_optimizer_scalars,
    training_state,
)

__all__ = [
    "CheckpointError",
    "Manifest",
    "Shard",
    "TensorEntry",
    "collect_logical_rows",
    "commit_latest",
    "find",
    "iteration_folder",
    "latest",
    "load",
    "materialize_optimizer_state",
    "read_manifest",
    "restore_optimizer_scalars",
    "save",
    "training_state",
]
