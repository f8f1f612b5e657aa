"""Processes with episodes of an environment; see ``environment``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from smp.rewards.child import Child
from smp.rewards.functions import RewardError


class EnvironmentPool:
    """Episodes divided over processes; those of one process take turns. A call that takes too long ends its process and
    all episodes in it; another process takes its place.

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
            self._hosts[0].start()
        except RewardError:
            self.close()
            raise

    def ask(self, method: str, episode: tuple[int, int], **arguments: Any) -> Future[Any]:
        """What a method of an episode answers (reset, step, reward; drop ends it without one); a RewardError where it
        fails."""
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
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="environment")

    def start(self) -> Child:
        """The process, which is there afterwards."""
        with self._lock:
            if self._closed:
                raise RewardError("the run ends")
            fresh = self._child is None
            child = self._child = self._child or Child("smp.rewards.environment", [self._spec])
        if fresh:
            child.wait_until_ready(f"environment {self._spec}")
        return child

    def ask(self, method: str, episode: str, arguments: Mapping[str, Any]) -> Any:
        """Runs in the thread."""
        if method == "drop" and episode not in self._episodes:
            return None  # it failed in there, and is gone
        child = self.start()
        if method == "reset":
            self._episodes.add(episode)
        elif episode not in self._episodes:
            raise RewardError(f"environment {self._spec}: {method}: its process ended in another episode")
        said = child.line(self._timeout) if child.send([method, episode, arguments]) else None
        if said is None:
            gone = child.ended
            child.kill()
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
