"""What all command lines share: mistakes in one line, exit codes, defaults in --help."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.checkpoint import CheckpointError, DamagedError
from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, exit_code, in_one_line, run_tool

TOOLS = sorted(path.stem for path in (Path(__file__).parents[2] / "tools").glob("*.py"))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--x 3"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2),
        (CheckpointError("x exists already"), 2),
        (caused(CheckpointError("x: denied"), PermissionError(errno.EACCES, "denied")), 2),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1),
        (caused(CheckpointError("x cannot be written"), OSError(errno.ENOSPC, "No space left on device")), 1),
        (caused(OSError("the store does not answer"), RuntimeError("503")), 1),
        (DamagedError("x is cut off"), 1),
        (caused(DamagedError("x is missing"), FileNotFoundError(errno.ENOENT, "No such file")), 1),
        (caused(ConfigError("--ckpt-step 3: x is cut off"), DamagedError("x is cut off")), 1),
        (caused(ConfigError("--save x"), caused(CheckpointError("x"), OSError(errno.EIO, "Input/output error"))), 1),
        (caused(ConfigError("--save x"), caused(CheckpointError("x"), PermissionError(errno.EACCES, "denied"))), 2),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),
        (MemoryError("tried to allocate 8 bytes"), 1),
        (MemoryError(), 1),
        (caused(CheckpointError("cannot load x: rank 0: MemoryError"), MemoryError()), 1),
    ],
)
def test_exit_codes(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert exit_code(error) == run_tool(fail) == code
    assert capsys.readouterr().err == f"error: {in_one_line(error)}\n"
    if isinstance(error, CheckpointError):  # other ranks end with the same code
        sent = pickle.loads(pickle.dumps(error))
        assert (type(sent), str(sent), exit_code(sent)) == (type(error), str(error), code)


def test_torch_without_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(lambda: int(torch.empty(1 << 60, dtype=torch.uint8).numel())) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "can't allocate memory" in said and said.count("\n") == 1
    with pytest.raises(RuntimeError, match="shape"):
        run_tool(lambda: int(torch.zeros(2).view(3).numel()))


def test_an_error_is_one_line() -> None:
    assert in_one_line(ValueError("a\nb")) == "a b"
    assert in_one_line(FileNotFoundError(errno.ENOENT, "No such file", "x")) == "x: No such file"


def test_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run_tool(interrupted, "the same command continues") == 130
    assert capsys.readouterr().err == "interrupted: the same command continues\n"


@pytest.mark.parametrize("redirect", [contextlib.redirect_stdout, contextlib.redirect_stderr])
def test_a_reader_that_has_gone(redirect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the output alone: another pipe that breaks is an error, in the table above."""
    reading, writing = os.pipe()
    os.close(reading)

    def unread() -> None:
        print("x", file=stream, flush=True)

    with open(writing, "w") as stream, redirect(stream):
        assert run_tool(unread) == 141
        print("y", file=stream, flush=True)  # what follows goes nowhere, and is no error
    assert capsys.readouterr() == ("", "")


def test_errors_that_are_not_told_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fault() -> None:
        raise ValueError("zip() argument 2 is shorter than argument 1")

    assert run_tool(fault) == 2 and capsys.readouterr().err.startswith("error: zip()")
    with pytest.raises(ValueError, match="zip"):
        run_tool(fault, expected=(ConfigError, OSError))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mistake_on_the_command_line_is_one_line(tool: str) -> None:
    pytest.importorskip("sentencepiece")
    out, err = io.StringIO(), io.StringIO()
    words = ["--folder"] if tool == "demo" else ["--nonsense"]  # it passes on what it does not know
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert importlib.import_module(f"tools.{tool}").main(words) == 2
    assert out.getvalue() == "" and err.getvalue().startswith("error: ") and err.getvalue().count("\n") == 1


def test_help_shows_defaults_where_there_are_any() -> None:
    parser = CommandParser(description="first\n    second")
    parser.add_argument("--count", type=int, default=0, help="so many")
    parser.add_argument("--keys", nargs="+", default=["a", "b"], help="names")
    parser.add_argument("--format", help="of the file (default: found out)")
    parser.add_argument("--name", help="free")
    parser.add_argument("--force", action="store_true", help="do it")
    lines = " ".join(parser.format_help().split())
    for text in ("so many (default: 0)", "names (default: a b)", "file (default: found out)", "free --force", "do it"):
        assert text in lines
    assert lines.count("default") == 3 and "first\n    second" in parser.format_help()
    with pytest.raises(ConfigError, match="unrecognized arguments: --coun 3"):
        parser.parse_args(["--coun", "3"])
