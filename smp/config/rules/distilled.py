"""Checks and defaults of distillation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smp.config.command_line.fields import flag_of, given, require
from smp.config.distillation import DistillationConfig
from smp.config.parallel import ParallelConfig
from smp.config.rollouts import RolloutConfig
from smp.config.schema import Config

BETA = 0.5
"""Default of --beta, that of TRL."""


def fill_distillation(config: Config) -> RolloutConfig | None:
    """Check the group; returns the settings it shares with reinforcement learning, with their defaults.

    Raises:
        ConfigError: values outside of their range, or settings that do not go together.
    """
    distillation, rollouts, objective = config.distillation, config.rollouts, config.objective
    if distillation is None or rollouts is None or objective is None or objective.objective != "distill":
        return rollouts
    sources = given(distillation, "teacher", "logits_load_dir", "logits_save_dir")
    require(bool(sources), "--objective distill: the teacher is missing: give --teacher or --logits-load-dir")
    require(len(sources) == 1, f"{' and '.join(sources)} are both given; give one")
    _check_values(distillation, rollouts)
    saves = distillation.logits_save_dir is not None
    # Saving the teacher's logits trains nothing: settings of training and adapters are refused.
    idle = [*given(rollouts, "beta"), *given(distillation, "kd_loss_alpha")] if saves else []
    idle += given(config.lora, "lora_rank") if saves and config.lora is not None else []
    lengths = given(config.training, "train_epochs", "train_iters", "train_samples", "eval_interval", "eval_epochs")
    idle += [*lengths, *given(config.checkpoint, "save")] if saves else []
    require(not idle, f"{', '.join(idle)}: --logits-save-dir trains nothing; leave it out")
    require(
        not distillation.lmbda or config.data.mask_prompt,
        "--no-mask-prompt: with --lmbda the model answers prompts, which are what is not trained; leave it out",
    )
    require(
        not distillation.lmbda or distillation.kd_loss_alpha == 1,
        f"--kd-loss-alpha {distillation.kd_loss_alpha}: the cross-entropy of what the model writes itself teaches "
        "nothing; leave it out, or --lmbda",
    )
    length = config.data.seq_length
    require(
        not distillation.lmbda or length is None or rollouts.max_completion_length < length,
        f"--max-completion-length {rollouts.max_completion_length} leaves no room for prompts in --seq-length "
        f"{length}: change one",
    )
    require(
        not distillation.lmbda or config.data.packing != "best-fit",
        "--packing best-fit: completions that the model writes are not packed; leave it out, or --lmbda",
    )
    return replace(rollouts, beta=BETA if rollouts.beta is None else rollouts.beta)


def _check_values(distillation: DistillationConfig, rollouts: RolloutConfig) -> None:
    beta = rollouts.beta
    require(beta is None or beta <= 1, f"--beta {beta}: distillation takes 0 (forward KL) to 1 (reverse KL)")
    require(distillation.kd_loss_alpha > 0, "--kd-loss-alpha 0: the teacher would have no effect; take --objective sft")
    require(0.01 <= rollouts.temperature <= 100, f"--temperature {rollouts.temperature} must be from 0.01 to 100")
    require(0 < rollouts.top_p <= 1, f"--top-p {rollouts.top_p} must be above 0 and at most 1")


_OF_TEACHER = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def layout_of_teacher(parallel: ParallelConfig, distillation: DistillationConfig) -> ParallelConfig:
    """``parallel`` with the teacher's TP, PP and CP where these are given."""
    asked = {name: getattr(distillation, f"teacher_{name}") for name in _OF_TEACHER}
    changed: dict[str, Any] = {n: size for n, size in asked.items() if size not in (None, getattr(parallel, n))}
    if not changed:
        return parallel
    # Groups of hybrid FSDP and ZeRO++ belong to the run's model. The teacher is sharded over all
    # data-parallel ranks.
    reset = ["hybrid_shard_degree", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"]
    # torch 2.13's compiler takes sizes of groups that differ between two models for numbers that change, and fails.
    reset += ["compile"]
    if (pp := changed.get("pipeline_model_parallel_size")) is not None:
        reset += ["pipeline_model_parallel_layout", "pipeline_reshard"]
        reset += ["data_parallel_sharding_strategy"] if pp > 1 else []
        schedule = ("1f1b", 1) if pp > 1 else (None, None)
        changed |= zip(("pipeline_schedule", "num_virtual_stages_per_pipeline_rank"), schedule, strict=True)
    # Settings of the run that its own degree made valid go back to their defaults.
    if "context_parallel_size" in changed:
        reset += ["cp_comm_type", "hierarchical_context_parallel_sizes"]
    if (tp := changed.get("tensor_model_parallel_size")) is not None:
        reset += ["expert_tensor_parallel_size"]
        without = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
        changed["sequence_parallel"] = tp > 1 and not without
    return replace(parallel, **{name: getattr(ParallelConfig(), name) for name in reset} | changed)


def of_teacher(distillation: DistillationConfig, text: str) -> str:
    """The error ``text`` with the flags that were given for the teacher instead of the run's."""
    for name in _OF_TEACHER:
        if getattr(distillation, f"teacher_{name}") is not None:
            text = text.replace(flag_of(name), flag_of(f"teacher_{name}"))
        elif text.endswith("leave it out") and text.startswith(f"{flag_of(name)} "):
            text += f", or give {flag_of(f'teacher_{name}')} 1"  # the run's may be right for the student
    named = f"--teacher {distillation.teacher}"
    return text if named in text else f"{named}: {text}"
