"""From the command line of a fine-tuning run to checked settings and training data, before torch is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp.config import Config, ConfigError, Layout, ModelConfig, resolve
from smp.config.command_line.cli import build_tree, read_values
from smp.config.command_line.entry_points import FINETUNE
from smp.config.command_line.fields import flag_of
from smp.config.command_line.hub import hub_hint
from smp.config.distillation import DistillationConfig
from smp.config.layers import effective
from smp.config.objectives import ObjectiveConfig
from smp.config.parallel import ParallelConfig
from smp.config.resolve import refuse_megatron, resolve_model
from smp.config.rollouts import RolloutConfig
from smp.config.rules.checks import check_combinations
from smp.config.rules.distilled import layout_of_teacher, of_teacher
from smp.config.rules.elastic import as_members
from smp.config.rules.finetune import fill_in
from smp.config.rules.foreign import refuse_architecture, require_implementation
from smp.config.rules.online import check_generation
from smp.config.schema import LoraConfig
from smp.convert.changes import misfit
from smp.convert.describe import read_architecture
from smp.convert.huggingface.config import family_of, is_hf_folder, read_hf_config
from smp.convert.huggingface.foreign import require_classifier
from smp.data.tokenizers.files import no_tokenizer
from smp.data.tuning.build import PromptData, TuningData, read_data
from smp.data.tuning.tokenizer import TuningTokenizer, open_tokenizer
from smp.pipeline.stage_plan import plan_pipeline
from smp.training.distillation.meaning import check_stored
from smp.training.settings import check_documents

CARRIED, MODEL_FILES = "hf", "model_files"
"""Names of the folder with the model's files: inside of a converted checkpoint, and next to the checkpoints of a
fine-tuning run."""


def read_finetune_settings(
    argv: list[str], world_size: int, before_data: Callable[[Config], None] = lambda config: None
) -> tuple[Config, TuningData | PromptData | None]:
    """Parse, fill in defaults, check, and read the data, or raise ConfigError; there are no data in a dry run without
    --data-path. ``before_data`` may also refuse a run that is to train: to read the data may take minutes."""
    values = read_values(argv, FINETUNE, "The architecture is that of the model in --load.")
    if "model" in values:
        raise ConfigError(f"--model {values['model']}: the architecture is that of the model in --load; leave it out")
    config = fill_in(build_tree(FINETUNE, values), {word.partition("=")[0] for word in argv})
    # The folder's architecture, under flags that were given explicitly.
    config, found = _with_architecture(config, set(values))
    # Elastic runs: degrees may change with the number of nodes.
    config, world_size = as_members(config, world_size)
    config = _sized(config, world_size)
    _check_fit(config.model, found, values["load"])
    check_generation(config, world_size)
    if config.is_online and config.rollouts is not None and config.rollouts.reward_model is not None:
        reward_model_config(config, world_size)
    if config.distillation is not None and config.distillation.teacher is not None:
        teacher_config(config, world_size)
    # Before the data: a missing tokenizer is found in a moment.
    check_documents(config)
    tokenizer = tokenizer_of(config)
    # Neither of them writes anything.
    if not config.training.dry_run and not config.data.preview:
        before_data(config)
    data = None if config.data.data_path is None else read_data(config, tokenizer)
    if config.training.train_epochs is not None and data is not None:
        samples = math.ceil(config.training.train_epochs * data.samples_per_epoch)
        config = replace(config, training=replace(config.training, train_samples=samples))
    config = _distilled(config, data, "temperature" in values)
    if config.data.preview:
        return config, data
    # Only now: the number of steps may follow from the number of samples.
    saves = config.distillation is not None and config.distillation.logits_save_dir is not None
    config = _sized(config, world_size) if saves else resolve(config, world_size)  # it has no optimizer steps to count
    layout = Layout.from_config(config.parallel, world_size)
    if layout.pp > 1:
        plan_pipeline(config, layout)
    if data is not None:
        config = _with_intervals(config, data)
        data = replace(data, lines=(*data.lines, *_repeats(config, data), *_evaluated(config, data)))
    return config, data


def _distilled(config: Config, data: TuningData | PromptData | None, given: bool) -> Config:
    """The settings with the temperature of a stored teacher; ``given``: whether --temperature is on the command
    line."""
    distillation, rollouts = config.distillation, config.rollouts
    if distillation is None or rollouts is None:
        return config
    if distillation.logits_load_dir is None or not isinstance(data, TuningData):
        return config
    path = distillation.logits_load_dir
    temperature = check_stored(path, data.samples).temperature
    if given and rollouts.temperature != temperature:
        raise ConfigError(
            f"--temperature {rollouts.temperature}: --logits-load-dir {path} is of temperature {temperature}; leave it "
            "out"
        )
    return replace(config, rollouts=replace(rollouts, temperature=temperature))


def uncounted(config: Config) -> list[str]:
    """Lines on what the memory that --dry-run prints leaves out."""
    reward = None if config.rollouts is None else config.rollouts.reward_model
    teacher = None if config.distillation is None else config.distillation.teacher
    others = {"--reward-model": reward, "--teacher": teacher}
    return [f"not counted in this memory: the weights of {flag} {folder}" for flag, folder in others.items() if folder]


def _repeats(config: Config, data: TuningData | PromptData) -> list[str]:
    """A note where the last step of --train-epochs reads into another epoch, as steps are whole."""
    epochs, steps, batch = config.training.train_epochs, config.training.train_iters, config.data.global_batch_size
    if epochs is None or config.checkpoint.resume:  # what is left is known with the checkpoint
        return []
    assert steps is not None and batch is not None, "resolved before"
    wanted = math.ceil(epochs * data.samples_per_epoch)
    kind = "completions" if isinstance(data, PromptData) else "pairs" if data.pairs else "sequences"
    more = steps * batch - wanted
    if not more:
        return []
    return [
        f"note: --train-epochs {epochs:g} are {wanted} {kind}, but {steps} steps of {batch} read {steps * batch}: "
        f"the last step reads {more} of them again"
    ]


def _with_intervals(config: Config, data: TuningData | PromptData) -> Config:
    """The settings with --eval-epochs and --save-epochs as iterations, and --full-validation as batches."""
    training, checkpoint, batch = config.training, config.checkpoint, config.data.global_batch_size
    assert batch is not None, "resolved before"

    def iterations(epochs: float) -> int:
        # At least 1: a small share of a small epoch rounds to 0.
        return max(1, round(epochs * data.samples_per_epoch / batch))

    if training.eval_epochs is not None:
        training = replace(training, eval_interval=iterations(training.eval_epochs))
    if training.full_validation:
        training = replace(training, eval_iters=math.ceil(_validation_samples(config, data) / batch))
    if checkpoint.save_epochs is not None:
        checkpoint = replace(checkpoint, save_interval=iterations(checkpoint.save_epochs))
    return replace(config, training=training, checkpoint=checkpoint)


def _validation_samples(config: Config, data: TuningData | PromptData) -> int:
    """Samples of the validation data as a batch counts them: sequences, pairs or completions."""
    if isinstance(data, TuningData):
        return len(data.valid) // (2 if data.pairs else 1)
    assert config.rollouts is not None and config.rollouts.num_generations_eval is not None, "filled in before"
    return len(data.valid) * config.rollouts.num_generations_eval


def _evaluated(config: Config, data: TuningData | PromptData) -> list[str]:
    """Notes on when a run of epochs evaluates and saves, and on validation data that --eval-iters leaves out."""
    training, checkpoint, batch = config.training, config.checkpoint, config.data.global_batch_size
    lines = [
        f"{flag} {epochs:g}: every {interval} iterations"
        for flag, epochs, interval in (
            ("--eval-epochs", training.eval_epochs, training.eval_interval),
            ("--save-epochs", checkpoint.save_epochs, checkpoint.save_interval),
        )
        if epochs is not None
    ]
    assert batch is not None, "resolved before"
    there, read = _validation_samples(config, data), training.eval_iters * batch
    if training.eval_interval is not None and read < there:
        kind = "completions" if isinstance(data, PromptData) else "pairs" if data.pairs else "sequences"
        lines.append(
            f"note: --eval-iters {training.eval_iters} of {batch} read {read:,} of {there:,} validation {kind}; "
            "--full-validation reads all"
        )
    return lines


def _sized(config: Config, world_size: int) -> Config:
    """The settings with all defaults that do not depend on the length of the run, which may follow from the data."""
    # A dry run needs no number of steps.
    any_length = replace(config.training, dry_run=True)
    sized = resolve(replace(config, training=any_length), world_size)
    # Schedules stay unresolved: they are functions of the length.
    return replace(sized, optim=config.optim, training=config.training)


def _with_architecture(config: Config, given: set[str]) -> tuple[Config, ModelConfig]:
    """(the settings with the model of the folder and the flags that were ``given``, the model of the folder alone)."""
    load = config.checkpoint.load
    assert load is not None, "checked before"
    if "://" not in load and not Path(load).is_dir():
        raise ConfigError(f"--load {load}: there is no such folder{hub_hint(load, '--load')}")
    refuse_megatron(load, "--load FOLDER")
    found = read_architecture(load, config.checkpoint.ckpt_step, config.model.model_implementation)
    if found is None:
        raise ConfigError(f"--load {load} holds neither a Hugging Face model nor a checkpoint of a training run")
    if found["transformers_config"] is not None:
        refuse_architecture({name: getattr(config.model, name, None) for name in given}, found)
        if found["scalar_head"] and not config.objective_facts.has_scores:
            raise _no_output_matrix(load)
        if config.objective_facts.has_scores:
            found |= _WITH_SCORES
        model = replace(config.model, **found)
        if model.scalar_head:
            require_classifier(model)
        require_implementation(replace(config, model=model))
        return replace(config, model=model), model
    found["mtp_num_layers"] = None  # they are not fine-tuned; who opens the weights says so
    if config.objective_facts.has_scores:
        family = family_of(read_hf_config(load), load) if is_hf_folder(load) else None
        if family is not None and family.classifier is None:
            raise ConfigError(
                f"--objective reward: {family.architecture} has no ...ForSequenceClassification to be saved as"
            )
        found |= _WITH_SCORES
    elif found["scalar_head"]:
        raise _no_output_matrix(load)
    # Flags of the architecture that were typed win over the folder; ``_check_fit`` compares shapes.
    asked = {name: getattr(config.model, name) for name in found if name in given}
    # What a given setting leaves without an effect goes, unless it was given as well.
    model = effective(replace(config.model, **{**found, **asked}), keep=given)
    return replace(config, model=model), resolve_model(replace(config.model, **found))


_WITH_SCORES = {"scalar_head": True, "untie_embeddings_and_output_weights": True}


def _no_output_matrix(load: str) -> ConfigError:
    return ConfigError(f"--load {load} is a reward model, without an output matrix: give --objective reward")


def reward_model_config(config: Config, world_size: int) -> Config:
    """Settings of the frozen model of --reward-model, in addition to those of the run in its layout.

    Raises:
        ConfigError: it is no reward model, or does not fit the layout.
    """
    assert config.rollouts is not None and config.rollouts.reward_model is not None
    folder = config.rollouts.reward_model
    if not Path(folder).is_dir():
        raise ConfigError(f"--reward-model {folder}: there is no such folder")
    found = read_architecture(folder)
    if found is None or not found["scalar_head"]:
        raise ConfigError(
            f"--reward-model {folder} is no reward model, which gives one score: --objective reward trains one"
        )
    # Longer if the model can: its tokens may be more than the policy's.
    longest = (config.data.seq_length or 1) + _more_columns(config)
    return _frozen(config, folder, "--reward-model", found, world_size, "reward", longest)


def _more_columns(config: Config) -> int:
    """Extra columns of a reward model's texts above --seq-length, which a truncated completion needs for an end token;
    a number that every layout can divide."""
    return 2 * config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size


def teacher_config(config: Config, world_size: int) -> Config:
    """Settings of the frozen model of --teacher, in addition to those of the run in its layout.

    Raises:
        ConfigError: it is no language model, has another tokenizer, or does not fit the layout.
    """
    assert config.distillation is not None and config.distillation.teacher is not None
    folder = config.distillation.teacher
    if not Path(folder).is_dir():
        raise ConfigError(f"--teacher {folder}: there is no such folder")
    found = read_architecture(folder)
    if found is None:
        raise ConfigError(f"--teacher {folder} holds neither a Hugging Face model nor a checkpoint of a training run")
    if found["scalar_head"]:
        raise ConfigError(f"--teacher {folder} is a reward model, without an output matrix")
    if replace(ModelConfig(), **found).reads_apart:
        raise ConfigError(f"--teacher {folder} is an encoder with a decoder, which read a prompt and its answer apart")
    distillation, config = config.distillation, replace(config, parallel=_of_teacher(config, found["num_experts"]))
    try:
        made = _frozen(config, folder, "--teacher", found, world_size, "sft", config.data.seq_length or 1)
        if (layout := Layout.from_config(made.parallel, world_size)).pp > 1:
            plan_pipeline(made, layout)
    except ConfigError as error:
        raise ConfigError(of_teacher(distillation, str(error))) from None
    own, other = tokenizer_of(config).vocabulary(), tokenizer_of(made, "--teacher").vocabulary()
    # By text and id: equal sizes are not enough.
    apart = next((text for text in own.keys() | other.keys() if own.get(text) != other.get(text)), None)
    if apart is not None:
        raise ConfigError(
            f"--teacher {folder} has another tokenizer: the token {apart!r} is {other.get(apart)} there and "
            f"{own.get(apart)} here; a teacher needs the same token ids"
        )
    return made


def _of_teacher(config: Config, experts: int | None) -> ParallelConfig:
    """The layout of a teacher with ``experts`` experts, whose expert parallelism is its own; all else is as in the run,
    unless a setting says otherwise."""
    assert config.distillation is not None
    ranks = config.distillation.teacher_expert_model_parallel_size
    parallel = layout_of_teacher(config.parallel, config.distillation)
    if ranks is not None and experts is None:
        raise ConfigError(
            f"--teacher-expert-model-parallel-size {ranks}: --teacher {config.distillation.teacher} has no experts; "
            "leave it out"
        )
    if ranks is None and experts is not None and config.model.num_experts is not None:
        return parallel
    # A teacher without experts has no expert parallelism; a student without experts has no setting
    # for it.
    etp = None if experts is None else parallel.expert_tensor_parallel_size
    return replace(parallel, expert_model_parallel_size=ranks or 1, expert_tensor_parallel_size=etp)


def _frozen(
    config: Config, folder: str, flag: str, found: dict[str, Any], world_size: int, objective: str, longest: int
) -> Config:
    """Settings of a second model, which is frozen."""
    # The model of the run's flags is another one: defaults, and the folder's values.
    model = resolve_model(replace(ModelConfig(), **found | {"mtp_num_layers": None}))
    length, most = config.data.seq_length or 1, model.max_position_embeddings
    if most < length:
        raise ConfigError(f"{flag} {folder} reads {most} tokens, --seq-length is {length}")
    own = replace(
        config,
        model=model,
        lora=LoraConfig(),
        objective=ObjectiveConfig(objective=objective),
        rollouts=RolloutConfig(),
        distillation=DistillationConfig(),
        data=replace(
            config.data,
            tokenizer_model=None,
            chat_template=None,
            seq_length=longest if longest <= most else length,
            mask_prompt=True,
        ),
        checkpoint=replace(config.checkpoint, load=folder, ckpt_step=None, resume=False),
    )
    check_combinations(own, Layout.from_config(own.parallel, world_size))
    return own


def _check_fit(model: ModelConfig, found: ModelConfig, load: str) -> None:
    """Raise ConfigError for flags under which the weights in --load, those of ``found``, do not fit."""
    if (name := misfit(found, model)) is not None:
        flag, now = flag_of(name), getattr(model, name)
        raise ConfigError(f"--load {load} is a model with {flag} {getattr(found, name)}, not {now}; leave {flag} out")


def tokenizer_of(config: Config, flag: str = "--load") -> TuningTokenizer:
    """The tokenizer of --tokenizer-model, or the one that came with the model, which ``flag`` names."""
    given, load = config.data.tokenizer_model, Path(config.checkpoint.load or "")
    try:
        if given is not None:
            return open_tokenizer(given)
        # A Hugging Face folder, a converted checkpoint, a run's folder, its newest checkpoint, one of its checkpoints.
        for folder in (load, load / CARRIED, load / MODEL_FILES, *_newest(load), load.parent / MODEL_FILES):
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
                return open_tokenizer(folder)
    except ValueError as error:
        raise ConfigError(f"--tokenizer-model: {error}") from None
    raise ConfigError(f"{flag} {no_tokenizer(load)}")


def _newest(load: Path) -> list[Path]:
    """Folders of the model's files in the newest checkpoint of a run's folder."""
    latest = load / "latest"
    return [load / latest.read_text(encoding="utf-8").strip() / CARRIED] if latest.is_file() else []
