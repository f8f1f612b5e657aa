"""What a folder says about the architecture of the model in it, without torch and without reading weights."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from smp.config import ModelConfig
from smp.convert.hf_config import CONFIG, FREE, architecture, from_hf, is_hf_folder, read_hf_config


def read_architecture(folder: str) -> dict[str, Any] | None:
    """Settings of the model, by field of ``ModelConfig``: of a Hugging Face folder, a checkpoint, or the newest
    checkpoint of a run. None: the folder does not say. A Hugging Face folder's layers of multi-token prediction are
    read where they are asked for.

    Raises:
        ConfigError: a Hugging Face folder with an architecture that is not supported.
    """
    if "://" in folder:
        return None
    if is_hf_folder(folder):
        described = from_hf(read_hf_config(folder), str(Path(folder) / CONFIG))
        return architecture(replace(described, mtp_num_layers=None))
    try:
        latest = Path(folder) / "latest"
        own = Path(folder) / latest.read_text().strip() if latest.is_file() else Path(folder)
        saved = json.loads((own / "manifest.json").read_bytes())["extra"]["config"]
        known = [f.name for f in fields(ModelConfig) if f.name not in FREE and f.name in saved]
        # a checkpoint of an older version lacks settings that came later: they are at their default
        return architecture(ModelConfig(**{name: saved[name] for name in known})) if "num_layers" in known else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # loading it says what is wrong with it
