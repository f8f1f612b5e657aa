"""This process's place among the others, and the status file that launchers read. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smp.config import LoggingConfig

Status = Literal["done", "requeue", "failed", "bad_config"]


@dataclass(frozen=True)
class Process:
    """This process's place, as torchrun tells it; alone when torchrun did not start it."""

    rank: int
    world_size: int
    local_rank: int

    @staticmethod
    def from_environment() -> Process:
        """Read RANK, WORLD_SIZE and LOCAL_RANK."""
        env = os.environ
        return Process(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0)))

    @property
    def under_launcher(self) -> bool:
        """Whether a launcher set up a rendezvous."""
        return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def status_path(logging: LoggingConfig) -> Path:
    """Where the status file is."""
    return Path(logging.status_file or Path(logging.log_dir) / "status.json")


def ended(path: Path) -> bool:
    """Whether a status file is there and says how the run ended."""
    try:
        return json.loads(path.read_text())["status"] != "running"
    except (OSError, ValueError):
        return False


def write_status(path: Path, status: Status, reason: str, iteration: int) -> None:
    """Say why the run ended, atomically: ``{"status", "reason", "iteration"}``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two ranks may want to say that a third is lost
    temporary.write_text(json.dumps({"status": status, "reason": reason, "iteration": iteration}) + "\n")
    os.replace(temporary, path)
