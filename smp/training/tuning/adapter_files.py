"""Files that a run writes next to its checkpoints: adapters in peft's format, tokenizer, config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError, Manifest, find, read_manifest
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.latest import iteration_name
from smp.checkpoint.tensor_slices import read_region_into
from smp.config import Config, ConfigError, ModelConfig
from smp.config.command_line.commands import tool
from smp.config.command_line.fields import flag_of
from smp.convert.changes import changes_of_files, misfit
from smp.convert.describe import read_architecture
from smp.convert.formats import Opened
from smp.convert.huggingface.config import CONFIG, is_hf_folder, read_hf_config
from smp.convert.huggingface.folder import MODEL_FILES, add_ends, carried, copy_companions, end_ids
from smp.convert.layout import SCORE
from smp.convert.peft.adapters import HEAD, Adapter, Adapters, family_for, is_adapter_folder
from smp.convert.peft.read import read_adapters, read_own_names
from smp.convert.peft.write import write_adapters, write_own_names
from smp.data.tokenizers.files import HuggingFaceTokenizer
from smp.data.tuning.tokenizer import TuningTokenizer
from smp.models.foreign import matrices_of
from smp.training.checkpoints.saved_run import SavedRun

OF_HEADS = ("scalar_head", "untie_embeddings_and_output_weights")
"""Settings in which a reward model differs from the language model that it was made of."""
ADAPTER = "adapter"
"""Folder next to a run's checkpoints with its last adapters, in peft's format."""


def reference_config(config: Config) -> dict[str, Any] | None:
    """config.json of the model in --load, if there is one."""
    load = config.checkpoint.load
    return read_hf_config(load) if load is not None and is_hf_folder(load) else None


def require_adapter(path: Path) -> None:
    """Raise ConfigError when there is no folder at ``path``."""
    if not path.is_dir():
        raise ConfigError(
            f"--adapter {path}: there is no such folder. A run writes the folder adapter when it ends; until then give "
            "the one of its checkpoints"
        )


def read_start(config: Config) -> tuple[Adapters, float]:
    """(adapters of --load-adapter by the name of their layer, their dropout).

    Raises:
        CheckpointError, ConfigError: it cannot be read, or is of another model.
    """
    assert config.lora is not None and config.lora.load_adapter is not None
    folder, model = config.lora.load_adapter, config.model
    if model.transformers_config is not None:
        return read_own_names(folder, matrices_of(model.transformers_config))
    return read_adapters(folder, model, family_for(model, reference_config(config)))


def open_adapters(path: Path, model: Opened) -> Adapters:
    """The adapters in ``path`` by the name of their layer in ``model``: in peft's format, or in checkpoints of a LoRA
    run.

    Raises:
        CheckpointError, ConfigError: there is nothing, or it cannot be read or is of another model.
    """
    config, reference = model.weights.config, model.reference
    if is_adapter_folder(path):
        content = read_hf_config(reference) if reference is not None and is_hf_folder(reference) else None
        return read_adapters(path, config, family_for(config, content))[0]
    folder = open_folder(find(path))
    trained = _require_same_model(folder, config)
    adapters = read_saved_adapters(folder, read_manifest(folder))
    adapters.model = trained
    return adapters


def _require_same_model(folder: Folder, base: ModelConfig) -> ModelConfig | None:
    """The settings of the model that a run trained its adapters with, if the checkpoint has them, on top of ``base``.

    Raises:
        CheckpointError: it was of another architecture: fewer layers of the same shapes would fit as well.
    """
    said = read_architecture(str(folder))
    if said is None:
        return None
    # A head of scores, which replaces any other, comes with the adapters; and fine-tuning leaves layers of
    # multi-token prediction out.
    # Not compared: these two may differ.
    own = {name: getattr(base, name) for name in (*OF_HEADS, "mtp_num_layers")}
    trained = replace(base, **said | own)
    if (name := misfit(trained, base)) is not None:
        raise CheckpointError(
            f"{folder} holds adapters of another model: one with {flag_of(name)} {getattr(trained, name)}, this one "
            f"has {getattr(base, name)}"
        )
    return trained


def read_saved_adapters(folder: Folder, manifest: Manifest) -> Adapters:
    """Adapters in a checkpoint of this project, whole matrices by the name of their layer. In one process.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    scales = SavedRun.of(manifest.extra, folder).adapters
    if not scales:
        raise CheckpointError(f"{folder} holds no adapters")
    out = {}
    for layer, scale in scales.items():
        a, b = (_read(folder, manifest, f"model.{layer}.lora.{part}") for part in ("a", "b"))
        magnitude = f"model.{layer}.lora.magnitude"
        out[layer] = Adapter(a, b, scale, _read(folder, manifest, magnitude) if magnitude in manifest.tensors else None)
    heads = (f"model.{HEAD}", f"model.{SCORE}.weight")  # the second as transformers names it
    head = next((name for name in heads if name in manifest.tensors), None)
    return Adapters(out, None if head is None else _read(folder, manifest, head))


def _read(folder: Folder, manifest: Manifest, name: str) -> torch.Tensor:
    if name not in manifest.tensors:
        raise CheckpointError(f"{folder}: tensor {name} is missing")
    # fp32, as adapters are trained.
    out = torch.empty(manifest.tensors[name].shape)
    read_region_into(folder, manifest, name, (0,) * out.ndim, out)
    return out


def publish_adapter(config: Config, iteration: int) -> list[str]:
    """Write the adapters of the checkpoint of ``iteration`` to ``<save>/adapter``, in peft's format; returns notes for
    the user. On one rank.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the folder not be written.
    """
    assert config.checkpoint.save is not None and config.lora is not None
    root = open_folder(config.checkpoint.save)
    saved, folder = root.child(iteration_name(iteration)), root.child(ADAPTER)
    # Read from the checkpoint and not from the model: it has whole matrices, whatever the layout.
    adapters = read_saved_adapters(saved, read_manifest(saved))
    dropout, base = config.lora.lora_dropout or 0.0, str(config.checkpoint.load)
    try:
        if config.model.is_foreign:
            apart = config.model.reads_apart
            write_own_names(folder, adapters, dropout=dropout, base=base, reads_apart=apart)
            return [f"adapter in peft's format: {folder}"]
        family = family_for(config.model, reference_config(config))
        write_adapters(folder, adapters, config.model, family, dropout=dropout, base=base)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return [f"adapter in peft's format: {folder}", *_unsaid(config, base)]


def _unsaid(config: Config, load: str) -> list[str]:
    """A warning where the base model has other settings than the run: peft's format does not record settings of the
    model."""
    said = read_architecture(load, config.checkpoint.ckpt_step)
    leave = (*OF_HEADS, "mtp_num_layers")
    changed = "" if said is None else changes_of_files(ModelConfig(**said), config.model, leave)
    if not changed:
        return []
    return [
        f"WARNING: that format says nothing of the model, and the one in --load {load} differs from what the adapter "
        f"was trained with: {changed}; checkpoints know it: {tool('merge-lora')} --adapter {config.checkpoint.save}"
    ]


def _source(config: Config) -> Path | None:
    """The folder with the files of the model in --load; None: it has none, or is not on a file system."""
    load = config.checkpoint.load or "auto"
    elsewhere = load == "auto" or "://" in load
    return None if elsewhere else Path(load) if is_hf_folder(load) else carried(Path(load))


def note_on_ends(config: Config, tokenizer: TuningTokenizer, ends: Collection[int]) -> str:
    """A line where texts of training end with tokens at which generation by the model's own files would not stop; else
    empty."""
    new = sorted({*ends} - {*end_ids(_source(config))})
    if not new or config.checkpoint.save is None:
        return ""
    return (
        f"note: texts end with {tokenizer.decode(new)}, at which generation by the model's files does not stop: "
        "generation_config.json of what this run saves names it, too"
    )


def leave_companions(config: Config, ends: Collection[int] = ()) -> None:
    """Copy the model's files (tokenizer, chat template, config.json) next to the checkpoints, as this run uses them: an
    export or another run finds them there. Generation settings name ``ends``, too, as ids that end a text. A tiktoken
    file is left out. On one rank; does nothing unless --save is on a file system. Raises CheckpointError where it
    cannot write."""
    save, given = config.checkpoint.save, config.data.tokenizer_model
    if save is None or (root := open_folder(save).local) is None:
        return
    source = _source(config)
    if source is None and (given is None or config.data.tiktoken_pattern is not None):
        return
    folder = root / MODEL_FILES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None and (source / CONFIG).is_file():
            shutil.copyfile(source / CONFIG, folder / CONFIG)
        if given is None or Path(given).is_dir():
            copy_companions(source if given is None else Path(given), folder)
        elif config.data.tiktoken_pattern is None:
            _leave_tokenizer(Path(given), folder)
        if config.data.chat_template is not None:
            shutil.copyfile(config.data.chat_template, folder / "chat_template.jinja")
        add_ends(folder, ends)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None


def _leave_tokenizer(file: Path, folder: Path) -> None:
    """Copy a tokenizer file under the name that other programs expect, with its settings or minimal ones."""
    with file.open("rb") as head:
        # By its content: people rename such files.
        is_json = head.read(64).lstrip()[:1] == b"{"
    if not is_json:
        shutil.copyfile(file, folder / "tokenizer.model")
        return
    copy_companions(file.parent, folder)
    shutil.copyfile(file, folder / "tokenizer.json")
    settings = folder / "tokenizer_config.json"
    # transformers needs the class and the end token to open it.
    if not settings.is_file():
        end = HuggingFaceTokenizer(file).end_of_document
        settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}, indent=2))


def companions_of(path: Path) -> Path | None:
    """The folder that :func:`leave_companions` wrote next to the adapter, checkpoint or run at ``path``; None: there is
    none."""
    run = path.parent if path.name == ADAPTER else path
    return carried(run)
