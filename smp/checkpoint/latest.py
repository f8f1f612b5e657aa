"""Folders of a run: ``ROOT/iter_0000010``, and the text file ``ROOT/latest`` that names the newest complete one.

A loader looks at the folders themselves: ``latest`` is for people and for programs that cannot list. It may be behind
by one checkpoint when a crash came between the two.
"""

from __future__ import annotations

import re
from pathlib import Path

from smp.checkpoint.entries import CheckpointError
from smp.checkpoint.folder import Folder
from smp.checkpoint.local import open_folder, same_folder
from smp.checkpoint.manifest import MANIFEST

LATEST = "latest"
ITERATION = re.compile(r"iter_(\d{7,})")


def iteration_name(iteration: int) -> str:
    """Name of the folder of an iteration."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int:
    """The iteration of a folder with such a name."""
    return int(name.removeprefix("iter_"))


def iteration_folder(root: Path | str, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lives on a file system."""
    return Path(root) / iteration_name(iteration)


def complete(root: Path | str | Folder) -> list[str]:
    """Names of the folders of iterations in ``root`` that have a manifest, newest first."""
    opened = open_folder(root)
    found = [name for name in opened.names() if ITERATION.fullmatch(name)]
    return [n for n in sorted(found, key=iteration_of, reverse=True) if opened.child(n).size(MANIFEST) is not None]


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


def latest(root: Path | str) -> Path | None:
    """The folder that ``ROOT/latest`` names; None when ``root`` does not exist or holds no complete checkpoint.

    Raises:
        CheckpointError: when ``latest`` names something that is not there, and when there are complete checkpoints but
            no ``latest``: starting from scratch beside them would hide a loss.
    """
    root = Path(root)
    if not (root / LATEST).is_file():
        found = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
        if found:
            raise CheckpointError(
                f"{root} has no '{LATEST}' file but complete checkpoints, such as {found[-1]}: load it by name"
            )
        return None
    name = (root / LATEST).read_text().strip()
    folder = root / name
    if not name or folder.resolve().parent != root.resolve() or not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{root / LATEST} names {name!r}, which is not a complete checkpoint in {root}")
    return folder


def find(path: Path | str) -> Path:
    """The checkpoint that ``path`` means: that folder itself, or the one that its ``latest`` names.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    folder = latest(path)
    if folder is None:
        raise CheckpointError(f"{path} holds no complete checkpoint")
    return folder
