"""What every command line has in common: how it is read, what a mistake looks like, and exit codes. Imports no torch.

Exit code 0: done. 2: what was asked cannot be done, so the command has to change: a bad value, a file that is not there
or is of another kind, a target that exists. 1: it failed while it worked, as on a full disk, or found damage or a
difference. 130: interrupted. What went wrong is one line on the error output, ``error: ...``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from smp.config.schema import ConfigError

_ASKED = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the file system that another command line would not meet."""


class DamageError(ValueError):
    """What lies on storage is not what was written there. No other command line would help."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and does not say it itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        unset = default is None or default is argparse.SUPPRESS or isinstance(default, bool) or default in ("", [])
        if not action.option_strings or unset or "default" in text.lower():
            return text
        return text + (f" (default: {' '.join(default)})" if isinstance(default, list) else " (default: %(default)s)")


class CommandParser(argparse.ArgumentParser):
    """argparse that takes whole flags only, shows defaults, and raises ConfigError instead of printing its usage."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """A mistake, in one line."""
        raise ConfigError(message.removeprefix("argument "))


def exit_code(error: Exception) -> int:
    """2 when what was asked cannot be done, 1 for damage and for what failed on the way, such as a full disk."""
    met = (error, error.__cause__)  # errors of checkpoints name the one of the system behind them
    failed = any(isinstance(one, OSError) and not isinstance(one, _ASKED) for one in met)
    return 1 if failed or isinstance(error, DamageError) else 2


def in_one_line(error: Exception) -> str:
    """What to tell of an error."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).splitlines())


def output_gone() -> int:
    """Exit code of a program that SIGPIPE ended, which is what happens when its reader goes, as in ``| head``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
    return 141


def run_tool(work: Callable[[], int | None], interrupted: str = "") -> int:
    """Read a command line and do what it says; returns the exit code.

    Args:
        work: all of it; None stands for 0.
        interrupted: what Ctrl-C leaves.
    """
    try:
        code = work() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return output_gone()
    except (ValueError, OSError) as error:
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print("interrupted" + (f": {interrupted}" if interrupted else ""), file=sys.stderr)
        return 130
