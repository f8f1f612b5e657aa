"""Processes that call reward functions while the model keeps generating."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from smp.rewards.child import Child
from smp.rewards.functions import Call, RewardError, Scored


class RewardPool:
    """Calls functions in their own processes. A call that takes too long ends its process, and another one replaces it.

    Args:
        specs: of the functions.
        workers: processes.
        timeout: seconds that one function may take for one call.

    Raises:
        RewardError: a function cannot be found, or its file fails.
    """

    def __init__(self, specs: Sequence[str], workers: int = 1, timeout: float = 60.0) -> None:
        self._specs, self._timeout = list(specs), timeout
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        try:
            # All are started before the first is waited for: loading their files takes seconds to minutes.
            for worker in [self._started() for _ in range(workers)]:
                worker.wait_until_ready()
                self._free.put(worker)
        except RewardError:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")

    def submit(self, call: Call) -> Future[list[Scored]]:
        """The results of each function, as a future."""
        return self._threads.submit(self._score, call)

    def close(self) -> None:
        """End the processes; their work is lost."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            worker.kill()
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _started(self) -> _Worker:
        worker = _Worker(self._specs)
        with self._lock:
            self._all.add(worker)
            # Checked under the lock, so that close() either sees the worker or stops it here.
            closed = self._closed
        if closed:
            worker.kill()
            raise RewardError("the run ends")
        return worker

    def _score(self, call: Call) -> list[Scored]:
        # As many threads as workers: a free one is there at once.
        worker, found = self._free.get(), dict[int, Scored]()
        try:
            while len(found) < len(self._specs):
                try:
                    worker.score(call, self._timeout, found, len(self._specs))
                except _LostWorkerError as lost:
                    worker.kill()
                    error = f"reward function {self._specs[lost.function]} {lost}"
                    found[lost.function] = Scored([None] * len(call.completions), error, 0.0)
                    with self._lock:
                        self._all.discard(worker)
                    # The functions that it has not called are called by this one.
                    worker = self._started()
                    worker.wait_until_ready()
            return [found[i] for i in range(len(self._specs))]
        finally:
            # Also after an error: the number of workers in the queue stays the same.
            self._free.put(worker)


class _LostWorkerError(Exception):
    """A process was too slow in a function, or ended."""

    def __init__(self, why: str, function: int) -> None:
        super().__init__(why)
        self.function = function


class _Worker:
    """One process, which makes one call at a time."""

    def __init__(self, specs: list[str]) -> None:
        self._child = Child("smp.rewards.worker", specs)

    def wait_until_ready(self) -> None:
        self._child.wait_until_ready("reward functions")

    def score(self, call: Call, timeout: float, found: dict[int, Scored], functions: int) -> None:
        """Call those of the functions that are not in ``found``, where their rewards go."""
        # The time limit is for each function: what is said of one starts it anew.
        function = next(i for i in range(functions) if i not in found)
        if not self._child.send([list(found), call]):
            raise _LostWorkerError("ended its process", function)
        while len(found) < functions:
            said = self._child.line(timeout)
            if said is None:
                gone = self._child.ended
                why = "ended its process" if gone else f"did not return within {timeout:g} s (--reward-timeout)"
                raise _LostWorkerError(why, function)
            function = said["function"]
            if said["scored"] is not None:
                found[function] = Scored(*said["scored"])

    def kill(self) -> None:
        self._child.kill()
