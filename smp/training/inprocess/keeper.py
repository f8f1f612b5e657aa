"""The process that a launcher starts for a rank: it starts the worker, which trains, and replaces it when it is lost.

Imports no torch, and lives until the launcher ends it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from smp.config import ConfigError
from smp.config.parallel import ParallelConfig
from smp.config.rules.elastic import LAUNCHER, OWN_STORES
from smp.training.faults.silence import SignsOfLife
from smp.training.inprocess.link import (
    ALIVE,
    BEAT,
    ENDS,
    FIRST,
    FRUITLESS,
    MEETS,
    ORPHANED,
    PIPES,
    REPLACE,
    REPLACES,
    STARTS,
    SUSPENDED,
    TRAINS,
)
from smp.training.inprocess.presence import Presence, be_present
from smp.training.process import Process

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun's variable: rank 0 does not keep the store that workers meet at."""
_WHERE = re.compile(re.escape(MEETS) + rb"(\d+ \d+)\n")
_LEAVING = 5.0
"""Seconds that a worker has to tell the others when the launcher is gone."""
_ENDING = 120.0
"""Least seconds that a worker has to end by itself."""


class Worker:
    """A process that trains, or is ready to."""

    def __init__(self, launcher: int) -> None:
        control, self._control = os.pipe()
        self.life, life = os.pipe()
        # Reads never block the keeper.
        os.set_blocking(self.life, False)
        environment = os.environ | {PIPES: f"{control} {life}", LAUNCHER: str(launcher), AGENT_STORE: "True"}
        words = [sys.executable, *sys.orig_argv[1:]]  # this very command
        self.process = subprocess.Popen(words, env=environment, pass_fds=(control, life))
        # The worker's ends: while they are open here, no end of file shows that it is gone.
        os.close(control)
        os.close(life)
        self.imported = self.trains = self.ends = False
        self.where: str | None = None
        self._heard = 0.0

    def begin(self, word: bytes) -> None:
        """Let it train; ``word`` says in which role."""
        self.count_anew()
        self._say(word)

    def count_anew(self) -> None:
        """Count its silence from now, if it has given a sign of life."""
        self._heard = time.monotonic() if self._heard else 0.0

    def _say(self, word: bytes) -> None:
        with suppress(OSError):  # it is gone, which is seen soon
            os.write(self._control, word)

    def listen(self) -> None:
        """Hear its signs of life, as far as there are any."""
        try:
            heard = os.read(self.life, 1 << 16)
        except BlockingIOError:
            return
        self.trains = self.trains or TRAINS in heard
        self.ends = self.ends or ENDS in heard
        self.imported = self.imported or ALIVE in heard
        if (told := _WHERE.search(heard)) is not None:
            self.where = told[1].decode()
        if ALIVE in heard or STARTS in heard:
            self._heard = time.monotonic()

    def silence(self, now: float) -> float:
        """Seconds from its last sign of life to ``now``; before the first one it is not known to live."""
        return now - self._heard if self._heard else 0.0

    def leave(self) -> None:
        """The launcher is gone: let the worker tell the others, and end."""
        self._say(ORPHANED)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVING)

    def end(self) -> None:
        """Kill it at once, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self._control)
        os.close(self.life)


class Keeper:
    """Starts, watches and replaces the workers of one rank."""

    def __init__(self, settings: ParallelConfig, process: Process) -> None:
        self._patience, self._name = settings.inprocess_heartbeat_timeout, f"rank {process.rank}"
        self._first, self._rank = 60 * settings.distributed_timeout_minutes, process.rank
        self._present: socket.socket | None = None
        self._stopped, self._launcher = False, os.getppid()
        self._active = Worker(self._launcher)
        self._ready: Worker | None = None  # once the first one trains: two that start at once start more slowly
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass the launcher's SIGTERM on. SIGINT from a terminal goes to the whole process group, so workers get it
        themselves."""
        self._stopped = True
        if number == signal.SIGTERM:
            self._active.process.send_signal(number)

    def run(self) -> int:
        """Run workers until one ends by itself, or the launcher has stopped it; returns its exit code."""
        fruitless = 0  # workers in a row that did not come to train
        # A keeper that is stopped replaces nobody, and torchrun waits for it: its end lets all be started again.
        life = SignsOfLife(f"{self._name}'s keeper", self._patience)
        try:
            self._active.begin(FIRST)
            while True:
                code = self._watch()
                # Popen has -N for a signal N.
                lost = code < 0 or code == REPLACE
                if not lost or self._stopped or self._active.ends:
                    # As shells report the signal N: 128 + N.
                    return 128 - code if code < 0 else min(code, 1) if lost else code
                fruitless = 0 if self._active.trains else fruitless + 1
                if fruitless > FRUITLESS:
                    print(
                        f"{self._name}: {fruitless} processes in a row were lost before they trained", file=sys.stderr
                    )
                    return 1
                self._replace("was lost" if code == REPLACE else f"was ended by {signal.Signals(-code).name}")
        finally:
            for worker in (self._active, self._ready):
                if worker is not None:
                    worker.end()
            life.close()

    def _watch(self) -> int:
        """Wait for the active worker to end; returns its exit code."""
        active, now = self._active, time.monotonic()
        while (code := active.process.poll()) is None:
            select.select([active.life], [], [], BEAT / 10)
            active.listen()
            before, now = now, time.monotonic()
            # This process was stopped itself (SIGSTOP, a suspended machine), at whatever point since the last look: the
            # silence is not the worker's.
            if now - before > BEAT / 10 + SUSPENDED:
                active.count_anew()
            if active.where is not None:
                self._be_present(active)
            if self._ready is not None:
                self._ready.listen()
            if self._ready is None and active.trains and not self._stopped:
                self._ready = Worker(self._launcher)
            # Adopted by init: the launcher has died.
            if os.getppid() != self._launcher:
                active.leave()
                return 1
            if (silence := active.silence(now)) > self._limit_of(active):
                print(f"{self._name}: no sign of life for {silence:.0f} s", file=sys.stderr, flush=True)
                active.process.kill()
                active.process.wait()
        active.listen()  # to its last words
        return code

    def _be_present(self, worker: Worker) -> None:
        """Connect to the keeper of rank 0, once the first worker knows where that is."""
        where, worker.where = worker.where, None
        if self._rank and self._present is None and where is not None:
            self._present = be_present(os.environ["MASTER_ADDR"], where, self._rank, self._patience)
            if self._present is None:
                print(f"{self._name}: its keeper does not reach that of rank 0", file=sys.stderr, flush=True)

    def _limit_of(self, worker: Worker) -> float:
        """Seconds without a sign of life after which a worker is killed."""
        if worker.ends:
            return max(self._patience, _ENDING)
        # A library that is read from a slow disk holds the interpreter until it is there.
        return self._patience if worker.imported else max(self._patience, self._first)

    def _replace(self, why: str) -> None:
        print(f"{self._name}: its process {why}: a standby process replaces it", file=sys.stderr, flush=True)
        # The spare worker may have died as well.
        if self._ready is not None and self._ready.process.poll() is not None:
            self._ready.end()
            self._ready = None
        self._active.end()
        self._active, self._ready = self._ready or Worker(self._launcher), None
        self._active.begin(REPLACES)
        if self._stopped:  # meanwhile: the one that heard it is gone
            self._active.process.send_signal(signal.SIGTERM)


def keep(settings: ParallelConfig, process: Process) -> int:
    """Start a worker with the command line of this process, replace it as often as needed, return its exit code.

    Raises:
        ConfigError: no launcher is there that could start all again where this does not help; or it would give the
            next start a store in which words of this one are.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError("--inprocess-restart needs torchrun, which starts all again where it cannot help")
    if os.environ.get(AGENT_STORE) == "True":
        raise ConfigError(
            f"--inprocess-restart needs {OWN_STORES}=1 in the environment of torchrun, and its --standalone or "
            "--rdzv-backend c10d: otherwise processes that are started again find old entries in the store"
        )
    store = _store(process)
    if store is not None:
        Presence(store, settings.inprocess_heartbeat_timeout)
    try:
        return Keeper(settings, process).run()
    finally:
        del store


def _store(process: Process) -> Any:
    """The store of this start, on rank 0: it has to outlive the worker that would host it otherwise."""
    if process.rank:
        return None
    from torch.distributed import TCPStore  # imported here: it takes seconds, and only rank 0 needs it

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=True, wait_for_workers=False)
