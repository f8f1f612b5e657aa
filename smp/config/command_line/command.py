"""What all command lines have in common: how they are read, how errors look, and exit codes. Imports no torch.

Exit code 0: done. 2: what was asked cannot be done, so the command has to change: a bad value, a file that is not there
or is of another kind, a target that exists. 1: it failed while it worked, as on a full disk, or found damage or a
difference. 130: interrupted. What went wrong is one line on the error output, ``error: ...``.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from smp.config.command_line.commands import as_called_here
from smp.config.command_line.credentials import without_credentials
from smp.config.schema import ConfigError

_ASKED = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the file system that another command line avoids."""


class DamageError(ValueError):
    """Stored data differ from what was written. No other command line would help."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and does not mention it in its text."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        unset = default is None or default is argparse.SUPPRESS or isinstance(default, bool) or default in ("", [])
        if not action.option_strings or unset or "default" in text.lower():
            return text
        return text + (
            f" (default: {' '.join(map(str, default))})" if isinstance(default, list) else " (default: %(default)s)"
        )


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, with defaults in its help, and ConfigError instead of printing usage."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter)
        # allow_abbrev: a new flag must not change what --sav means in a script.
        super().__init__(allow_abbrev=False, **settings)

    def format_help(self) -> str:
        """The help text, with commands as they are called in this installation."""
        return as_called_here(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message in one line."""
        raise ConfigError(message.removeprefix("argument "))


def exit_code(error: BaseException) -> int:
    """Exit code of an error: 2 when the request cannot be fulfilled, 1 for damage and for failures on the way, such as
    a full disk or a lack of memory. An error raised ``from`` another one counts as that one."""
    return 1 if any(_failed(one) for one in _causes(error)) else 2


def _failed(error: BaseException) -> bool:
    return (isinstance(error, OSError | DamageError) and not isinstance(error, _ASKED)) or lacks_memory(error)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator raises RuntimeError with these words and no type of its own."""
    words = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return words or isinstance(error, MemoryError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def in_one_line(error: Exception) -> str:
    """The message of an error in one line, without credentials."""
    text = " ".join(str(error).splitlines()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        text = f"{error.filename}: {error.strerror}"
    return str(without_credentials(text))


def refuse_existing(*paths: Path) -> None:
    """Raise FileExistsError when something exists at one of ``paths``, which are to be created."""
    for path in paths:
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists already: give another name or remove it", str(path))


def output_gone() -> int | None:
    """After a BrokenPipeError: 141, the exit code of a program ended by SIGPIPE, when the reader of the output has
    gone, as in ``| head``. None when it was another pipe or connection, which is an error like any other."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
    for stream in gone:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # Python flushes the buffer at exit
    return 141 if gone else None


def _is_unread(stream: TextIO) -> bool:
    """Whether the reader of a stream has gone; False where the system cannot tell."""
    with suppress(OSError, ValueError, AttributeError):  # no descriptor, or a system without poll
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    return False


def run_tool(
    work: Callable[[], int | None],
    interrupted: str = "",
    *,
    expected: tuple[type[Exception], ...] = (ValueError, OSError),
) -> int:
    """Read a command line and do what it says; returns the exit code.

    Args:
        work: all of it; None stands for 0.
        interrupted: what Ctrl-C leaves.
        expected: errors that end in one line, besides a lack of memory. Any other is a fault of the program, and keeps
            its traceback.
    """
    try:
        code = work() or 0
        print(end="", flush=True)  # flush=True on print: sys.stdout may be None
        return code
    except Exception as error:
        if not (isinstance(error, expected) or lacks_memory(error)):
            raise
        if isinstance(error, BrokenPipeError) and (gone := output_gone()) is not None:
            return gone
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print("interrupted" + (f": {interrupted}" if interrupted else ""), file=sys.stderr)
        return 130
