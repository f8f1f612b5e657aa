"""Processes with episodes of an environment; see ``environment``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from smp.rewards.child import Child
from smp.rewards.functions import RewardError


class EnvironmentPool:
    """Episodes divided over processes; those of one process take turns. A call that takes too long ends its process
    with all its episodes, and another process replaces it.

    Args:
        spec: ``FILE.py:CLASS``.
        workers: processes.
        timeout: seconds that a method may take.

    Raises:
        RewardError: there is no such class, or its file fails; the first process is waited for.
    """

    def __init__(self, spec: str, workers: int = 1, timeout: float = 60.0) -> None:
        self._hosts = [_Host(spec, timeout) for _ in range(workers)]
        try:
            # Started now: a wrong file must end the run at once, not at the first completion.
            self._hosts[0].start()
        except RewardError:
            self.close()
            raise

    def ask(self, method: str, episode: tuple[int, int], **arguments: Any) -> Future[Any]:
        """The answer of a method of an episode (reset, step, reward; drop ends it without a reward), or a RewardError
        where it fails."""
        # An episode's instance lives in one process: all of its calls must go there.
        host = self._hosts[hash(episode) % len(self._hosts)]
        return host.thread.submit(host.ask, method, "/".join(map(str, episode)), arguments)

    def close(self) -> None:
        """End the processes."""
        for host in self._hosts:
            host.close()


class _Host:
    """One process and the thread that talks to it."""

    def __init__(self, spec: str, timeout: float) -> None:
        self._spec, self._timeout = spec, timeout
        self._child: Child | None = None
        self._episodes: set[str] = set()
        self._lock, self._closed = threading.Lock(), False
        # One thread: calls of one process are made one after the other.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    def start(self) -> Child:
        """The process; starts it if necessary."""
        with self._lock:
            # close() may run at the same time in another thread.
            if self._closed:
                raise RewardError("the run ends")
            fresh = self._child is None
            child = self._child = self._child or Child("smp.rewards.environment", [self._spec])
        if fresh:
            child.wait_until_ready(f"environment {self._spec}")
        return child

    def ask(self, method: str, episode: str, arguments: Mapping[str, Any]) -> Any:
        """Ask the process; runs in the thread."""
        if method == "drop" and episode not in self._episodes:
            return None  # it failed in there, and is gone
        child = self.start()
        if method == "reset":
            self._episodes.add(episode)
        elif episode not in self._episodes:
            raise RewardError(f"environment {self._spec}: {method}: its process ended in another episode")
        said = child.line(self._timeout) if child.send([method, episode, arguments]) else None
        if said is None:
            # Order: whether it ended by itself must be known before it is killed.
            gone = child.ended
            child.kill()
            # All episodes of the process are lost; a later reset starts a new one.
            self._child, self._episodes = None, set()
            why = "ended its process" if gone else f"did not return within {self._timeout:g} s (--reward-timeout)"
            raise RewardError(f"environment {self._spec}: {method} {why}")
        if "error" in said or method in ("reward", "drop"):
            self._episodes.discard(episode)
        if "error" in said:
            raise RewardError(said["error"])
        return said["answer"]

    def close(self) -> None:
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            child.kill()
        self.thread.shutdown(wait=True, cancel_futures=True)
