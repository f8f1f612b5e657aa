"""Contents of a training checkpoint, and how a run resumes from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from smp import __version__, checkpoint
from smp.checkpoint.api import load_from
from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.folders.latest import misnamed
from smp.checkpoint.folders.retention import VALIDATION_LOSS
from smp.checkpoint.format.entries import Manifest
from smp.checkpoint.format.tensor_bytes import DTYPES
from smp.config import Config, ConfigError, ModelConfig, OptimizerConfig, as_flat_dict
from smp.config.command_line.credentials import without_credentials
from smp.config.command_line.entry_points import PRETRAIN
from smp.config.command_line.fields import flag_of
from smp.config.distillation import DistillationConfig
from smp.config.objectives import ObjectiveConfig
from smp.config.rollouts import ONLINE, RolloutConfig
from smp.config.schema import LoraConfig
from smp.convert.changes import changes, misfit, other_than_trained, saved_model
from smp.convert.load import load_weights
from smp.convert.smp_format import SmpWeights
from smp.layers.adapters.lora import adapters_of
from smp.layers.fp8.apply import fp8_history
from smp.layers.fp8.history import HISTORY
from smp.parallel.agree import gather
from smp.training.checkpoints.origin import ORIGIN, Origin
from smp.training.checkpoints.saved_run import SavedRun
from smp.training.trainer import Progress

CARRIED = "rollouts."
"""Prefix of tensors that belong to the source of batches, see ``smp.training.rollouts.source``."""

REFERENCE = "reference."
"""Prefix of tensors of a reference model that changes during training, see ``smp.training.objectives.reference``."""


class Kept(NamedTuple):
    """Tensors that checkpoints have in addition to those of the model and its optimizer: the tensors, which loading
    fills, and the number of real rows of those that are padded."""

    tensors: Mapping[str, torch.Tensor] = {}
    logical_rows: Mapping[str, int] = {}


_NOTHING_ELSE = Kept()
_FINETUNE = "finetune"
"""Key in ``extra`` of the settings that only a fine-tuning run has."""

_FROZEN = ("freeze_vision_model", "freeze_projector", "freeze_language_model")
_OWN = (
    *(
        field.name
        for group in (LoraConfig, ObjectiveConfig, RolloutConfig, DistillationConfig)
        for field in fields(group)
    ),
    *("load", "ckpt_step", "tokenizer_model", "chat_template", "apply_chat_template", "mask_prompt"),
    *_FROZEN,
    "train_epochs",
)
"""Names of the settings under ``_FINETUNE`` that a resume compares."""

_ORDER = ("seed", "split", "seq_length", "packing", "data_path", "mock_data")
"""Settings that the order of the data is a function of."""

# The same run may be resumed with another number of epochs or dropout, and from another copy of its
# base model.
_RUN = tuple(name for name in _OWN if name not in ("load", "ckpt_step", "train_epochs", "lora_dropout"))
"""Settings of a fine-tuning run that tell it from another one that begins from the same model."""

_COURSE = (
    *(field.name for field in fields(OptimizerConfig)),
    *("bf16", "reset_attention_mask", "reset_position_ids", "eod_mask_loss"),
    *("rampup_batch_size", "step_batch_size_schedule"),
    *("fp8_format", "fp8_recipe", "fp8_amax_compute_algo", "fp8_emulate", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
"""Settings, in addition to the model's, that may change on a resume but change what is trained from then on: each
change is noted."""


def run_state(
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    validation_loss: float | None,
    origin: Origin | None = None,
) -> dict[str, Any]:
    """Arguments of ``checkpoint.save``: the tensors, ``extra`` for a resume, and the numbers of real rows of padded
    tensors. ``validation_loss`` is that of exactly these weights, if it was measured; ``origin`` is where the run
    began."""
    frozen = not config.has_adapters  # they are saved without the model that they belong to
    tensors, own_steps = checkpoint.training_state(model, optimizer, frozen=frozen)
    # Delayed scaling: the next step's FP8 scales come from these maxima, so a resume without them
    # differs.
    if (history := fp8_history(model)) is not None:
        tensors |= history.state()
    # Scalars (Adam's step counts) go to the manifest: safetensors holds the tensors.
    steps = {name: step for part in gather(own_steps) for name, step in part.items()}  # pipeline ranks hold parts
    extra = {
        "progress": _noted(progress),
        "optimizer_steps": steps,
        VALIDATION_LOSS: validation_loss,
        ORIGIN: None if origin is None else origin.note(),
        "world_size": dist.get_world_size(),
        "smp_version": __version__,
        **noted_settings(config),
    }
    if not frozen:
        # alpha / rank is not in the tensors A and B, and without it an adapter cannot be used.
        scales = gather({name: adapter.alpha / adapter.rank for name, adapter in adapters_of(model).items()})
        extra["adapters"] = {name: scale for part in scales for name, scale in part.items()}
    rows = checkpoint.collect_logical_rows(model, optimizer, frozen=frozen)
    return {"state": tensors, "extra": extra, "logical_rows": rows}


def _noted(progress: Progress) -> dict[str, Any]:
    """The counters as a dictionary. ``spikes`` is left out where it is None, so that programs older than --spike-policy
    can read the checkpoint."""
    return {name: value for name, value in asdict(progress).items() if not (name == "spikes" and value is None)}


def noted_settings(config: Config) -> dict[str, dict[str, Any]]:
    """The settings that a checkpoint records, by group: under pretraining's names, so that any run can compare them,
    and in addition a fine-tuning run's own. Credentials are removed from URLs: they may change between runs."""
    shared = _readable(as_flat_dict(config, PRETRAIN))
    if config.model.is_foreign:  # which is no flag
        shared |= {"transformers_config": config.model.transformers_config}
    if config.objective is None:
        return {"config": shared}
    packing = "best-fit" if config.data.packing == "best-fit" else "stream"
    shared |= {"packing": packing, "load": without_credentials(config.resume_from), "ckpt_step": None}
    shared |= {"scalar_head": True} if config.model.scalar_head else {}  # which is no flag
    every = _readable(as_flat_dict(config))
    return {"config": shared, _FINETUNE: {name: every[name] for name in _OWN}}


def what_is_trained(config: Config) -> dict[str, Any]:
    """The settings, by name, that tell a run from another one that begins at the same checkpoint."""
    noted = noted_settings(config)
    own = noted.get(_FINETUNE, {})
    return {name: noted["config"][name] for name in _ORDER} | {name: own[name] for name in _RUN if own}


def _readable(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: without_credentials(value) for name, value in settings.items()}


def load_training(
    folder: Folder,
    manifest: Manifest,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    carried: dict[str, torch.Tensor],
    kept: Kept = _NOTHING_ELSE,
) -> tuple[Progress, list[str]]:
    """Fill model and optimizer from ``folder``, ``carried`` with the state of the source of batches, and the tensors
    that the run has ``kept``; returns the progress and notes for the user.

    With --no-load-optim the optimizer is left as it is, with --finetune the progress is none as well.

    Raises:
        ConfigError: the checkpoint is of another architecture.
        CheckpointError: as ``checkpoint.load``; or something that a resume needs is missing.
    """
    finetune = config.checkpoint.finetune
    saved = SavedRun.for_weights(manifest.extra) if finetune else SavedRun.of(manifest.extra, folder)
    # A manifest of the data names what was read by content, so that a renamed file is not a change.
    has_manifest = saved.progress is not None and saved.progress.data is not None
    noted = noted_settings(config)
    # Without settings, as of the library's checkpoints, the weights tell whether they fit.
    trained = saved_model(saved.config, str(folder)) if "num_layers" in saved.config else config.model
    # Raises for another architecture, before a tensor is read.
    notes = compare_models(trained, config.model, folder, weights_only=finetune)
    if finetune:
        loading = load_weights(model, lambda: SmpWeights(folder, manifest, trained))
        at = [] if saved.progress is None else [f"weights are those of iteration {saved.progress.iteration}"]
        return Progress(), [*notes, *loading, *at]
    notes += compare_settings(saved.config, config, noted["config"], has_manifest)
    _check_history(folder, manifest, saved, model, finetuning=_FINETUNE in noted)
    _check_objective(folder, manifest.extra.get(_FINETUNE), config.objective)
    if config.checkpoint.load_optim:
        _check_frozen(folder, manifest.extra.get(_FINETUNE), noted.get(_FINETUNE, {}))
    notes = [f"WARNING: {line}" for line in [misnamed(folder, manifest.extra)] if line is not None] + notes
    scales, without = _known_scales(manifest, model)
    notes = [*notes, *without]
    if not config.checkpoint.load_optim and saved.progress is not None:
        if (history := fp8_history(model)) is not None:  # of layers, not of the optimizer
            # The history belongs to the layers' FP8 scales: it is loaded also where the optimizer
            # starts anew.
            load_from(folder, manifest, scales, allow_unread=True)
            history.restored()
        return saved.progress, [*notes, *load_weights(model, lambda: SmpWeights(folder, manifest, config.model))]
    if saved.progress is None or saved.optimizer_steps is None:
        raise ConfigError(f"{folder} holds weights only, nothing to resume: give --finetune")
    afresh = "--no-load-optim to start the optimizer afresh"  # which finetune.py does not have
    _check_optimizer(saved.config, noted["config"], "--optimizer as it was" if _FINETUNE in noted else afresh)
    frozen = not config.has_adapters
    tensors, _ = checkpoint.training_state(model, optimizer, frozen=frozen)
    rows = checkpoint.collect_logical_rows(model, optimizer, frozen=frozen)
    # Not known to the run before it reads the manifest: their shapes change with what was under
    # way.
    own = {name: entry for name, entry in manifest.tensors.items() if name.startswith(CARRIED)}
    carried |= {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in own.items()}
    # A checkpoint of before the reference model was saved: the run continues with that of --load.
    reference = kept.tensors if any(name.startswith(REFERENCE) for name in manifest.tensors) else {}
    if kept.tensors and not reference:
        notes = [*notes, "note: the checkpoint was saved without a reference model: the model of --load is used"]
    load_from(
        folder,
        manifest,
        {**tensors, **scales, **carried, **reference},
        logical_rows={**rows, **(kept.logical_rows if reference else {})},
        # Tensors under these prefixes need not be asked for; any other unread tensor is an error.
        allow_unread=(HISTORY, REFERENCE),
    )
    if (history := fp8_history(model)) is not None:
        history.restored()
    # The step counts are in ``extra``, not among the tensors.
    checkpoint.restore_optimizer_scalars(model, optimizer, saved.optimizer_steps)
    before, now = manifest.extra.get(_FINETUNE), noted.get(_FINETUNE, {})
    return saved.progress, [*notes, *_changed(before if isinstance(before, dict) else {}, now, now)]


def _known_scales(manifest: Manifest, model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(this run's history of FP8 scales, which is to be loaded, notes for the user). A history that the checkpoint
    lacks, or that has another length, is left empty and fills again. Every rank calls it."""
    history = fp8_history(model)
    if history is None:
        return {}, []
    state = history.state()
    fits = all(n in manifest.tensors and manifest.tensors[n].shape == tuple(t.shape) for n, t in state.items())
    # Over all ranks: a pipeline rank whose layers fit must not load while another starts anew.
    if all(gather(fits)):
        return state, []
    if any(name.startswith(HISTORY) for name in manifest.tensors):
        why = "the checkpoint's history of FP8 scales has another length (--fp8-amax-history-len), or lacks layers"
    else:
        why = "the checkpoint was saved without a history of FP8 scales"
    return {}, [f"note: {why}: it starts again, with one step without FP8"]


def _changed(saved: Mapping[str, Any], settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """A line for each of these settings that changed."""
    return [
        f"note: {name} was {saved[name]} in the checkpoint and is {settings[name]} now"
        for name in names
        if name in saved and saved[name] != settings[name]
    ]


def _check_history(folder: Folder, manifest: Manifest, saved: SavedRun, model: nn.Module, *, finetuning: bool) -> None:
    """Raise ConfigError when a checkpoint is of another kind of run, or its adapters are not those of ``model``: the
    counters, or the weights, would mean something else. Every rank calls it."""
    finetuned = _FINETUNE in manifest.extra
    if finetuned and not finetuning:
        raise ConfigError(
            f"{folder} is of a fine-tuning run, which finetune.py --resume continues; --finetune takes its weights"
        )
    if finetuning and not finetuned:
        raise ConfigError(
            f"{folder} is not of a fine-tuning run, so --resume cannot continue it: give another --save, and --load "
            "to start from its weights"
        )
    here = {n: _kind(m.rank, m.alpha / m.rank) for n, m in adapters_of(model).items()}
    here = {name: kind for part in gather(here) for name, kind in part.items()}  # pipeline ranks hold parts
    # (rank, in), for stacked experts (experts, rank, in)
    ranks = {n: manifest.tensors[t].shape[-2] for n in saved.adapters if (t := f"model.{n}.lora.a") in manifest.tensors}
    # Scales are written with 6 digits below, so a sum in another order is no difference.
    there = {name: _kind(rank, saved.adapters[name]) for name, rank in ranks.items()}
    for name in sorted({*here, *there}):
        before, now = there.get(name, "none"), here.get(name, "none")
        if before != now:
            raise ConfigError(
                f"{folder} has other adapters: that of {name} is {before}, in this run {now}; give --lora-rank, "
                "--lora-alpha, --lora-target-modules or --load-adapter as they were, or another --save"
            )


def _check_objective(folder: Folder, saved: Any, objective: Any) -> None:
    """Raise ConfigError when a checkpoint is of a run with another objective: its iterations, and the averages in its
    optimizer, are of another loss. Those that train on completions of their own may take turns."""
    before = saved.get("objective") if isinstance(saved, dict) else None
    now = None if objective is None else objective.objective
    if before not in (None, now) and not {before, now} <= set(ONLINE):
        raise ConfigError(
            f"{folder} is of a run with --objective {before}, which --objective {now} cannot continue: give "
            "another --save, and --load to start from its weights"
        )


def _check_frozen(folder: Folder, saved: Any, now: Mapping[str, Any]) -> None:
    """Raise ConfigError when a checkpoint is of a run that froze other parts: its optimizer has no averages of them."""
    before = saved if isinstance(saved, dict) else {}
    if all(name not in before or before[name] == now.get(name) for name in _FROZEN):
        return
    flags = ", ".join(flag_of(name) for name in _FROZEN if before.get(name)) or "no part frozen"
    raise ConfigError(
        f"{folder} was saved with {flags}, and its optimizer has a state only for what was trained: freeze the same "
        "parts, or give another --save, and --load to start from its weights"
    )


def _kind(rank: int, scale: float) -> str:
    return f"of rank {rank}, scaled by {scale:.6g}"


def compare_settings(
    saved: Mapping[str, Any], config: Config, settings: Mapping[str, Any], has_manifest: bool = False
) -> list[str]:
    """A line for each setting that changed what a resumed run trains, other than the model's. With a manifest of the
    data, paths need not be equal: it tells by itself what was read and what was not."""
    known = {"data_path"} if has_manifest else set()
    if config.objective is not None and config.data.valid_data_path is not None:
        known.add("split")  # it divides nothing
    order = [name for name in _ORDER if name not in known]
    notes = [f"{line}: the data order changes" for line in _changed(saved, settings, order)]
    constant = settings["lr_decay_style"] == "constant"
    # A constant learning rate ignores lr_decay_iters.
    notes += _changed(saved, settings, [name for name in _COURSE if not (name == "lr_decay_iters" and constant)])
    before, now = saved.get("global_batch_size"), settings["global_batch_size"]
    # With --train-samples the length counts samples, which a changed batch size does not touch.
    if before not in (None, now) and config.training.train_samples is None:
        notes.append(
            f"note: global_batch_size was {before} in the checkpoint and is {now} now: iterations already done count "
            f"as they were, so the {config.training.train_iters} iterations of this run are another number of samples"
        )
    return notes


def compare_models(trained: ModelConfig, asked: ModelConfig, load: object, *, weights_only: bool) -> list[str]:
    """One line for all settings of the model that changed and leave its tensors as they are.

    Args:
        trained: the model of the checkpoint at ``load``.
        weights_only: layers of multi-token prediction may be left out.

    Raises:
        ConfigError: its tensors do not fit into the one that is ``asked`` for.
    """
    kept = asked.mtp_num_layers
    fewer = weights_only and (kept or 0) < (trained.mtp_num_layers or 0)
    # Weights only: a model may be loaded without some of the multi-token prediction layers it was
    # trained with.
    name = misfit(replace(trained, mtp_num_layers=kept) if fewer else trained, asked)
    if name is not None:
        now = f"{flag_of(name)} {getattr(trained, name)}, this run has {getattr(asked, name)}"
        raise ConfigError(f"the checkpoint was trained with {now}")
    changed = changes(trained, asked)
    return [f"note: {other_than_trained(load, changed)}"] if changed else []


def _check_optimizer(saved: Mapping[str, Any], settings: Mapping[str, Any], remedy: str) -> None:
    """Raise ConfigError when the saved optimizer state is of another kind than this run's."""
    before, now = _state_kind(saved), _state_kind(settings)
    if saved and before != now:
        raise ConfigError(f"the checkpoint holds the optimizer state of {before}, this run has {now}: give {remedy}")


def _state_kind(settings: Mapping[str, Any]) -> str:
    # Kinds whose state tensors have different names or dtypes, so that one cannot be loaded as
    # another.
    if settings.get("optimizer") == "muon":
        return "--optimizer muon"
    if settings.get("optimizer") != "sgd":
        flags = {name: settings.get(name) or "fp32" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
        narrow = [f" {flag_of(name)} {value}" for name, value in flags.items() if value != "fp32"]
        return "--optimizer adam" + "".join(narrow)  # torch's and apex's have the same
    return "--optimizer sgd with" + ("" if settings.get("sgd_momentum") else "out") + " --sgd-momentum"
