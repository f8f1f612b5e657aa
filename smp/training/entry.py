"""Shared by the entry points: from a command line to an exit code. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

from smp.config import Config, ConfigError, LoggingConfig
from smp.config.command_line.command import DamageError, exit_code, output_gone
from smp.training.inprocess.keeper import keep
from smp.training.inprocess.link import Link
from smp.training.process import Process, forget_status, leave_status, status_path
from smp.training.settings import report, status_file_in

Settings = TypeVar("Settings", bound=Config | tuple[Config, Any])


def run_command(
    argv: list[str],
    log_dir: str,
    read: Callable[[list[str], int], tuple[Settings, LoggingConfig | None]],
    launch: Callable[[Settings, Process], int],
) -> int:
    """Read settings, then run. Returns the exit code: 0, 1 when the run failed or found damage, 2 when what was asked
    cannot be done.

    Args:
        log_dir: default place of this entry point's logs.
        read: (command line, number of processes) -> settings, and where logs go; None: nothing will be trained.
        launch: runs; imports torch, which takes seconds.
    """
    rank = 0
    try:
        link = Link.of_environment()
        process = replace(Process.from_environment(), link=link)
        # The rank first: an error below is told by rank 0 alone.
        rank = process.rank
        settings, logs = read(argv, process.world_size)
        if logs is None:
            code = launch(settings, process)
            print(end="", flush=True)  # there may be no sys.stdout
            return code
        process.require_launcher()
        if rank == 0 and link is None:
            # A requeued job must not leave the status of the run before.
            forget_status(status_path(logs))
        parallel = (settings if isinstance(settings, Config) else settings[0]).parallel
        # The keeper of in-process restarts stays outside, and starts this program again as its
        # child.
        if link is None and parallel.inprocess_restart:
            del settings  # samples that were read: those who train read them themselves
            with lasting_output():  # recovery is worth more than its lines
                return keep(parallel, process)
    except BrokenPipeError:  # of --help, --dry-run and --preview, such as ``| head``
        if (gone := output_gone()) is None:
            raise
        return gone
    except (ConfigError, DamageError) as error:
        report(str(error), rank)
        if rank == 0 and (path := status_file_in(argv, log_dir)) is not None:
            leave_status(Path(path), "bad_config" if exit_code(error) == 2 else "failed", str(error), 0)
        return exit_code(error)
    # Only around a run: before it a closed pipe means that nobody wants to know.
    with lasting_output():
        try:
            return launch(settings, process)
        finally:
            # The shutdown of the interpreter may take a while without a sign of life.
            if link is not None:
                link.ends()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context for imports of seconds, such as torch's: the collector would walk all that is there again and again, a
    sixth of the time, and find no garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Lasting(io.FileIO):
    """A file descriptor that goes on as the next of ``others`` when nobody reads it any more."""

    def __init__(self, descriptor: int, others: list[int]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._others = others

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:
            # dup2 replaces the file behind the number, also for C++ code that prints to it.
            os.dup2(self._others.pop(0), self.fileno())  # for all who hold the descriptor
            return self.write(data)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, a closed pipe is no error: Ctrl-C in ``... | tee log`` would end a run that is about to save its last
    checkpoint. The standard output goes on as the error output. Lines are seen when they are complete, also in a pipe.
    Nor is an output that was closed before, as by ``2>&-``, where Python has no stream at all.
    """
    with contextlib.ExitStack() as opened:
        nowhere = opened.enter_context(open(os.devnull, "w"))
        while nowhere.fileno() <= 2:  # of an output that was closed: the next file opened would get what C++ writes
            nowhere = opened.enter_context(open(os.devnull, "w"))
        stdout, stderr = (nowhere if stream is None else stream for stream in (sys.stdout, sys.stderr))
        # First the error output, then nothing: a run is worth more than its log lines.
        out = _lasting(stdout, stderr, nowhere)
        err = _lasting(stderr, nowhere)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                yield
            finally:
                out.flush()
                err.flush()


def _lasting(stream: TextIO, *others: TextIO) -> TextIO:
    descriptor = _descriptor(stream)
    if descriptor is None:  # it has no reader that could go
        return stream
    raw = _Lasting(descriptor, [other for other in map(_descriptor, others) if other is not None])
    stream.flush()
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


def _descriptor(stream: TextIO) -> int | None:
    """The file descriptor of a stream; None: it has none, such as a notebook's, or an object of the user's that writes
    to two files."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
