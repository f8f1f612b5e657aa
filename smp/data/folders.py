"""Which files a folder of data stands for: what ``save_to_disk`` of the library datasets left, or the files in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from smp.config.blend import is_text

_SPLIT = re.compile(r"(train|test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)


def files_of(folder: Path) -> list[Path]:
    """The data files of a folder, in order.

    Raises:
        ValueError: there is none; or it holds parts that are not for training as well, which the user has to choose
            from.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise ValueError(f"{folder} holds the data sets {', '.join(splits)}: name one, {folder / splits[0]}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return [folder / entry["filename"] for entry in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / 'state.json'}: not what save_to_disk writes ({error})") from None
    found = sorted(
        path for path in folder.rglob("*") if path.is_file() and is_text(path.name) and not _hidden(path, folder)
    )
    if not found:
        raise ValueError(f"{folder}: no file of data in this folder")
    parts = {match[1].lower() for path in found if (match := _SPLIT.match(path.name))}
    if len(parts) > 1:
        raise ValueError(
            f"{folder} holds files of {', '.join(sorted(parts))}: name those to train on, as {folder}/train*"
        )
    return found


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
