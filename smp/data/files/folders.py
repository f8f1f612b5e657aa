"""Which files a folder of data stands for: what ``save_to_disk`` of the library datasets left, or the files in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from smp.config.blend import is_text

_SPLIT = re.compile(r"(train|test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
_NO_DATA = ("README", "LICENSE")
"""Beginnings of names of text files that describe data."""


def files_of(folder: Path) -> list[Path]:
    """The data files of a folder, in order.

    Raises:
        ValueError: there is none; or it holds parts that are not for training as well, which the user has to choose
            from.
    """
    # datasets.DatasetDict.save_to_disk: one folder per split.
    if (folder / "dataset_dict.json").is_file():
        try:
            splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            names, first = ", ".join(splits), folder / splits[0]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{folder / 'dataset_dict.json'}: not what save_to_disk writes ({error})") from None
        raise ValueError(f"{folder} holds the data sets {names}: name one, {first}")
    # datasets.Dataset.save_to_disk: state.json lists the shards in order.
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return [folder / entry["filename"] for entry in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / 'state.json'}: not what save_to_disk writes ({error})") from None
    found = sorted(path for path in folder.rglob("*") if path.is_file() and _is_data(path.relative_to(folder)))
    if not found:
        raise ValueError(f"{folder}: no file of data in this folder")
    parts = _parts(folder, found)
    if len(parts) > 1:
        name = parts.get("train") or min(parts.values())
        raise ValueError(f"{folder} holds files of {', '.join(sorted(parts))}: name those to train on, as {name}")
    return found


def _parts(folder: Path, files: list[Path]) -> dict[str, str]:
    """Splits that files or folders are named after, each with a path or pattern that names it alone."""
    out = dict[str, str]()
    for path in files:
        parent = folder
        for name in path.relative_to(folder).parts:
            if match := _SPLIT.match(name):
                out.setdefault(
                    match[1].lower(), str(parent / name if parent / name != path else parent / f"{match[1]}*")
                )
            parent /= name
    return out


def _is_data(path: Path) -> bool:
    """Whether a file, relative to its folder, is a data file."""
    hidden = any(part.startswith(".") for part in path.parts)
    return is_text(path.name) and not hidden and not path.name.startswith(_NO_DATA)
