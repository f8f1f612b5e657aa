"""A worker's end of the pipes between it and its keeper. Imports no torch.

The keeper says when to begin. The worker sends a heartbeat every second, and reports once that it trains. If the keeper
is gone, the worker ends: nobody would restart it, and the launcher may start another one.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress

from smp.config.rules.elastic import LAUNCHER

PIPES = "SMP_KEEPER"
"""Environment variable with the descriptors of the pipes."""
REPLACE = 76
"""Exit code of a worker that asks to be replaced, as one is that was ended by a signal."""
FIRST, REPLACES, ORPHANED = b"1", b"2", b"3"
"""Messages of the keeper: begin as the first worker of this start; begin instead of one that was lost; the launcher is
gone."""
STARTS, ALIVE, TRAINS, ENDS = b"s", b".", b"t", b"e"
"""Messages of the worker: it is alive, and imports; it is alive; it trains; it ends by itself."""
MEETS = b"m"
"""Begins a message of the worker: digits, a space, digits and a line break say where keepers meet."""
BEAT = 1.0
"""Seconds between two signs of life."""
FRUITLESS = 5
"""Tries in a row without progress after which a new start is tried: processes may be broken."""
SUSPENDED = 2.0
"""A wait that takes so many seconds too long means that this process was suspended, and could hear nobody."""


def has_keeper() -> bool:
    """Whether this process is a worker, whose keeper has made all checks and printed all notes already."""
    return LAUNCHER in os.environ


class Link:
    """A worker's link to its keeper. Its thread runs until the process ends."""

    def __init__(self, control: int, life: int) -> None:
        self._control, self._life, self._asked = control, life, threading.Event()
        self._imported = False
        self.replaces = False
        """Whether this worker replaces another one; known after :meth:`wait`."""
        self.orphaned = False
        """Whether the launcher is gone, so that nobody would start anything again."""
        for descriptor in (control, life):
            # Child processes must not hold the pipes open: the keeper would not see this one's end.
            os.set_inheritable(descriptor, False)
        os.set_blocking(life, False)  # a keeper that is stopped reads nothing
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @staticmethod
    def of_environment() -> Link | None:
        """The link of this process; None: it has no keeper. Its own child processes have none either."""
        pipes = os.environ.pop(PIPES, None)
        if pipes is None:
            return None
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a run, there is nothing to save
        return Link(*map(int, pipes.split()))

    def wait(self) -> None:
        """Block until the keeper wants this worker, which has imported everything."""
        self._imported = True
        self._say(ALIVE)
        self._asked.wait()

    def trains(self) -> None:
        """Say that this worker trains: the keeper then holds another one ready."""
        self._say(TRAINS)

    def keepers_meet_at(self, where: str) -> None:
        """Tell the keeper where it finds that of rank 0, see ``presence``: it has no access to the store."""
        self._say(MEETS + where.encode() + b"\n")

    def ends(self) -> None:
        """Say that this worker ends by itself: the interpreter's shutdown gives no more signs of life, and may take a
        while."""
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
                    # End of file: the keeper is gone.
                    os._exit(1)
                self.orphaned = word == ORPHANED
                self.replaces = self.replaces or word == REPLACES
                self._asked.set()
            self._say(ALIVE if self._imported else STARTS)
