"""Ranks as threads that send under NCCL's rules, and know when all of them wait.

The first message between two ranks of a group stops both until they have come; later ones are posted, and move when
both sides have. Nothing is timed: when every rank that is left waits for something that no rank will do, each of them
raises :class:`HangError`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Predicate = Callable[[], bool]
Key = tuple[int, int, int]  # group, source, destination


class HangError(Exception):
    """Every rank waits for another one."""


class Wire:
    """Takes the place of ``torch.distributed`` in ``smp.parallel.links``, for ``ranks`` threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.here = ranks, threading.local()
        self.changed = threading.Condition()
        self.waiting: dict[int, Predicate] = {}
        self.running = set(range(ranks))
        self.groups: defaultdict[int, int] = defaultdict(int)  # made by each rank so far
        self.met: defaultdict[tuple[int, frozenset[int]], set[int]] = defaultdict(set)
        self.posted: defaultdict[tuple[Key, str], list[torch.Tensor]] = defaultdict(list)

    def run(self, body: Callable[[int], None]) -> list[BaseException]:
        """``body(rank)`` on every rank; returns what they raised."""
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self._run, args=(rank, body, errors)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def _run(self, rank: int, body: Callable[[int], None], errors: list[BaseException]) -> None:
        self.here.rank = rank
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)
        with self.changed:
            self.running.discard(rank)
            self.changed.notify_all()

    def wait_until(self, predicate: Predicate, what: str) -> None:
        """Raises HangError when that never comes."""
        rank = self.here.rank
        with self.changed:
            self.waiting[rank] = predicate
            self.changed.notify_all()
            while not predicate():
                if self.running <= self.waiting.keys() and not any(self.waiting[r]() for r in self.running):
                    raise HangError(f"rank {rank} waits for {what}")
                self.changed.wait()
            del self.waiting[rank]

    def get_process_group_ranks(self, group: object) -> list[int]:
        return list(range(self.ranks))

    def new_group(self, ranks: list[int], **options: object) -> int:
        """Every rank makes its groups in the same order."""
        self.groups[self.here.rank] += 1
        return self.groups[self.here.rank]

    def isend(self, tensor: torch.Tensor, to: int, group: int, tag: int) -> Any:
        assert tag == 0, "NCCL knows no tags: messages arrive in order"
        return self._post((group, self.here.rank, to), "sent", tensor.clone())

    def irecv(self, tensor: torch.Tensor, source: int, group: int, tag: int) -> Any:
        assert tag == 0, "NCCL knows no tags: messages arrive in order"
        return self._post((group, source, self.here.rank), "received", tensor)

    def _post(self, key: Key, side: str, tensor: torch.Tensor) -> Any:
        group, source, destination = key
        pair = self.met[group, frozenset((source, destination))]
        pair.add(self.here.rank)
        self.wait_until(lambda: len(pair) == 2, f"the other end of {source} -> {destination} to connect")
        with self.changed:
            sent, received = self.posted[key, "sent"], self.posted[key, "received"]
            own, number = self.posted[key, side], len(self.posted[key, side])
            own.append(tensor)
            if min(len(sent), len(received)) > number:
                received[number].copy_(sent[number])
            self.changed.notify_all()
        done = lambda: min(len(sent), len(received)) > number  # noqa: E731
        wait = lambda: self.wait_until(done, f"message {number} of {source} -> {destination}")  # noqa: E731
        return SimpleNamespace(wait=wait, is_completed=done)

    def mesh(self, rank: int) -> Any:
        """What links ask of a mesh."""
        return SimpleNamespace(
            get_local_rank=lambda: rank, size=lambda: self.ranks, get_group=lambda: None, device_type="cpu"
        )
