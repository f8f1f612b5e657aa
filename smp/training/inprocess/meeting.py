"""How ranks agree that an attempt has failed, and join the next one: a number and counters in a store.

Every attempt is a generation. A rank that detects a failure, or replaces a lost process, increments the number, once
per generation. All others see that within a quarter of a second, free everything that belongs to the generation, and
join the next one, which begins when all ranks have joined. No rank continues alone: if some do not join in time, all
processes end, and their launcher starts them again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from smp.config.parallel import ParallelConfig
from smp.training.inprocess.connections import bound_silence, cut_connections, open_connections
from smp.training.inprocess.link import FRUITLESS, REPLACE, SUSPENDED
from smp.training.inprocess.presence import WHERE
from smp.training.process import Process

LOOK = 0.25
"""Seconds between two looks at the number."""
_GRACE = 30.0
"""Least seconds that a store has to answer."""
_CUTS = 2.0
"""Seconds between two cuts of connections: a thread that does not know of the loss yet may make new ones."""


class GaveUpError(Exception):
    """There will be no next generation: the process has to end."""


class RunEndedError(Exception):
    """Others have ended the run, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run has ended with exit code {code}")
        self.code = code


class Meeting:
    """One process's part in the meetings. A thread watches the number while the run trains.

    Args:
        store: outlives all workers. Its connection is this object's alone.
        rank: of this process.
        size: ranks that have to come.
        stopped: whether the launcher wants an end.
        orphaned: whether the launcher is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        settings: ParallelConfig,
        rank: int,
        size: int,
        stopped: Callable[[], bool] = lambda: False,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stopped, self._orphaned = stopped, orphaned
        self._most, self._patience = settings.inprocess_max_iterations, settings.inprocess_barrier_timeout
        self._first = max(self._patience, 60 * settings.distributed_timeout_minutes)  # processes start, files are read
        self._hard = settings.inprocess_heartbeat_timeout
        self.number = -1
        """Number of the generation that this process is in."""
        self._lock = threading.Lock()  # of the next one, and of cuts
        self._spared: set[str] | None = None  # None: in no generation, nothing to cut
        self._seen = self._next_cut = 0.0
        self._closed = threading.Event()
        # Only the first process that comes sets it.
        store.compare_set("number", "", "0")
        threading.Thread(target=self._watch, name="meeting", daemon=True).start()

    @staticmethod
    def of(settings: ParallelConfig, process: Process, stopped: Callable[[], bool]) -> Meeting:
        """A meeting at the store that torchrun's variables name.

        Raises:
            RuntimeError: nobody answers there.
        """
        first = 60 * settings.distributed_timeout_minutes  # the keeper of rank 0 may come late
        timeout = timedelta(seconds=max(settings.inprocess_barrier_timeout, _GRACE, first))
        before = open_connections()
        store, _, _ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
        bound_silence(before, settings.inprocess_heartbeat_timeout)
        orphaned = (lambda: False) if (link := process.link) is None else (lambda: link.orphaned)
        if process.link is not None:
            # The keeper of rank 0 sets it as soon as there is a store.
            process.link.keepers_meet_at(store.get(WHERE).decode())
        store = dist.PrefixStore("smp/inprocess", store)
        return Meeting(store, settings, process.rank, process.world_size, stopped, orphaned)

    def current(self) -> int:
        """The number in the store."""
        return int(self._store.get("number"))

    @property
    def broken(self) -> bool:
        """Whether the generation that this process is in is lost."""
        return self.current() != self.number

    def lose(self, number: int | None = None) -> None:
        """Declare a generation lost, by default that of this process."""
        number = self.number if number is None else number
        # Compare and set: the second one changes nothing, so each loss counts once.
        self._store.compare_set("number", str(number), str(number + 1))

    def meet(self, replaces: bool = False) -> int:
        """Wait for all ranks; returns the number of the generation that begins.

        Args:
            replaces: this process replaces one that was lost, and with it the generation it had come to.

        Raises:
            GaveUpError: they do not come, or it is no use.
            RunEndedError: others have ended the run.
        """
        # The store's client waits without a limit for one that is stopped.
        seconds = 2 * (self._first if self.number < 0 else self._patience) + _GRACE
        limit = threading.Timer(seconds, self._give_up, (seconds,))
        limit.daemon = True
        limit.start()
        try:
            # The generation that the lost worker had come to is written under its rank.
            if replaces and self._store.check([own := f"rank {self._rank}"]):
                self.lose(int(self._store.get(own)))
            while not self._all_came(number := self.current()):
                pass
        except dist.DistError as error:
            raise GaveUpError(f"the store of this start does not answer: {error}") from error
        finally:
            limit.cancel()
        # Connections from before the run, such as the store's, are spared by cuts.
        with self._lock:
            self.number, self._spared = number, set(open_connections())
        return number

    def _give_up(self, seconds: float) -> None:
        _say(f"rank {self._rank}: no in-process restart: no answer from the store of this start for {seconds:.0f} s")
        os._exit(1)

    def _all_came(self, number: int) -> bool:
        """Whether all ranks have come to this generation; if not, it is lost before it began."""
        if self._most is not None and number > self._most:
            raise GaveUpError(f"--inprocess-max-iterations {self._most} reached")
        if number >= FRUITLESS and len(reached := self._reached(number)) <= 1:
            raise GaveUpError(f"{FRUITLESS} times in a row no further than iteration {max(reached, default=0)}")
        self._store.set(f"rank {self._rank}", str(number))  # first: who dies in between has come
        patience = self._patience if number else self._first
        # ``add`` counts each rank once; below 0 is added to read.
        came, deadline = self._store.add(f"{number} came", 1), time.monotonic() + patience
        while came < self._size:
            # Large runs ask the store less often: it answers all ranks one by one.
            time.sleep(max(0.02, self._size / 10000))
            if self._store.check(["ended"]):
                raise RunEndedError(int(self._store.get("ended")))
            if self._store.check(["gone"]):
                raise GaveUpError(f"the keeper of rank {self._store.get('gone').decode()} is gone")
            if self._store.check(["left"]):
                raise GaveUpError("another process has done its work, and ended")
            if self._stopped():
                raise GaveUpError("the launcher ends this process")
            if time.monotonic() > deadline:
                raise GaveUpError(f"{came} of {self._size} processes came within {patience:.0f} s")
            if self.current() != number:
                return False
            came = self._store.add(f"{number} came", 0)
        return True

    def _reached(self, number: int) -> set[int]:
        """Iterations at which the last generations began training, of those that did."""
        keys = [f"{one} began" for one in range(number - FRUITLESS, number)]
        return {int(self._store.get(key)) for key in keys if self._store.check([key])}

    def began(self, iteration: int) -> None:
        """Note that this generation has its state, and continues from ``iteration``. Rank 0 calls it."""
        self._store.set(f"{self.number} began", str(iteration))

    def end(self, code: int) -> None:
        """Tell the others that the run has ended here by itself, so that nobody waits for this process."""
        self._store.set("ended", str(code))

    def leave(self) -> None:
        """Tell the others that this process has done its work, while rank 0 may have some left, and comes no more."""
        self._store.set("left", str(self._rank))

    def let_go(self) -> None:
        """Leave this generation: cut its connections, so that all others that wait get an error, too."""
        with self._lock:
            spared, self._spared = self._spared, None
            if spared is not None:
                cut_connections(spared)

    def close(self) -> None:
        """Stop watching, and cut nothing from now on."""
        self._closed.set()
        with self._lock:
            self._spared = None

    def _watch(self) -> None:
        asked = time.monotonic()
        while not self._closed.wait(LOOK):
            if self._seen and time.monotonic() - asked > LOOK + SUSPENDED:
                # Suspended: the time since the loss was seen does not count against this process.
                self._seen = time.monotonic()
            try:
                self._look()
            except dist.DistError:
                return  # without the store there is no next generation; this one may go on to its end
            asked = time.monotonic()

    def _look(self) -> None:
        if self._orphaned():
            self.end(1)  # a node less: the launchers of the others start again without it
            self.lose(self.current())
            os._exit(1)
        spared = self._spared
        if spared is None or not self.broken:
            self._seen = 0.0
            return
        self._seen = self._seen or time.monotonic()
        with self._lock:
            # A new generation may have begun: its connections are not to be cut.
            if self._spared is not spared:  # it was left while the store answered
                return
            if time.monotonic() >= self._next_cut:
                self._next_cut = time.monotonic() + _CUTS
                cut_connections(spared)
            # The main thread is stuck where cut connections do not wake it.
            if time.monotonic() - self._seen > self._hard:
                _say(f"this process has not left a run that was lost {self._hard:.0f} s ago, and is replaced")
                os._exit(REPLACE)


def _say(line: str) -> None:
    """Write a line from any thread, not through Python's stream, whose lock a stuck thread may hold."""
    with suppress(OSError):  # nobody reads it
        os.write(sys.stderr.fileno() if sys.stderr is not None else 2, f"{line}\n".encode())
