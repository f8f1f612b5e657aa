"""From a command line to checked settings, before torch is imported or anything is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.format.entries import CheckpointError
from smp.config import Config, ConfigError, Layout, LoggingConfig, check_files, load_config, resolve
from smp.config.command_line.cli import FROM_MEGATRON
from smp.config.command_line.credentials import without_credentials
from smp.config.command_line.fields import flag_of, given, require
from smp.config.megatron.translate import translate
from smp.config.rules.elastic import as_members
from smp.config.rules.foreign import require_implementation
from smp.convert.changes import misfit
from smp.convert.describe import described_model, of_model_config, read_architecture
from smp.convert.huggingface.config import is_hf_folder
from smp.data.tokenizers.files import load_tokenizer
from smp.pipeline.stage_plan import plans_by_size
from smp.training.checkpoints.origin import Origin, has_begun
from smp.training.inprocess.link import has_keeper


def read_settings(argv: list[str], presets: Mapping[str, Mapping[str, Any]], world_size: int) -> Config:
    """Parse, fill in defaults and check all that can be checked without a process group, or raise ConfigError."""
    config = load_config(argv, presets, _described)
    check_files(config, load_is_past=_is_past(config))
    require_implementation(config)
    config, world_size = as_members(_with_vocabulary(config), world_size)
    config = resolve(config, world_size)
    _check_architecture(config)
    require(not config.model.scalar_head, f"--load {config.checkpoint.load} is a reward model: finetune.py trains it")
    check_documents(config)
    layout = Layout.from_config(config.parallel, world_size)
    if layout.pp > 1:
        # Only to be refused here: a layout that does not fit should not cost the start of a thousand processes.
        plans_by_size(config, layout)
    return config


def check_documents(config: Config) -> None:
    """Refuse documents in one sequence where transformers' module cannot keep them apart, before anything is read.

    Raises:
        ConfigError: it cannot, with the reason.
    """
    if config.model.is_foreign and config.data.reset_attention_mask:
        # By its name: it imports torch, which settings of other models do not need.
        import_module("smp.hf.run.documents").require_documents_apart(config.model)


def in_own_flags(argv: list[str], world_size: int, rank: int) -> list[str]:
    """``argv``, or with --from-megatron its translation to this project's flags; rank 0 prints notes on it to stderr,
    so that stdout of --dry-run stays a recipe.

    Raises:
        ConfigError: it asks for what does not exist.
    """
    if FROM_MEGATRON not in argv or {"--help", "-h"} & set(argv):
        return argv
    translation = translate(argv, world_size)
    if rank == 0 and not has_keeper():
        print(without_credentials("\n".join(translation.notes)), file=sys.stderr, flush=True)
    return translation.argv


def _described(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of the model of --model-config, else of the one in --load; where that is gone, those that a run
    which began from it has saved."""
    implementation = values.get("model_implementation", "auto")
    if (path := values.get("model_config")) is not None:
        return of_model_config(path, implementation)
    load, save = values["load"], values.get("save")
    if save is not None and "://" not in load and not Path(load).exists():
        return read_architecture(save)
    return read_architecture(load, values.get("ckpt_step"), implementation)


def _is_past(config: Config) -> bool:
    """Whether --load is gone and not needed: a run that began from it continues from its own checkpoints."""
    load, save = config.checkpoint.load, config.checkpoint.save
    origin = Origin.asked(config)
    if origin is None or load is None or save is None or "://" in load or Path(load).exists():
        return False
    try:
        return has_begun(open_folder(save), origin, {}) is not None
    except (CheckpointError, OSError):
        return False  # the run says what is wrong with --save


def _check_architecture(config: Config) -> None:
    """Raise ConfigError for flags under which the weights of a Hugging Face folder do not fit."""
    load = config.checkpoint.load
    if load is None or not is_hf_folder(load):
        return
    std = given(config.model, "init_method_std")
    # By its being given, not by its value: the default says nothing.
    require(not std, f"{''.join(std)} has no effect with --load {load}, whose weights are all read; leave it out")
    # Layers of multi-token prediction are read if they are asked for.
    described = described_model(load, config.model.model_implementation)
    found = replace(described, mtp_num_layers=config.model.mtp_num_layers)
    if (name := misfit(found, config.model)) is not None:
        now = getattr(config.model, name)
        raise ConfigError(f"--load {load} is a model with {flag_of(name)} {getattr(found, name)}, this run has {now}")


def _with_vocabulary(config: Config) -> Config:
    """Take the vocabulary size from the tokenizer, or check that the model's holds it."""
    path, size = config.data.tokenizer_model, config.model.vocab_size
    if path is None:
        return config
    try:
        known = load_tokenizer(path, config.data.tiktoken_pattern).vocab_size
    except ValueError as error:
        raise ConfigError(f"--tokenizer-model {error}") from None
    if size is not None and known > size:
        raise ConfigError(
            f"--tokenizer-model {path} has {known} token ids but the model's vocabulary holds {size}: "
            f"give --vocab-size {known}"
        )
    return replace(config, model=replace(config.model, vocab_size=size or known))


def status_file_in(argv: list[str], log_dir: str = LoggingConfig.log_dir) -> str | None:
    """Where a run that cannot start reports it, found without parsing: the other flags may be wrong.

    That is the value of --status-file, or the default place (in ``log_dir`` unless --log-dir is given) if an earlier
    run left word there, which would be taken for this one's.
    """
    found = {}
    for i, word in enumerate(argv):
        for flag in ("--status-file", "--log-dir"):
            if word.startswith(flag + "="):
                found[flag] = word.partition("=")[2]
            elif word == flag and i + 1 < len(argv):
                found[flag] = argv[i + 1]
    default = Path(found.get("--log-dir", log_dir)) / "status.json"
    return found.get("--status-file", str(default) if default.exists() else None)


def report(message: str, rank: int) -> None:
    """Print on stderr why this process ends, before it has met the others: on rank 0 at once, on another only if it is
    still running 10 s later.

    What all ranks found out alike is said once: rank 0 speaks and ends, and torchrun stops the rest, which takes
    seconds on a busy machine. What another rank alone saw it says itself.
    """
    if rank == 0:
        print(f"error: {without_credentials(message)}", file=sys.stderr, flush=True)
        return
    # If all found the same, rank 0 has said it, and the launcher ends this process before this is over.
    time.sleep(10)
    report_own(message, rank)


def report_own(message: str, rank: int) -> None:
    """Print at once what this rank alone found: others found something else, and rank 0 may be gone."""
    print(f"error: rank {rank}: {without_credentials(message)}", file=sys.stderr, flush=True)
