"""Checks and defaults of fine-tuning runs, in addition to those shared with pretraining."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from smp.config.command_line.entry_points import FINETUNE
from smp.config.command_line.fields import flag_of, given, require, settings
from smp.config.objectives import ObjectiveConfig
from smp.config.rules.checks import check_effects, check_paths, check_ranges
from smp.config.rules.distilled import fill_distillation
from smp.config.rules.online import fill_rollouts
from smp.config.schema import Config, DataConfig, LoraConfig

ALL = "all-linear"
"""peft's word for all linear layers in --lora-target-modules."""
ALL_LINEAR = "query,key,value,output,gate,up,down,query_down,query_up,key_value_down,key_value_up,beta,decay,step"
ALL_LINEAR += ",decay_down,decay_up,gate_down,gate_up"
"""Every linear layer of any model except experts; names with _down and _up belong to latent attention and Kimi delta
attention."""


def fill_in(config: Config, typed: Collection[str] = ()) -> Config:
    """A copy of ``config`` with the defaults that follow from other settings; ``typed``: flags of the command line.

    Raises:
        ConfigError: settings that cannot work; one line that names the flag to change.
    """
    lora, objective = config.lora, config.objective
    assert lora is not None and objective is not None, "settings of a fine-tuning run"
    check_ranges(config)
    _check_source(config, typed)
    _check_lora(lora)
    require(
        config.optim.decoupled_lr is None or not config.has_adapters,
        "--decoupled-lr: the embedding and the output matrix are frozen with adapters; leave it out",
    )
    _check_objective(config, objective)
    facts = config.objective_facts
    config = replace(config, rollouts=fill_rollouts(config))
    config = replace(config, rollouts=fill_distillation(config))
    if config.has_reference:
        # With adapters the frozen weights are the reference already, so no copy is needed.
        reference = objective.dpo_reference or ("adapters-off" if config.has_adapters else "copy")
        objective = replace(objective, dpo_reference=reference)
    return replace(
        config, lora=_filled(lora), objective=objective, data=_laid_out(config.data, facts.of_answers or config.writes)
    )


def _filled(lora: LoraConfig) -> LoraConfig:
    if lora.lora_rank is None:
        return lora
    return replace(
        lora,
        # The scale alpha / rank is 2 for every rank.
        lora_alpha=lora.lora_alpha or 2.0 * lora.lora_rank,
        lora_target_modules=",".join(_named(target) for target in (lora.lora_target_modules or ALL).split(",")),
        lora_dropout=lora.lora_dropout or 0.0,
    )


def _named(target: str) -> str:
    return ALL_LINEAR if target.strip() == ALL else target.strip()


def _laid_out(data: DataConfig, alone: bool) -> DataConfig:
    """Whether samples share sequences; those that do must not see each other."""
    # Pairs and completions are compared as wholes, one per sequence.
    packing = data.packing or ("off" if alone else "best-fit")
    packed = packing == "best-fit"
    return replace(data, packing=packing, reset_attention_mask=packed, reset_position_ids=packed)


def _check_source(config: Config, typed: Collection[str]) -> None:
    data, training, checkpoint = config.data, config.training, config.checkpoint
    check_paths(checkpoint.load, checkpoint.save)
    require(checkpoint.load is not None, "what to fine-tune is missing: give --load, the folder of a model")
    require(data.data_path is not None or training.dry_run, "what to train on is missing: give --data-path")
    require(not checkpoint.resume or checkpoint.save is not None, "--resume continues from --save: give --save")
    lengths = [flag_of(n) for n in ("train_epochs", "train_iters", "train_samples") if getattr(training, n) is not None]
    require(len(lengths) < 2, f"{' and '.join(lengths)} are both given; give one")
    saves = config.distillation is not None and config.distillation.logits_save_dir is not None
    require(
        bool(lengths) or training.dry_run or data.preview > 0 or saves,
        "how long to train is missing: give --train-epochs, --train-iters or --train-samples",
    )
    _check_parts(config, typed, evaluates=saves or training.evaluates)
    # Two of a kind would answer one question twice.
    for alternatives in (
        given(training, "eval_interval", "eval_epochs"),
        given(training, "eval_iters", "full_validation"),
        given(checkpoint, "save_interval", "save_epochs", "save_mtbf_hours"),
    ):
        require(len(alternatives) < 2, f"{' and '.join(alternatives)} are both given; give one")


def _check_parts(config: Config, typed: Collection[str], *, evaluates: bool) -> None:
    """Check the training and validation parts; ``evaluates``: the latter is read."""
    data = config.data
    if data.valid_data_path is None:
        return
    flag = f"--valid-data-path {data.valid_data_path}"
    require(data.data_path is not None, f"{flag} needs --data-path")
    require(evaluates, f"{flag} is read where --eval-interval or --eval-epochs says when; give one, or leave it out")
    # A file of --config may be a dry run's, which has all defaults.
    divides = "--split" in typed or data.split != settings(FINETUNE)["split"].default
    require(not divides, f"--split {data.split} divides --data-path, and validation is {flag}; leave one out")


def _check_lora(lora: LoraConfig) -> None:
    brought = given(lora, "lora_rank", "lora_alpha", "lora_target_modules", "use_dora")
    if lora.load_adapter is not None:
        require(not brought, f"{', '.join(brought)}: --load-adapter {lora.load_adapter} brings it; leave it out")
    elif lora.lora_rank is None:
        alone = brought + given(lora, "lora_dropout", "load_in_4bit")
        require(not alone, f"{', '.join(alone)}: there are no adapters; give --lora-rank or --load-adapter")
    require(
        not (lora.use_dora and lora.lora_dropout),
        f"--use-dora and --lora-dropout {lora.lora_dropout} exclude each other: dropout would be on the input of the "
        "frozen weight too, which is computed once; leave one out",
    )


def _check_objective(config: Config, objective: ObjectiveConfig) -> None:
    check_effects(config, "objective", "rollouts", "distillation", "lora")
    data, name, facts = config.data, objective.objective, config.objective_facts
    if not facts.of_answers:
        return
    require(
        not (facts.has_scores and config.lora is not None and config.lora.load_adapter is not None),
        f"--objective {name} starts adapters together with the score head: give --lora-rank, and merge what "
        "--load-adapter names into --load before (tools/merge_lora.py); --resume goes on with both",
    )
    # A loss over pairs divides by pairs, not by tokens, so each answer has a row of its own.
    require(data.packing != "best-fit", f"--packing best-fit: --objective {name} does not pack answers; leave it out")
    require(
        not (config.is_online and data.truncation_side != "right"),
        f"--truncation-side {data.truncation_side} has no effect with --objective {name}, which does not cut prompts; "
        "leave it out",
    )
    require(data.mask_prompt, f"--no-mask-prompt: --objective {name} compares answers only; leave it out")
    require(
        objective.dpo_reference != "adapters-off" or config.has_adapters,
        "--dpo-reference adapters-off: there are no adapters to switch off; give --lora-rank, or take copy",
    )
    require(
        not (facts.mismatched and objective.dpo_reference == "precomputed"),
        f"--dpo-reference precomputed: --objective {name} also compares answers of other samples, which differ in "
        "every epoch; take adapters-off or copy",
    )
    require(
        not (config.is_online and objective.dpo_reference == "precomputed"),
        f"--dpo-reference precomputed: --objective {name} compares texts that the model writes, which are not known "
        "before; take adapters-off or copy",
    )
    require(
        not config.is_online or objective.dpo_reference is None or config.has_reference,
        f"--dpo-reference {objective.dpo_reference} has no effect without --beta; leave it out",
    )


def targets_of(config: Config) -> list[str]:
    """Patterns of --lora-target-modules."""
    lora = config.lora
    assert lora is not None and lora.lora_target_modules is not None, "filled in before"
    if config.model.is_foreign and lora.lora_target_modules == ALL_LINEAR:  # under names of its own
        return ["*"]
    return lora.lora_target_modules.split(",")
