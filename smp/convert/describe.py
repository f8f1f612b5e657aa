"""What a folder says about the architecture of the model in it, without torch and without reading weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp.checkpoint.folders.latest import find, iteration_name
from smp.checkpoint.format.entries import CheckpointError
from smp.checkpoint.format.manifest import MANIFEST
from smp.config import ModelConfig
from smp.convert.changes import saved_model
from smp.convert.huggingface.config import FREE, is_hf_folder
from smp.convert.huggingface.foreign import choose_model, read_model_config


def read_architecture(folder: str, step: int | None = None, implementation: str = "auto") -> dict[str, Any] | None:
    """Settings of the model, by field of ``ModelConfig``: of a Hugging Face folder, a checkpoint, or a run's checkpoint
    of iteration ``step``, by default its newest. None: the folder does not say. A Hugging Face folder's layers of
    multi-token prediction are read where they are asked for.

    Args:
        implementation: --model-implementation, of a Hugging Face folder; a checkpoint has its own.

    Raises:
        ConfigError: a Hugging Face folder with an architecture that is not supported.
    """
    if "://" in folder:
        return None
    if is_hf_folder(folder):
        return _of_files(replace(described_model(folder, implementation), mtp_num_layers=None))
    try:
        own = find(folder).local if step is None else Path(folder) / iteration_name(step)
        assert own is not None, "a path is not a URL"
        saved = json.loads((own / MANIFEST).read_bytes())["extra"]["config"]
        return _of_files(saved_model(saved, folder)) if "num_layers" in saved else None
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # loading it says what is wrong with it


def described_model(folder: str, implementation: str = "auto") -> ModelConfig:
    """The model of a Hugging Face folder, or of a config.json.

    Raises:
        ConfigError: its architecture is not supported.
    """
    return choose_model(*read_model_config(folder), implementation)


def of_model_config(path: str, implementation: str) -> dict[str, Any]:
    """Settings of the model that --model-config asks for, by field of ``ModelConfig``."""
    return _of_files(replace(described_model(path, implementation), mtp_num_layers=None))


def _of_files(model: ModelConfig) -> dict[str, Any]:
    # As they were set, and not in the one form in which they are compared: with other flags they may mean more.
    # Training settings are the run's own, not the file's.
    return {name: value for name, value in vars(model).items() if name not in FREE}
