"""What a fine-tuning run leaves beside its checkpoints: adapters in peft's format, and what goes with the model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError, Manifest, find, read_manifest
from smp.checkpoint.box import read_box_into
from smp.checkpoint.folder import Folder, open_folder
from smp.checkpoint.latest import iteration_name
from smp.config import Config, ConfigError
from smp.convert.adapters import Adapter, family_for, is_adapter_folder
from smp.convert.formats import Opened
from smp.convert.hf import BESIDE, carried, copy_companions
from smp.convert.hf_config import CONFIG, is_hf_folder, read_hf_config
from smp.convert.peft_read import read_adapters
from smp.convert.peft_write import write_adapters
from smp.training.saved_run import SavedRun

ADAPTER = "adapter"
"""Folder beside the checkpoints of a run with the adapters of its end."""


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


def open_adapters(path: Path, model: Opened) -> Mapping[str, Adapter]:
    """What lies in ``path``, by the name of its layer in ``model``: peft's format, or checkpoints of a LoRA run.

    Raises:
        CheckpointError, ConfigError: there is nothing, or it cannot be read or is of another model.
    """
    config, reference = model.weights.config, model.reference
    if is_adapter_folder(path):
        content = read_hf_config(reference) if reference is not None and is_hf_folder(reference) else None
        return read_adapters(path, config, family_for(config, content))[0]
    folder = open_folder(find(path))
    return read_saved_adapters(folder, read_manifest(folder))


def read_saved_adapters(folder: Folder, manifest: Manifest) -> dict[str, Adapter]:
    """Adapters in a checkpoint of this project, whole, by the name of their layer. In one process.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    scales = SavedRun.of(manifest.extra, folder).adapters
    if not scales:
        raise CheckpointError(f"{folder} holds no adapters")
    out = {}
    for layer, scale in scales.items():
        a, b = (_read(folder, manifest, f"model.{layer}.lora.{part}") for part in ("a", "b"))
        out[layer] = Adapter(a, b, scale)
    return out


def _read(folder: Folder, manifest: Manifest, name: str) -> torch.Tensor:
    if name not in manifest.tensors:
        raise CheckpointError(f"{folder}: tensor {name} is missing")
    out = torch.empty(manifest.tensors[name].shape)
    read_box_into(folder, manifest, name, (0,) * out.ndim, out)
    return out


def publish_adapter(config: Config, iteration: int) -> str:
    """Write the adapters of the checkpoint of ``iteration`` to ``<save>/adapter``; returns where that is. On one rank.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the folder not be written.
    """
    assert config.checkpoint.save is not None and config.lora is not None
    root = open_folder(config.checkpoint.save)
    saved, folder = root.child(iteration_name(iteration)), root.child(ADAPTER)
    adapters = read_saved_adapters(saved, read_manifest(saved))
    family = family_for(config.model, reference_config(config))
    dropout, base = config.lora.lora_dropout or 0.0, str(config.checkpoint.load)
    try:
        write_adapters(folder, adapters, config.model, family, dropout=dropout, base=base)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return str(folder)


def leave_companions(config: Config) -> None:
    """Put what goes with the model (tokenizer, chat template, config.json) beside the checkpoints, as this run uses it:
    the export of the model, or another run, finds it there. On one rank; needs a --save on a file system. Raises
    CheckpointError where it cannot be written."""
    load, save, given = str(config.checkpoint.load), config.checkpoint.save, config.data.tokenizer_model
    if save is None or (root := open_folder(save).local) is None:
        return
    source = Path(load) if is_hf_folder(load) else (None if "://" in load else carried(Path(load)))
    folder = root / BESIDE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None and (source / CONFIG).is_file():
            shutil.copyfile(source / CONFIG, folder / CONFIG)
        if given is None or Path(given).is_dir():
            copy_companions(source if given is None else Path(given), folder)
        else:
            shutil.copyfile(given, folder / "tokenizer.model")
        if config.data.chat_template is not None:
            shutil.copyfile(config.data.chat_template, folder / "chat_template.jinja")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None


def companions_of(path: Path) -> Path | None:
    """What :func:`leave_companions` left beside the adapter, the checkpoint or the run at ``path``, if it did."""
    run = path.parent if path.name == ADAPTER else path
    return carried(run)
