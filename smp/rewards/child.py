"""A subprocess that answers lines of JSON: for user code that may fail, hang or exit."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from smp.rewards.functions import RewardError

START_SECONDS = 120.0
"""Seconds for a process to start: files of functions may load models."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


class Child:
    """One process, which answers one message at a time: ``python -m MODULE ARGUMENTS``.

    Args:
        module: of the program; it serves by :func:`serve`.
        arguments: of its command line.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals that stop a run are for the run: it saves first. And what a function starts ends with it.
            start_new_session=True,
            # The child must find the same packages and files as this process, however this one was
            # started.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._rest = bytearray()

    def wait_until_ready(self, what: str) -> None:
        """Wait until the program has loaded what it needs.

        Raises:
            RewardError: it cannot; ``what`` names it where the process does not say why.
        """
        said = self.line(START_SECONDS)
        # A process that cannot start says why in its first line.
        if said is None or "error" in said:
            self.kill()
            why = "" if said is None else said["error"]
            raise RewardError(why or f"the process for {what} did not start")

    def send(self, message: Any) -> bool:
        """Send a message; False: the process has ended."""
        assert self._process.stdin is not None
        try:
            # Dates and the like of tables go as text: functions get what JSON can say.
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self._process.stdin.flush()
        # A broken pipe: the process has ended, which the next line() reports.
        except OSError:
            return False
        return True

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None: none came in time, or the process has ended."""
        assert self._process.stdout is not None
        ends = time.monotonic() + seconds
        # Bytes are read as they come: a pipe delivers lines in pieces, and readline would ignore
        # the time limit.
        while b"\n" not in self._rest:
            try:
                ready = self._selector.select(max(0.0, ends - time.monotonic()))
                more = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            except (OSError, ValueError):  # closed by another thread
                return None
            if not more:
                # Readable without data: the end of the file.
                if ready:
                    self._process.wait()
                return None
            self._rest += more
        line, _, rest = bytes(self._rest).partition(b"\n")
        self._rest = bytearray(rest)
        message: dict[str, Any] = json.loads(line)
        return message

    def kill(self) -> None:
        """Kill the process and all that it has started. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # start_new_session made it the leader of a process group.
            os.killpg(self._process.pid, signal.SIGKILL)
        # Reaps the process, or it would stay as a zombie.
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # of what was not written any more
                    pipe.close()


Say = Callable[..., None]


def serve(prepare: Callable[[], Callable[[Any, Say], None]]) -> int:
    """In the process: answer each line until the input ends. Killed together with the process that started it, even
    while a function runs. Returns an exit code.

    Args:
        prepare: loads what is needed, and returns what answers a message by ``say(name=value, ...)``. Before the first
            of them the process says ``{"ready": true}``, or ``{"error": why}`` for a RewardError.
    """
    lines, answers = _pipes()
    own = os.getpid()

    # One line per message: json.dumps writes no line ends.
    def say(**message: Any) -> None:
        if os.getpid() != own:  # a copy that a function has made of this process, with the same pipes
            os._exit(0)
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        answer = prepare()
    except RewardError as error:
        say(error=str(error))
        return 2
    say(ready=True)
    for line in lines:
        answer(json.loads(line), say)
    return 0


def _pipes() -> tuple[Iterator[str], TextIO]:
    """(incoming lines, where answers go). Standard input and output are replaced, since user functions may read and
    print."""
    if sys.platform == "linux":
        # Only where prctl exists; elsewhere the end of standard input ends the process.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    # Python's print and C's printf go to the error output from here on.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return lines, answers


def run(main: Callable[[list[str]], int]) -> None:
    """Run the ``__main__`` of such a process."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (BrokenPipeError, KeyboardInterrupt):  # the process that it worked for is gone, or ends
        os._exit(1)
