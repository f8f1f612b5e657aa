"""Adapters of a run as files: from its checkpoint, which may be of any layout, to a folder that peft loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError, Manifest, read_manifest
from smp.checkpoint.box import read_box_into
from smp.checkpoint.folder import Folder
from smp.checkpoint.latest import iteration_name
from smp.checkpoint.local import open_folder
from smp.config import Config
from smp.config.finetune import FinetuneConfig
from smp.convert.adapters import Adapter, family_for, write_adapters
from smp.convert.hf_config import is_hf_folder, read_hf_config

ADAPTER = "adapter"
"""Folder beside the checkpoints of a run with the adapters of its end."""


def reference_config(tuning: FinetuneConfig) -> dict[str, Any] | None:
    """config.json of the model in --load, if there is one."""
    load = tuning.checkpoint.load
    return read_hf_config(load) if load is not None and is_hf_folder(load) else None


def read_saved_adapters(folder: Folder, manifest: Manifest) -> dict[str, Adapter]:
    """Adapters in a checkpoint of ours, whole, by the name of their layer. In one process.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    scales: Mapping[str, float] = manifest.extra.get("adapters", {})
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


def publish_adapter(config: Config, tuning: FinetuneConfig, iteration: int) -> Path:
    """Write the adapters of the checkpoint of ``iteration`` to ``<save>/adapter``; on one rank.

    Raises:
        CheckpointError: the checkpoint cannot be read, or --save is not on a file system.
    """
    assert config.checkpoint.save is not None
    root = open_folder(config.checkpoint.save)
    if root.local is None:
        raise CheckpointError(f"--save {root}: an adapter in peft's format needs a folder of a file system")
    saved = root.child(iteration_name(iteration))
    adapters = read_saved_adapters(saved, read_manifest(saved))
    family = family_for(config.model, reference_config(tuning))
    folder, base = root.local / ADAPTER, str(tuning.checkpoint.load)
    write_adapters(folder, adapters, config.model, family, dropout=tuning.lora.lora_dropout, base=base)
    return folder
