"""A process next to the run, which answers lines of JSON: for code of the user's that may fail, hang or end itself."""

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
"""For a process to begin: files of functions may load models."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""


class Child:
    """One process, which does one thing at a time: ``python -m MODULE ARGUMENTS``.

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
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._rest = bytearray()

    def wait_until_ready(self, what: str) -> None:
        """Until the program has loaded what it needs.

        Raises:
            RewardError: it cannot; ``what`` names it where the process does not say why.
        """
        said = self.line(START_SECONDS)
        if said is None or "error" in said:
            self.kill()
            why = "" if said is None else said["error"]
            raise RewardError(why or f"the process for {what} did not start")

    def send(self, message: Any) -> bool:
        """Ask something; False: the process is gone."""
        assert self._process.stdin is not None
        try:
            # Dates and the like of tables go as text: functions get what JSON can say.
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def line(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None: none came in time, or the process is gone."""
        assert self._process.stdout is not None
        ends = time.monotonic() + seconds
        while b"\n" not in self._rest:
            try:
                ready = self._selector.select(max(0.0, ends - time.monotonic()))
                more = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            except (OSError, ValueError):  # closed by another thread
                return None
            if not more:
                if ready:
                    self._process.wait()
                return None
            self._rest += more
        line, _, rest = bytes(self._rest).partition(b"\n")
        self._rest = bytearray(rest)
        message: dict[str, Any] = json.loads(line)
        return message

    def kill(self) -> None:
        """End the process and what it has started. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # of what was not written any more
                    pipe.close()


Say = Callable[..., None]


def serve(prepare: Callable[[], Callable[[Any, Say], None]]) -> int:
    """In the process: answer each line until the input ends, or the process that it works for is gone, also while a
    function runs. Returns an exit code.

    Args:
        prepare: loads what is needed, and returns what answers a message by ``say(name=value, ...)``. Before the first
            of them the process says ``{"ready": true}``, or ``{"error": why}`` for a RewardError.
    """
    lines, answers = _pipes()

    def say(**message: Any) -> None:
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
    """(lines that come in, where answers go). Functions may print, and read: the pipes are kept out of their way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return lines, answers


def run(main: Callable[[list[str]], int]) -> None:
    """The process's ``__main__``."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (BrokenPipeError, KeyboardInterrupt):  # the process that it worked for is gone, or ends
        os._exit(1)
