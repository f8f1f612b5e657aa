"""All ranks of a collective in one process: messages in memory, ranks in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smp.parallel.network.collective_schedule import Message, Schedule
from smp.parallel.network.run import Execution, pieces_of


@dataclass
class Post:
    """A message that one side has posted; done when the other has, too."""

    tensor: torch.Tensor
    done: bool = False

    def wait(self, timeout: object) -> None:
        assert self.done


@dataclass
class Wires:
    """Channels between ranks, each a queue of sends or of receives that nothing has met yet."""

    sends: dict[tuple[int, int], deque[Post]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[Post]] = field(default_factory=dict)

    def post(self, channel: tuple[int, int], tensor: torch.Tensor, sending: bool) -> Post:
        mine, others = (self.sends, self.receives) if sending else (self.receives, self.sends)
        post, waiting = Post(tensor), others.get(channel)
        if not waiting:
            mine.setdefault(channel, deque()).append(post)
            return post
        other = waiting.popleft()
        source, into = (post, other) if sending else (other, post)
        assert source.tensor.shape == into.tensor.shape and source.tensor.dtype == into.tensor.dtype
        into.tensor.copy_(source.tensor)
        post.done = other.done = True
        return post


@dataclass
class Wire:
    """One rank's end."""

    wires: Wires
    rank: int

    def send(self, tensor: torch.Tensor, to: int) -> Post:
        return self.wires.post((self.rank, to), tensor, sending=True)

    def receive(self, into: torch.Tensor, source: int) -> Post:
        return self.wires.post((source, self.rank), into, sending=False)


def run_together(
    schedule: Schedule,
    given: Sequence[torch.Tensor],
    sizes: Sequence[int],
    wired: Callable[[int, Wire], Any] = lambda rank, wire: wire,
) -> list[torch.Tensor]:
    """What each rank has in the end: of a reduce-scatter its piece, else the whole. ``wired`` makes a rank's transport
    of its wire."""
    wires, wholes, owns = Wires(), [tensor.clone() for tensor in given], list[Any]()
    running: list[tuple[Iterator[tuple[Message, Any]], Any]] = []
    for rank, whole in enumerate(wholes):
        own = torch.full((sizes[rank],), 99, dtype=whole.dtype) if schedule.kind == "reduce-scatter" else None
        owns.append(own)
        execution = Execution(
            schedule.kind,
            schedule.chunks,
            schedule.actions[rank],
            rank,
            pieces_of(whole, sizes),
            wired(rank, Wire(wires, rank)),
            own,
        )
        running.append((execution.steps(), None))
    while running:
        left = []
        for steps, waiting in running:
            while waiting is None or _came(waiting):
                _, waiting = next(steps, (None, None))
                if waiting is None:
                    break
            else:
                left.append((steps, waiting))
        assert len(left) < len(running) or _moved(left, running), "nobody moves"
        running = left
    assert not any(map(len, [*wires.sends.values(), *wires.receives.values()]))
    return wholes if owns[0] is None else owns


def _came(waiting: Any) -> bool:
    """Wait for a message if that takes no time: what is coded is decoded then."""
    done = getattr(waiting, "posted", waiting).done
    if done:
        waiting.wait(None)
    return bool(done)


def _moved(left: Sequence[tuple[Any, Any]], before: Sequence[tuple[Any, Any]]) -> bool:
    return any(a[1] is not b[1] for a, b in zip(left, before, strict=True))
