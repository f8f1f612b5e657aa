"""What a checkpoint of a training run holds, and how a run comes back from one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp import __version__, checkpoint
from smp.config import Config, ConfigError, as_flat_dict
from smp.training.trainer import Progress

_FREE = {"hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by", "model"}
"""Model settings that may change on a resume without changing what the weights mean."""
_ORDER = ("seed", "split", "seq_length", "data_path", "mock_data")
"""Settings that the order of the data is a function of."""


def save_training(
    root: Path, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Write ``root/iter_NNNNNNN`` and move ``root/latest`` to it. Every rank calls it."""
    tensors, steps = checkpoint.training_state(model, optimizer)
    extra = {
        "progress": asdict(progress),
        "optimizer_steps": steps,
        "config": as_flat_dict(config),
        "world_size": dist.get_world_size(),
        "smp_version": __version__,
    }
    folder = checkpoint.iteration_folder(root, progress.iteration)
    rows = checkpoint.collect_logical_rows(model, optimizer)
    checkpoint.save(tensors, folder, extra=extra, logical_rows=rows)
    if dist.get_rank() == 0:
        checkpoint.commit_latest(root, folder)
    dist.barrier()
    return folder


def find_checkpoint(config: Config) -> Path | None:
    """The folder to resume from: what --load names, or with ``auto`` what --save holds, if anything.

    --load takes a folder of checkpoints (its ``latest`` is used) or one checkpoint's own folder.

    Raises:
        ConfigError: --load names a folder without a checkpoint.
    """
    load = config.checkpoint.load
    if load is None:
        return None
    if load == "auto":
        assert config.checkpoint.save is not None
        return checkpoint.latest(config.checkpoint.save)
    try:
        return checkpoint.find(load)
    except checkpoint.CheckpointError as error:
        raise ConfigError(f"--load {error}") from None


def load_training(
    folder: Path, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Progress, list[str]]:
    """Fill model and optimizer from ``folder``; returns the progress and what to tell the user.

    Raises:
        ConfigError: the checkpoint is of another architecture.
    """
    settings = as_flat_dict(config)
    notes = compare_settings(checkpoint.read_manifest(folder).extra.get("config", {}), config, settings)
    tensors, _ = checkpoint.training_state(model, optimizer)
    extra = checkpoint.load(tensors, folder, logical_rows=checkpoint.collect_logical_rows(model, optimizer))
    checkpoint.restore_optimizer_scalars(model, optimizer, extra["optimizer_steps"])
    return Progress(**extra["progress"]), notes


def compare_settings(saved: dict[str, Any], config: Config, settings: dict[str, Any]) -> list[str]:
    """A line for each setting that the data order depends on and that changed.

    Raises:
        ConfigError: a setting of the architecture changed: the weights would mean something else.
    """
    for name in asdict(config.model):
        if name not in _FREE and name in saved and saved[name] != settings[name]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"the checkpoint was trained with {flag} {saved[name]}, this run has {settings[name]}")
    return [
        f"note: {name} was {saved[name]} in the checkpoint and is {settings[name]} now: the data order changes"
        for name in _ORDER
        if name in saved and saved[name] != settings[name]
    ]
