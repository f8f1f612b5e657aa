"""Progress of --logits-save-dir, kept in its folder: the same command continues there, in any layout.

``unfinished.json`` lists the files that are whole and says how many sequences, in the order of the data, all ranks have
written. It is replaced in one step when they all have: what a rank wrote after it is written again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.folder import open_folder
from smp.config import ConfigError
from smp.training.distillation.meaning import Meaning

UNFINISHED = "unfinished.json"


@dataclass(frozen=True)
class Work:
    """The identity of the job: a run continues with no other.

    Attributes:
        meaning: of the folder.
        teacher: --load.
        iteration: of the checkpoint that --load and --ckpt-step mean now; None: --load is no run's folder.
        dtype: in which the teacher computes.
        adapter: --load-adapter.
        seq_length, packed: of the sequences, by which they are counted.
    """

    meaning: Meaning
    teacher: str
    iteration: int | None
    dtype: str
    adapter: str | None
    seq_length: int
    packed: bool


@dataclass(frozen=True)
class Come:
    """Progress of an interrupted --logits-save-dir.

    Attributes:
        sequences: written by all ranks.
        parts: files, as the manifest lists them.
    """

    sequences: int = 0
    parts: Sequence[dict[str, Any]] = field(default_factory=list)


def begin_folder(path: str, work: Work) -> Come:
    """Make the folder, or see how far this work has come in it. On one rank.

    Raises:
        ConfigError: it cannot be made, or holds something else.
    """
    folder = open_folder(path)
    try:
        folder.make()
        names = folder.names()
        if not names:
            note(path, work, Come())
            return Come()
        # manifest.json means that it is complete.
        if UNFINISHED not in names or "manifest.json" in names:
            raise ConfigError(f"--logits-save-dir {path} is not empty")
        said = json.loads(folder.read(UNFINISHED))
        come = Come(int(said["sequences"]), list(said["parts"]))
        own, there = asdict(work), said["work"]
        for name in names:  # written after the last note, and not counted in it
            if name.endswith(".safetensors") and name not in {part["file"] for part in come.parts}:
                folder.delete(name)
    except (OSError, CheckpointError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--logits-save-dir {path}: {error}") from None
    if there != own:
        raise ConfigError(
            f"--logits-save-dir {path} holds the unfinished output of another command ({_difference(own, there)}): "
            "give that one, or another folder"
        )
    return come


def note(path: str, work: Work, come: Come) -> None:
    """Record how far the work has come. On one rank."""
    content = {"work": asdict(work), "sequences": come.sequences, "parts": list(come.parts)}
    open_folder(path).replace(UNFINISHED, json.dumps(content, indent=1).encode())


def forget(path: str) -> None:
    """Remove the record: the folder is complete. On one rank."""
    open_folder(path).delete(UNFINISHED)


def _difference(own: Any, there: Any) -> str:
    """The first entry that differs, with both values."""
    if not (isinstance(own, dict) and isinstance(there, dict)):
        return f"{there} there, {own} here"
    name = next((name for name in own if own[name] != there.get(name)), "")
    return f"{name}: {_difference(own.get(name), there.get(name))}"
