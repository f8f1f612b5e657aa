"""A worker's end of the pipes between it and its keeper. Imports no torch.

The keeper says when to begin; the worker says every second that it is alive, and once that it trains. Where the keeper
is gone the worker ends: nobody would start it again, and its launcher may start another one.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress

from smp.config.rules.elastic import LAUNCHER

PIPES = "SMP_KEEPER"
"""Environment variable: descriptors of the pipes."""
REPLACE = 76
"""Exit code of a worker that the keeper replaces, as it replaces one that a signal has ended."""
FIRST, REPLACES, ORPHANED = b"1", b"2", b"3"
"""What the keeper says: begin, as the first one of this start, or in place of one that was lost; the launcher is
gone."""
ALIVE, TRAINS, ENDS = b".", b"t", b"e"
"""What the worker says: it lives, it trains, it ends by itself."""
BEAT = 1.0
"""Seconds between two signs of life."""
FRUITLESS = 5
"""Tries in a row that came no further, after which a new start is tried: processes may be broken."""
SUSPENDED = 2.0
"""Seconds that a wait takes too long where this process was suspended itself: so long it has heard nobody."""


def has_keeper() -> bool:
    """Whether this process is a worker: its keeper has checked all there is to check, and said what there is to say."""
    return LAUNCHER in os.environ


class Link:
    """Of one worker. Its thread runs until the process ends."""

    def __init__(self, control: int, life: int) -> None:
        self._control, self._life, self._asked = control, life, threading.Event()
        self.replaces = False
        """Whether this worker takes the place of another one; known behind :meth:`wait`."""
        self.orphaned = False
        """Whether the launcher is gone, so that nobody would start anything again."""
        for descriptor in (control, life):
            os.set_inheritable(descriptor, False)
        os.set_blocking(life, False)  # a keeper that is stopped reads nothing
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @staticmethod
    def of_environment() -> Link | None:
        """None: this process has no keeper. What it starts itself has none either."""
        pipes = os.environ.pop(PIPES, None)
        if pipes is None:
            return None
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a run, there is nothing to save
        return Link(*map(int, pipes.split()))

    def wait(self) -> None:
        """Until the keeper wants this worker."""
        self._asked.wait()

    def trains(self) -> None:
        """Say that this worker trains: the keeper then holds another one ready."""
        self._say(TRAINS)

    def ends(self) -> None:
        """Say that this worker ends by itself: a Python that ends gives no more signs of life, and may take a while."""
        self._say(ENDS)

    def _say(self, word: bytes) -> None:
        with suppress(OSError):  # it is full
            os.write(self._life, word)

    def _beat(self) -> None:
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        while True:
            if waiting.poll(1000 * BEAT):
                word = os.read(self._control, 1)
                if not word:
                    os._exit(1)
                self.orphaned = word == ORPHANED
                self.replaces = self.replaces or word == REPLACES
                self._asked.set()
            self._say(ALIVE)
