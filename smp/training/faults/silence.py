"""A process that gives no sign of life is killed, so that its launcher sees that it is lost.

Who is stopped (SIGSTOP) or stuck in the kernel hears no signal but SIGKILL. The others find out by the timeout of their
collectives and end; torchrun then asks the stopped one to end as well, and in a restart waits 30 seconds for that,
whatever its settings say. And where all processes of a run are stopped nobody would find out. So each has a small
process beside it, this file run as a program, which hears it every second, and kills it after the same timeout. Imports
no torch.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

BEAT = 1.0
"""Seconds between two signs of life."""
_SUSPENDED = 2.0
"""A wait that takes so many seconds too long: this process was suspended itself, and could hear nobody."""


class SignsOfLife:
    """Gives signs of life of this process to one that kills it after ``limit`` seconds without any.

    Args:
        name: of this process.
    """

    def __init__(self, name: str, limit: float) -> None:
        words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(limit), name]
        self._listener = subprocess.Popen(words, stdin=subprocess.PIPE)
        assert self._listener.stdin is not None
        self._pipe: IO[bytes] = self._listener.stdin
        os.set_blocking(self._pipe.fileno(), False)  # a listener that is stopped reads nothing
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            with suppress(OSError):  # full, or the listener is gone
                os.write(self._pipe.fileno(), b".")

    def close(self) -> None:
        """End the listener."""
        self._closed.set()
        self._listener.kill()
        self._listener.wait()


def listen(process: int, limit: float, name: str) -> None:
    """Kill a process, whose signs of life come in by stdin, after ``limit`` seconds without any."""
    heard = now = time.monotonic()
    # Its other children may hold the pipe open: that it has ended is seen by whose child this one is.
    while os.getppid() == process:
        # From look to look, with nothing in between: a stop of this process at any point is part of a wait.
        before = now
        if select.select([0], [], [], BEAT)[0]:
            if not os.read(0, 1 << 16):  # its end has closed the pipe
                return
            heard = time.monotonic()
        now = time.monotonic()
        if now - before > BEAT + _SUSPENDED:
            heard = now
        if now - heard > limit and os.getppid() == process:
            os.write(2, f"{name}: no sign of life for {now - heard:.0f} s, and so killed\n".encode())
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    # They are for the process that trains, which may have a checkpoint to write.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    listen(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
