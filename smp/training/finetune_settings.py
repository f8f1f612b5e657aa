"""From the command line of a fine-tuning run to checked settings and training data, before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from smp.config import Config, ConfigError, Layout, resolve
from smp.config.cli import build_tree, read_values
from smp.config.entry_points import FINETUNE
from smp.config.fields import flag_of
from smp.config.finetune import fill_in
from smp.config.resolve import refuse_megatron
from smp.convert.describe import read_architecture
from smp.convert.hf_config import FREE, family_of, is_hf_folder, read_hf_config
from smp.data.tuning.build import TuningData, read_data
from smp.data.tuning.tokenizer import TuningTokenizer, open_tokenizer
from smp.pipeline.plan import plan_pipeline

CARRIED, BESIDE = "hf", "model_files"
"""Folder inside of our converted checkpoints, and beside those of a fine-tuning run, with the model's tokenizer."""


def read_finetune_settings(
    argv: list[str], world_size: int, before_data: Callable[[Config], None] = lambda config: None
) -> tuple[Config, TuningData | None]:
    """Parse, fill in defaults, check, and read the data, or raise ConfigError; there are no data in a dry run without
    --data-path. ``before_data`` may also refuse a run that is to train: to read the data may take minutes."""
    values = read_values(argv, FINETUNE, "The architecture is that of the model in --load.")
    if "model" in values:
        raise ConfigError(f"--model {values['model']}: the architecture is that of the model in --load; leave it out")
    config = fill_in(build_tree(FINETUNE, values))
    config = _with_architecture(config, set(values))
    config = _sized(config, world_size)
    tokenizer = _tokenizer(config)
    # Neither of them writes anything.
    if not config.training.dry_run and not config.data.preview:
        before_data(config)
    data = None if config.data.data_path is None else read_data(config, tokenizer)
    if config.training.train_epochs is not None and data is not None:
        samples = config.training.train_epochs * data.samples_per_epoch
        config = replace(config, training=replace(config.training, train_samples=samples))
    if config.data.preview:
        return config, data
    # Only now: the number of steps may follow from the number of samples.
    config = resolve(config, world_size)
    layout = Layout.from_config(config.parallel, world_size)
    if layout.pp > 1:
        plan_pipeline(config, layout)
    if data is not None:
        data = replace(data, lines=(*data.lines, *_repeats(config, data)))
    return config, data


def _repeats(config: Config, data: TuningData) -> list[str]:
    """Whether the last step of --train-epochs reaches into another epoch: steps are whole."""
    epochs, steps, batch = config.training.train_epochs, config.training.train_iters, config.data.global_batch_size
    if epochs is None:
        return []
    assert steps is not None and batch is not None, "resolved before"
    wanted = epochs * data.samples_per_epoch
    more, kind = steps * batch - wanted, "pairs" if data.pairs else "sequences"
    if not more:
        return []
    return [
        f"note: --train-epochs {epochs} are {wanted} {kind}, but {steps} steps of {batch} read {steps * batch}: "
        f"the last step reads {more} of them again"
    ]


def _sized(config: Config, world_size: int) -> Config:
    """With the defaults that do not depend on how long the run is: that may follow from the data."""
    # A dry run needs no number of steps.
    any_length = replace(config.training, dry_run=True)
    sized = resolve(replace(config, training=any_length), world_size)
    return replace(sized, optim=config.optim, training=config.training)


def _with_architecture(config: Config, given: set[str]) -> Config:
    """The model as the folder describes it. What was given beside may only be what does not change it."""
    load = config.checkpoint.load
    assert load is not None, "checked before"
    if "://" not in load and not Path(load).is_dir():
        hub = f"; of a model on the hub: --load hub:{load}" if load.count("/") == 1 and load[0] not in "./~" else ""
        raise ConfigError(f"--load {load}: there is no such folder{hub}")
    refuse_megatron(load, "--load FOLDER")
    found = read_architecture(load)
    if found is None:
        raise ConfigError(f"--load {load} holds neither a Hugging Face model nor a checkpoint of a training run")
    found["mtp_num_layers"] = None  # they are not fine-tuned; who opens the weights says so
    if config.has_scores:
        family = family_of(read_hf_config(load), load) if is_hf_folder(load) else None
        if family is not None and family.classifier is None:
            raise ConfigError(
                f"--objective reward: {family.architecture} has no ...ForSequenceClassification to be saved as"
            )
        found |= {"scalar_head": True, "untie_embeddings_and_output_weights": True}
    elif found["scalar_head"]:
        raise ConfigError(f"--load {load} is a reward model, without an output matrix: give --objective reward")
    for field in dataclasses.fields(config.model):
        name, value = field.name, getattr(config.model, field.name)
        if name in given and name not in FREE and value != found.get(name, value):
            flag = flag_of(name)
            raise ConfigError(f"--load {load} is a model with {flag} {found[name]}, not {value}; leave {flag} out")
    return replace(config, model=replace(config.model, **found))


def _tokenizer(config: Config) -> TuningTokenizer:
    """Of --tokenizer-model, or what came with the model."""
    given, load = config.data.tokenizer_model, Path(config.checkpoint.load or "")
    try:
        if given is not None:
            return open_tokenizer(given)
        # A Hugging Face folder, a converted checkpoint, a run's folder, its newest checkpoint, one of its checkpoints.
        for folder in (load, load / CARRIED, load / BESIDE, *_newest(load), load.parent / BESIDE):
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
                return open_tokenizer(folder)
    except ValueError as error:
        raise ConfigError(f"--tokenizer-model: {error}") from None
    raise ConfigError(f"there is no tokenizer in --load {load}: give --tokenizer-model")


def _newest(load: Path) -> list[Path]:
    """What came with the newest checkpoint of a run's folder."""
    latest = load / "latest"
    return [load / latest.read_text(encoding="utf-8").strip() / CARRIED] if latest.is_file() else []
