"""Folders of a run: ``ROOT/iter_0000010``, and the text file ``ROOT/latest`` that names the newest complete one."""

from __future__ import annotations

from pathlib import Path

from smp.checkpoint.manifest import MANIFEST, CheckpointError, write_durably

LATEST = "latest"


def iteration_folder(root: Path | str, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lives."""
    return Path(root) / f"iter_{iteration:07d}"


def commit_latest(root: Path | str, folder: Path | str) -> None:
    """Let ``ROOT/latest`` name ``folder``, atomically. Call on one rank, after :func:`smp.checkpoint.save` returned.

    Raises:
        CheckpointError: when ``folder`` is not a complete checkpoint directly inside ``root``.
    """
    root, folder = Path(root), Path(folder)
    if folder.resolve().parent != root.resolve():
        raise CheckpointError(f"{folder} is not directly inside {root}")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: 'latest' never names an incomplete checkpoint")
    write_durably(root / LATEST, f"{folder.resolve().name}\n".encode())


def latest(root: Path | str) -> Path | None:
    """The folder that ``ROOT/latest`` names; None when ``root`` does not exist or holds no complete checkpoint.

    Raises:
        CheckpointError: when ``latest`` names something that is not there, and when there are complete checkpoints but
            no ``latest``: starting from scratch beside them would hide a loss.
    """
    root = Path(root)
    if not (root / LATEST).is_file():
        complete = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
        if complete:
            raise CheckpointError(
                f"{root} has no '{LATEST}' file but complete checkpoints, such as {complete[-1]}: load it by name"
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
