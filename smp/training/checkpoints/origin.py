"""Where a run began, so that the same command started again continues from what the run has saved. Imports no torch.

``--load A --save B`` begins at A, and a scheduler that requeues the job says the same again. Every checkpoint in B
notes where its run began; if that is A, and the same is trained, B holds this run and not another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from smp.checkpoint.folders.folder import Folder, open_folder, same_folder
from smp.checkpoint.folders.latest import complete, set_aside_names
from smp.checkpoint.format.entries import CheckpointError
from smp.checkpoint.format.manifest import read_manifest
from smp.config import Config
from smp.config.command_line.credentials import without_credentials

ORIGIN = "origin"
"""Its name in a checkpoint's ``extra``."""


@dataclass(frozen=True)
class Origin:
    """Where a run started from.

    Attributes:
        load: --load, as it was given.
        folder: the absolute path of it, or the URL.
        finetune: only the weights were taken.
        ckpt_step: the iteration of it that was asked for.
    """

    load: str
    folder: str
    finetune: bool
    ckpt_step: int | None

    @staticmethod
    def asked(config: Config) -> Origin | None:
        """The origin that a command line asks for; None: it begins from nothing, or goes on from what is in --save."""
        load, settings, tuning = config.checkpoint.load, config.checkpoint, config.objective is not None
        if load in (None, "auto") or settings.save is None:
            return None
        assert load is not None
        # The same folder in --load and --save is a plain resume, which needs no origin.
        if settings.ckpt_step is None and not tuning and same_folder(open_folder(load), open_folder(settings.save)):
            return None
        # Credentials in a URL may be others at the next start, and must not be written into a
        # checkpoint.
        given = str(without_credentials(load))
        folder = given if "://" in load else os.path.abspath(load)
        return Origin(given, folder, tuning or settings.finetune, settings.ckpt_step)

    @staticmethod
    def noted(extra: Mapping[str, Any]) -> Origin | None:
        """The origin that a checkpoint notes, whatever its ``extra`` holds."""
        said = extra.get(ORIGIN)
        try:
            return Origin(**said) if isinstance(said, dict) else None
        # Fields of a newer version, or none of this one: as if nothing was noted.
        except TypeError:
            return None

    def note(self) -> dict[str, Any]:
        """The origin as JSON, for a checkpoint's ``extra``."""
        return asdict(self)

    def is_that_of(self, extra: Mapping[str, Any]) -> bool:
        """Whether a checkpoint's run began here."""
        other = Origin.noted(extra)
        if other is None or (self.finetune, self.ckpt_step) != (other.finetune, other.ckpt_step):
            return False
        # A job may start in a new copy of the code each time, where a relative path is another folder.
        return self.folder == other.folder or self.load == other.load


def resuming(config: Config) -> Config:
    """The settings of the same run that continues from its own checkpoints."""
    if config.objective is not None:
        # Fine-tuning: --load stays the base model, and --resume continues from --save.
        return replace(config, checkpoint=replace(config.checkpoint, resume=True))
    own = replace(config.checkpoint, load="auto", finetune=False, load_optim=True, ckpt_step=None)
    return replace(config, checkpoint=own)


def has_begun(root: Folder, origin: Origin, trained: Mapping[str, Any]) -> list[str] | None:
    """Whether ``root`` holds checkpoints of the run that begins at ``origin``: names of what it trains otherwise, none
    where it is the same run. None: there are no checkpoints, or another run's. In one process.

    Args:
        trained: what it trains: settings by name, which its checkpoints note.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    names = complete(root)
    for name in names:
        try:
            extra = read_manifest(root.child(name)).extra
        except CheckpointError:  # the next older one says whose they are
            continue
        return _other(extra, trained) if origin.is_that_of(extra) else None
    # Only damaged ones: to begin again would hide that something is lost, and loading says so.
    return [] if names or set_aside_names(root) else None


def _other(extra: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    groups = [group for name in ("config", "finetune") if isinstance(group := extra.get(name), dict)]
    noted = {name: value for group in groups for name, value in group.items()}
    return [name for name, value in trained.items() if noted.get(name, value) != value]
