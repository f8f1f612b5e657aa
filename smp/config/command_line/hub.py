"""Names of the Hugging Face hub, ``hub:OWNER/NAME``, resolved to local folders by huggingface_hub. Imports no torch."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from smp.config.command_line.commands import pip_install
from smp.config.schema import ConfigError

PREFIX = "hub:"
Kind = Literal["model", "tokenizer", "dataset"]
_MODEL = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
_TOKENIZER = ["*.json", "*.model", "*.jinja", "*.txt"]
_COPIES = ["original/*", "onnx/*"]
"""Folders with the same weights in other formats."""
_FLAGS: dict[str, Kind] = {
    **{"load": "model", "tokenizer_model": "tokenizer", "load_adapter": "model"},
    **dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path"), "dataset"),
}
"""Settings that may be such a name; for data paths every word."""


def on_this_machine(name: str, kind: Kind, flag: str) -> str:
    """The local folder of a hub name, downloaded if necessary; other values are returned unchanged.

    ``hub:OWNER/NAME@REVISION`` names a branch, a tag or a commit. Behind a data set may stand the files that are
    wanted: ``hub:OWNER/NAME/data/train-*.parquet``.

    Raises:
        ConfigError: the library is missing, or the hub cannot be reached or does not have it; the line says how to
            fetch it elsewhere.
    """
    if not name.startswith(PREFIX):
        return name
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(f"{flag} {name} needs huggingface_hub: {pip_install('huggingface_hub')}") from None
    path, _, revision = name.removeprefix(PREFIX).partition("@")
    owner, _, rest = path.partition("/")
    own, _, files = rest.partition("/")
    if not owner or (files and kind != "dataset"):
        raise ConfigError(f"{flag} {name}: expected hub:OWNER/NAME")
    repository = f"{owner}/{own}" if own else owner
    chosen = {"model": _MODEL, "tokenizer": _TOKENIZER, "dataset": [files] if files else None}[kind]
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            repo_type="dataset" if kind == "dataset" else "model",
            revision=revision or None,
            allow_patterns=chosen,
            ignore_patterns=_COPIES if kind == "model" else None,
        )
    except Exception as error:  # of the hub, of the network, or of the disk
        # Messages of the library have paragraphs of advice: the first sentence says what is wrong.
        why = " ".join(str(error).split()).partition(". ")[0][:200] or type(error).__name__
        data = " --repo-type dataset" if kind == "dataset" else ""
        raise ConfigError(
            f"{flag} {name} is not on this machine and cannot be fetched ({why}); where there is a network: "
            f"hf download {repository}{data} --local-dir FOLDER, then {flag} FOLDER"
        ) from None
    commit = Path(folder).name  # snapshots/<commit> in the library's cache
    # A branch moves: only a commit names the same files in a year.
    if commit != revision and os.environ.get("RANK", "0") == "0":
        pinned = f"{PREFIX}{repository}{'/' + files if files else ''}@{commit}"
        print(f"note: {flag} {name} is commit {commit} now; {pinned} stays with it", file=sys.stderr)
    return str(Path(folder, files)) if files else str(folder)


def hub_hint(path: str, flag: str) -> str:
    """What the message of a folder that is not there adds where the word looks like a name of the hub."""
    looks = path.count("/") == 1 and path[0] not in "./~" and not path.endswith("/")
    return f"; of a model on the hub: {flag} {PREFIX}{path}" if looks else ""


def with_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with hub names replaced by folders. Raises ConfigError as :func:`on_this_machine`."""
    out = dict(values)
    for name, kind in _FLAGS.items():
        given = values.get(name)
        if not isinstance(given, str) or PREFIX not in given:
            continue
        flag = "--" + name.replace("_", "-")
        # Paths of data are lists of words (weights and names), all other settings are one name.
        words = shlex.split(given) if kind == "dataset" else [given]
        found = [on_this_machine(word, kind, flag) for word in words]
        out[name] = shlex.join(found) if kind == "dataset" else found[0]
    return out


def model_path(text: str) -> Path:
    """argparse type of the tools' --load: a path, or the folder of a hub name."""
    return _argument(text, "model", "--load")


def tokenizer_path(text: str) -> Path:
    """The folder or file that --tokenizer-model names."""
    return _argument(text, "tokenizer", "--tokenizer-model")


def _argument(text: str, kind: Kind, flag: str) -> Path:
    try:
        return Path(on_this_machine(text, kind, flag))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag} ")) from None
