"""Record of a start: settings, command, versions, commit, machine. Each start adds one to ``starts.jsonl``."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import smp
from smp.config import Config, Layout
from smp.config.command_line.cli import as_flat_dict
from smp.config.command_line.credentials import without_credentials


def start_record(config: Config, layout: Layout, device: torch.device, iteration: int) -> dict[str, Any]:
    """What is needed to tell two runs apart and to start this one again.

    Args:
        config: resolved settings.
        layout: degrees of parallelism.
        device: of the run.
        iteration: where it starts: 0, or the checkpoint's.

    Returns:
        JSON types only. ``git`` is None where the program is not run from a checkout of git. URLs have ``***`` in place
        of user, password and query.
    """
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "iteration": iteration,
        "command": without_credentials(shlex.join(sys.orig_argv)),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "processes": layout.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
        "versions": {"smp": smp.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "git": commit_of(Path(smp.__file__).parents[1]),
        "settings": {name: without_credentials(value) for name, value in as_flat_dict(config).items()},
    }


@cache
def commit_of(folder: Path) -> dict[str, Any] | None:
    """Commit of the program and whether files differ from it. Asked once: what a process has imported stays what it is,
    whatever is checked out behind it."""
    if not (
        folder / ".git"
    ).exists():  # an installed package may be inside of another repository, whose commit would say nothing
        return None
    # No optional locks: a status must not compete with the user's own git commands.
    ask = ["git", "-C", str(folder), "--no-optional-locks"]
    try:
        commit = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        # Untracked files are not the program.
        changes = subprocess.run(
            [*ask, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(changes.stdout.strip())}
