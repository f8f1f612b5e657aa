"""What the settings of a fine-tuning run must satisfy beside what they share with pretraining, and its defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smp.config.checks import check_paths, require
from smp.config.fields import settings
from smp.config.finetune import FinetuneConfig, FinetuneDataConfig, LoraConfig, ObjectiveConfig

ALL_LINEAR = "query,key,value,output,gate,up,down"


def fill_in(config: FinetuneConfig) -> FinetuneConfig:
    """A copy with the defaults that follow from other settings.

    Raises:
        ConfigError: settings that cannot work; one line that names the flag to change.
    """
    _check_ranges(config)
    _check_source(config)
    _check_lora(config.lora)
    _check_objective(config)
    lora, objective, data = config.lora, config.objective, config.data
    if lora.lora_rank is not None:
        alpha, targets = lora.lora_alpha or 2.0 * lora.lora_rank, lora.lora_target_modules or ALL_LINEAR
        dropout = lora.lora_dropout or 0.0
        lora = replace(lora, lora_alpha=alpha, lora_target_modules=targets, lora_dropout=dropout)
    if objective.objective == "dpo":
        default = "adapters-off" if has_adapters(lora) else "copy"
        objective = replace(objective, dpo_reference=objective.dpo_reference or default)  # type: ignore[arg-type]
    data = replace(data, packing=data.packing or ("off" if objective.objective == "dpo" else "best-fit"))
    return replace(config, lora=lora, objective=objective, data=data)


def has_adapters(lora: LoraConfig) -> bool:
    """Whether adapters are trained instead of all weights."""
    return lora.lora_rank is not None or lora.load_adapter is not None


def _check_ranges(config: FinetuneConfig) -> None:
    data, lora, objective, training = config.data, config.lora, config.objective, config.training
    fraction, smoothing, dropout = data.bad_sample_threshold, objective.dpo_label_smoothing, lora.lora_dropout
    require(0 <= fraction <= 1, f"--bad-sample-threshold {fraction} is not between 0 and 1")
    require(dropout is None or 0 <= dropout < 1, f"--lora-dropout {dropout} must be at least 0 and below 1")
    require(0 <= smoothing < 0.5, f"--dpo-label-smoothing {smoothing} must be at least 0 and below 0.5")
    require(data.preview >= 0, f"--preview {data.preview} must not be negative")
    for name, value in (
        ("lora_rank", lora.lora_rank),
        ("lora_alpha", lora.lora_alpha),
        ("dpo_beta", objective.dpo_beta),
        ("train_epochs", training.train_epochs),
    ):
        require(value is None or value > 0, f"{_flag(name)} {value} must be above 0")


def _check_source(config: FinetuneConfig) -> None:
    data, training, checkpoint = config.data, config.training, config.checkpoint
    check_paths(checkpoint.load, checkpoint.save)
    require(checkpoint.load is not None, "what to fine-tune is missing: give --load, the folder of a model")
    require(data.data_path is not None or training.dry_run, "what to train on is missing: give --data-path")
    require(not checkpoint.resume or checkpoint.save is not None, "--resume goes on from --save: give --save")
    lengths = [_flag(n) for n in ("train_epochs", "train_iters", "train_samples") if getattr(training, n) is not None]
    require(len(lengths) < 2, f"{' and '.join(lengths)} are both given; give one")
    require(
        bool(lengths) or training.dry_run or data.preview > 0,
        "how long to train is missing: give --train-epochs, --train-iters or --train-samples",
    )


def _check_lora(lora: LoraConfig) -> None:
    brought = _given(lora, LoraConfig(), "lora_rank", "lora_alpha", "lora_target_modules")
    if lora.load_adapter is not None:
        require(not brought, f"{', '.join(brought)}: --load-adapter {lora.load_adapter} brings it; leave it out")
    elif lora.lora_rank is None:
        given = brought + _given(lora, LoraConfig(), "lora_dropout")
        require(not given, f"{', '.join(given)}: there are no adapters; give --lora-rank or --load-adapter")


def _check_objective(config: FinetuneConfig) -> None:
    objective, data = config.objective, config.data
    if objective.objective == "sft":
        given = _given(objective, ObjectiveConfig(), "dpo_beta", "dpo_label_smoothing", "dpo_reference")
        require(not given, f"{', '.join(given)}: this is for --objective dpo")
        return
    require(data.packing != "best-fit", "--packing best-fit: pairs of --objective dpo are not packed; leave it out")
    given = _given(data, FinetuneDataConfig(), "mask_prompt")
    require(not given, "--no-mask-prompt: --objective dpo compares answers only; leave it out")
    require(
        objective.dpo_reference != "adapters-off" or has_adapters(config.lora),
        "--dpo-reference adapters-off: there are no adapters to switch off; give --lora-rank, or take copy",
    )


def _given(group: Any, default: Any, *names: str) -> list[str]:
    """What was given of these settings, as on a command line."""
    return [f"{_flag(n)} {getattr(group, n)}" for n in names if getattr(group, n) != getattr(default, n)]


def _flag(name: str) -> str:
    return settings(FinetuneConfig)[name].flag
