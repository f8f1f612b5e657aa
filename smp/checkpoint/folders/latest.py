"""Folders of a run: ``ROOT/iter_0000010``, and the text file ``ROOT/latest`` that names the newest complete one.

A loader looks at the folders themselves: ``latest`` is for people and for programs that cannot list. It may be behind
by one checkpoint when a crash came between the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp.checkpoint.folders.folder import Folder, open_folder, same_folder
from smp.checkpoint.format.entries import CheckpointError
from smp.checkpoint.format.manifest import MANIFEST

LATEST = "latest"
DAMAGED = "damaged_"  # a prefix, so that the pattern for checkpoints does not match
ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_name(iteration: int) -> str:
    """Name of the folder of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int:
    """The iteration of a folder with such a name."""
    return int(name.removeprefix("iter_"))


def complete(root: Path | str | Folder) -> list[str]:
    """Names of the folders of iterations in ``root`` that have a manifest, newest first."""
    opened = open_folder(root)
    found = [name for name in opened.names() if ITERATION.fullmatch(name)]
    # The manifest alone makes a checkpoint: a folder without it is what a crash left.
    return [n for n in sorted(found, key=iteration_of, reverse=True) if opened.child(n).size(MANIFEST) is not None]


def set_aside_names(root: Folder) -> list[str]:
    """Folders of checkpoints that were damaged, and set aside under another name."""
    return [name for name in root.names() if name.startswith(f"{DAMAGED}iter_")]


def commit_latest(root: Path | str | Folder, folder: Path | str | Folder) -> None:
    """Let ``ROOT/latest`` name ``folder``, atomically. Call on one rank, after :func:`smp.checkpoint.save` returned.

    Raises:
        CheckpointError: when ``folder`` is not a complete checkpoint directly inside ``root``.
    """
    root, folder = open_folder(root), open_folder(folder)
    name = folder.name
    if not same_folder(root.child(name), folder):
        raise CheckpointError(f"{folder} is not directly inside {root}")
    if folder.size(MANIFEST) is None:
        raise CheckpointError(f"{folder} has no {MANIFEST}: 'latest' never names an incomplete checkpoint")
    root.replace(LATEST, f"{name}\n".encode())


def find(path: Path | str | Folder) -> Folder:
    """The checkpoint that ``path`` means: that folder itself, or the newest complete one of a run's folder.

    It need not be whole, and may not exist: reading its manifest finds that out.
    """
    folder = open_folder(path)
    # A checkpoint's own folder comes before a run's.
    if folder.size(MANIFEST) is None and (names := complete(folder)):
        return folder.child(names[0])
    return folder


def misnamed(folder: Folder, extra: Mapping[str, Any]) -> str | None:
    """A line when a training run's checkpoint lies under the name of another iteration."""
    held = other_iteration(folder, extra)
    return None if held is None else f"{folder} holds iteration {held}: somebody gave it another name, or other content"


def other_iteration(folder: Folder, extra: Mapping[str, Any]) -> int | None:
    """The iteration of a training run's checkpoint, when ``folder`` has the name of another one."""
    progress = extra.get("progress")
    held = progress.get("iteration") if isinstance(progress, dict) else None
    if not ITERATION.fullmatch(folder.name) or not isinstance(held, int) or held == iteration_of(folder.name):
        return None
    return held
