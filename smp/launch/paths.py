"""Relative paths of a job's settings. They are of the folder that a command was typed in, as ``base_results_dir`` is;
a node runs in the folder of the code, where the same name may be another file, or none."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PATHS = (
    *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path", "data_cache_path", "save"),
    *("log_dir", "chat_template", "load_adapter", "network_topology", "image_folder"),
    *("logits_load_dir", "logits_save_dir"),
)
"""Settings that are paths, or several."""
_NAMES = ("load", "tokenizer_model", "model_config", "reward_model", "teacher", "reward_funcs", "environment")
"""Settings that may be names as well: a path where there is such a file or folder."""
_SEVERAL = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "reward_funcs")


def absolute(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Settings whose relative paths begin at ``folder``."""
    return {name: _absolute(name, value, folder) for name, value in settings.items()}


def _absolute(name: str, value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or name not in (*_PATHS, *_NAMES):
        return value
    if name not in _SEVERAL:
        return _path(name, value, folder)
    try:
        words = shlex.split(value)
    except ValueError:  # the run says so
        return value
    found = [_path(name, word, folder) for word in words]
    return value if found == words else shlex.join(found)


def _path(name: str, word: str, folder: Path) -> str:
    # a blend has weights between its paths; hub:NAME and s3://... are no paths of this machine
    if _is_number(word) or "://" in word or word.startswith(("hub:", "/", "~")) or word in ("", "none", "auto"):
        return word
    there = (folder / re.sub(r"(\.py):\w+$", r"\1", word)).exists()  # FILE.py:NAME
    return os.path.normpath(folder / word) if name in _PATHS or there else word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
