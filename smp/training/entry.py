"""What the entry points have in common: the way from a command line to an exit code. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from smp.config import ConfigError, LoggingConfig
from smp.config.command import DamageError, exit_code, output_gone
from smp.training.output import lasting_output
from smp.training.process import Process, Status, forget_status, status_path, write_status
from smp.training.settings import report, status_file_in

Settings = TypeVar("Settings")


def run_command(
    argv: list[str],
    log_dir: str,
    read: Callable[[list[str], int], tuple[Settings, LoggingConfig | None]],
    launch: Callable[[Settings, Process], int],
) -> int:
    """Read settings, then run. Returns the exit code: 0, 1 when the run failed or found damage, 2 when what was asked
    cannot be done.

    Args:
        argv: the command line.
        log_dir: default place of this entry point's logs.
        read: (command line, number of processes) -> settings, and where logs go; None: nothing will be trained.
        launch: runs; imports torch, which takes seconds.
    """
    try:
        process = Process.from_environment()
    except ConfigError as error:
        report(str(error), 0)
        return 2
    try:
        settings, place = read(argv, process.world_size)
        if place is not None:
            process.require_launcher()
            if process.rank == 0:
                forget_status(status_path(place))
        else:
            code = launch(settings, process)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # of --help, --dry-run and --preview
        if (gone := output_gone()) is None:
            raise
        return gone
    except (ConfigError, DamageError) as error:
        code = exit_code(error)
        report(str(error), process.rank)
        if process.rank == 0 and (path := status_file_in(argv, log_dir)) is not None:
            _write_status(path, "bad_config" if code == 2 else "failed", str(error))
        return code
    with lasting_output():
        return launch(settings, process)


def _write_status(path: str, status: Status, reason: str) -> None:
    try:
        write_status(Path(path), status, reason, 0)
    except OSError as unwritable:
        if not reason.startswith("--status-file"):
            report(f"--status-file {path}: {unwritable}", 0)
