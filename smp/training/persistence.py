"""What a checkpoint of a training run holds, and how a run comes back from one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp import __version__, checkpoint
from smp.checkpoint.agree import gather
from smp.checkpoint.api import load_from
from smp.checkpoint.entries import Manifest
from smp.checkpoint.folder import Folder
from smp.checkpoint.retention import VALIDATION_LOSS
from smp.config import Config, ConfigError, as_flat_dict
from smp.convert.hf_config import FREE
from smp.convert.load import load_weights
from smp.convert.smp_format import SmpWeights
from smp.training.trainer import Progress

_ORDER = ("seed", "split", "seq_length", "packing", "data_path", "mock_data")
"""Settings that the order of the data is a function of."""


def run_state(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    validation_loss: float | None,
) -> dict[str, Any]:
    """Arguments of ``checkpoint.save``: the tensors, what else a resume needs, and the padded rows.

    Args:
        config: resolved settings.
        model: after ``parallelize``.
        optimizer: over its parameters.
        progress: counters.
        validation_loss: of exactly these weights, if it was measured.
    """
    tensors, own_steps = checkpoint.training_state(model, optimizer)
    steps = {name: step for part in gather(own_steps) for name, step in part.items()}  # pipeline ranks hold parts
    extra = {
        "progress": asdict(progress),
        "optimizer_steps": steps,
        VALIDATION_LOSS: validation_loss,
        "config": as_flat_dict(config),
        "world_size": dist.get_world_size(),
        "smp_version": __version__,
    }
    return {"state": tensors, "extra": extra, "logical_rows": checkpoint.collect_logical_rows(model, optimizer)}


def load_training(
    folder: Folder, manifest: Manifest, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Progress, list[str]]:
    """Fill model and optimizer from ``folder``; returns the progress and what to tell the user.

    With --no-load-optim the optimizer is left as it is, with --finetune the progress is none as well.

    Raises:
        ConfigError: the checkpoint is of another architecture.
        CheckpointError: as ``checkpoint.load``.
    """
    has_manifest = manifest.extra.get("progress", {}).get("data") is not None
    notes = compare_settings(manifest.extra.get("config", {}), config, as_flat_dict(config), has_manifest)
    weights_only = config.checkpoint.finetune or not config.checkpoint.load_optim
    if not weights_only:
        _check_optimizer(manifest.extra.get("config", {}), as_flat_dict(config))
        _check_complete(manifest, folder)
        tensors, _ = checkpoint.training_state(model, optimizer)
        load_from(folder, manifest, tensors, logical_rows=checkpoint.collect_logical_rows(model, optimizer))
        checkpoint.restore_optimizer_scalars(model, optimizer, manifest.extra["optimizer_steps"])
        return Progress(**manifest.extra["progress"]), notes
    loading = load_weights(model, lambda: SmpWeights(folder, manifest))
    if config.checkpoint.finetune:
        return Progress(), [*loading, f"weights are those of iteration {manifest.extra['progress']['iteration']}"]
    return Progress(**manifest.extra["progress"]), [*notes, *loading]


def compare_settings(
    saved: dict[str, Any], config: Config, settings: dict[str, Any], has_manifest: bool = False
) -> list[str]:
    """A line for each setting that the data order depends on and that changed. A manifest of the data tells apart what
    was read and what was not by itself, whatever the files are called.

    Raises:
        ConfigError: a setting of the architecture changed: the weights would mean something else.
    """
    for name in asdict(config.model):
        if name not in FREE and name in saved and saved[name] != settings[name]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"the checkpoint was trained with {flag} {saved[name]}, this run has {settings[name]}")
    notes = [
        f"note: {name} was {saved[name]} in the checkpoint and is {settings[name]} now: the data order changes"
        for name in _ORDER
        if name in saved and saved[name] != settings[name] and not (name == "data_path" and has_manifest)
    ]
    before, now = saved.get("global_batch_size"), settings["global_batch_size"]
    if before not in (None, now) and not config.checkpoint.finetune:
        notes.append(
            f"note: global_batch_size was {before} in the checkpoint and is {now} now: iterations already done count "
            f"as they were, so the {config.training.train_iters} iterations of this run are another number of samples"
        )
    return notes


def _check_complete(manifest: Manifest, folder: Folder) -> None:
    """Raise ConfigError for a checkpoint that never had an optimizer: a converted one."""
    if "optimizer_steps" not in manifest.extra:
        raise ConfigError(f"{folder} holds weights only, nothing to resume: give --finetune")


def _check_optimizer(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise ConfigError when the saved optimizer state is of another kind than this run's."""
    before, now = _state_kind(saved), _state_kind(settings)
    if saved and before != now:
        raise ConfigError(
            f"the checkpoint holds the optimizer state of {before}, this run has {now}: give --no-load-optim to start "
            "the optimizer afresh"
        )


def _state_kind(settings: dict[str, Any]) -> str:
    if settings.get("optimizer") != "sgd":
        return "--optimizer adam"  # torch's and apex's have the same
    return "--optimizer sgd with" + ("" if settings["sgd_momentum"] else "out") + " --sgd-momentum"
