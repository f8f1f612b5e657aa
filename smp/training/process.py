"""Rank and world size of this process, and the status file that launchers read. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from smp.config import ConfigError, LoggingConfig
from smp.config.command_line.credentials import without_credentials
from smp.training.inprocess.link import Link

Status = Literal["running", "done", "requeue", "failed", "bad_config"]


@dataclass(frozen=True)
class Process:
    """Rank and world size of this process, from torchrun's environment; without torchrun one process alone.

    Attributes:
        started: when it was asked for, in seconds since 1970: before torch is imported.
        spares: processes of the same start that do not train.
        link: to the process that starts this one again (--inprocess-restart).
        restarts: runs of this start that were lost before this one, and continued from in the same processes.
    """

    rank: int
    world_size: int
    local_rank: int
    started: float = field(default_factory=time.time, compare=False)
    spares: int = 0
    link: Link | None = field(default=None, compare=False)
    restarts: int = 0

    @staticmethod
    def from_environment() -> Process:
        """Read RANK, WORLD_SIZE and LOCAL_RANK.

        Raises:
            ConfigError: one of them is not a number.
        """
        numbers = []
        # ``isdecimal`` refuses signs and spaces, which ``int`` takes.
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            text = os.environ.get(name, default)
            if not text.isdecimal():
                raise ConfigError(f"the environment says {name}={text}, which is not a number of processes")
            numbers.append(int(text))
        rank, world_size, local_rank = numbers
        return Process(rank, world_size, local_rank)

    @property
    def is_spare(self) -> bool:
        """Whether this process does not train but waits to replace others: ranks after those that train."""
        return self.rank >= self.world_size

    @property
    def under_launcher(self) -> bool:
        """Whether a launcher set up a rendezvous."""
        return "RANK" in os.environ and "MASTER_ADDR" in os.environ

    def require_launcher(self) -> None:
        """Raise ConfigError when this process would wait for others that nobody starts."""
        if self.world_size > 1 and not self.under_launcher:
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size} but no launcher started this process: use torchrun, "
                "unset WORLD_SIZE, or give --dry-run"
            )


def status_path(logging: LoggingConfig) -> Path:
    """The path of the status file."""
    return Path(logging.status_file or Path(logging.log_dir) / "status.json")


def forget_status(path: Path) -> None:
    """Remove the status file of an earlier run: if this run were killed, it would be taken for its own.

    Raises:
        ConfigError: it cannot be removed, or no file can be there.
    """
    try:
        path.unlink(missing_ok=True)
        above = next(folder for folder in path.absolute().parents if folder.exists())
        # Checked now, not when the run has ended: the file is written then.
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise PermissionError(f"{above} is no folder that one can write to")
    except OSError as error:
        raise ConfigError(f"--status-file {path}: {error}") from None


def ended(path: Path) -> bool:
    """Whether a status file is there and says how the run ended."""
    try:
        return json.loads(path.read_text())["status"] != "running"
    except (OSError, ValueError):
        return False


def write_status(
    path: Path, status: Status, reason: str, iteration: int, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write the state of the run, or why it ended, atomically: ``{"status", "reason", "iteration"}`` and ``more``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two ranks may want to say that a third is lost
    word = {"status": status, "reason": without_credentials(reason), "iteration": iteration, **more}
    temporary.write_text(json.dumps(word) + "\n")
    # rename(2) is atomic: launchers never read half a file.
    os.replace(temporary, path)


def leave_status(
    path: Path, status: Status, reason: str, iteration: int, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """:func:`write_status`; a failure is printed to stderr, unless the reason says so already."""
    try:
        write_status(path, status, reason, iteration, more)
    except OSError as error:
        if not reason.startswith("--status-file"):
            print(f"error: --status-file {path}: {error}", file=sys.stderr, flush=True)
