"""Executes a schedule on this rank's tensors, over any transport of messages.

Gathers move bytes: every result has the bits that its owner gave. Sums are taken in the order that the schedule says,
so their bits depend on neither timing nor chunks; numbers of less than 32 bits are added in fp32 and rounded when a
node's sum is sent on, and at the end: at most one rounding per node's sum and one more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Protocol

import torch

from smp.parallel.network.collective_schedule import Action, Kind, Message, Op, span, waits


class Posted(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta) -> object:
        """Wait until it has left, or is there; raises when it is late or its other end is gone."""


class Transport(Protocol):
    """Point-to-point messages of one collective. Those of one channel arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor, to: int) -> Posted:
        """Begin to send a contiguous tensor, which stays as it is until the message has left."""

    def receive(self, into: torch.Tensor, source: int) -> Posted:
        """Begin to receive into a contiguous tensor."""


class Execution:
    """One rank's part in one collective.

    Args:
        kind: of the collective.
        chunks: number of each piece's.
        actions: of this rank, of a valid schedule.
        rank: this one's, in the schedule.
        pieces: 1-D views of all pieces, contiguous, by rank. A gather fills all but this rank's own; a reduce-scatter
            only reads them; an all-reduce replaces them.
        transport: to the other ranks.
        own: of a reduce-scatter: where the sum goes, as long as this rank's piece.
    """

    def __init__(
        self,
        kind: Kind,
        chunks: Sequence[int],
        actions: Sequence[Action],
        rank: int,
        pieces: Sequence[torch.Tensor],
        transport: Transport,
        own: torch.Tensor | None = None,
    ) -> None:
        self.kind, self.chunks, self.actions, self.rank = kind, chunks, actions, rank
        self.pieces, self.transport, self.own = pieces, transport, own
        self._messages: dict[Message, Posted] = {}  # on their way to this rank
        self._parts: dict[Message, torch.Tensor] = {}
        self._now: dict[tuple[int, int], torch.Tensor] = {}  # sums of chunks so far, where there are any
        self._leaving: list[tuple[Message, Posted]] = []

    def steps(self) -> Iterator[tuple[Message, Posted]]:
        """Run; yields each message that has to be waited for before the next step."""
        for action, needed in waits(self.rank, self.actions):
            # Yielded and not waited for here: the caller knows the time limit and names the rank that is late.
            for message in needed:
                yield message, self._messages.pop(message)
            self._act(action)
        # Receives that nothing has waited for: pieces that this rank does not pass on.
        yield from self._messages.items()
        yield from self._leaving
        self._store()  # last: where it goes may be a part of what is still being sent

    def _act(self, action: Action) -> None:
        if action.op is Op.SEND:
            # The sum so far where there is one, else what this rank was given.
            posted = self.transport.send(self._current(action), action.peer)
            self._leaving.append(((self.rank, action.peer, *action.key), posted))
        elif action.op is Op.REDUCE:
            parts = [
                self._current(action) if source == self.rank else self._parts.pop((source, self.rank, *action.key))
                for source in action.ranks
            ]
            self._now[action.key] = add_up(parts)
        else:
            message = (action.peer, self.rank, *action.key)
            into = self._chunk(action)
            if action.op is Op.RECEIVE:
                # An all-reduce: the final sum replaces the partial one of this rank.
                self._now.pop(action.key, None)
            else:
                # Scratch memory until the sum; ``WINDOW`` in ``schedules`` bounds how much.
                into = self._parts[message] = torch.empty_like(into)
            self._messages[message] = self.transport.receive(into, action.peer)

    def _chunk(self, action: Action) -> torch.Tensor:
        piece = self.pieces[action.piece]
        start, stop = span(piece.numel(), self.chunks[action.piece], action.chunk)
        return piece[start:stop]

    def _current(self, action: Action) -> torch.Tensor:
        found = self._now.get(action.key)
        return self._chunk(action) if found is None else found

    def _store(self) -> None:
        """Put this rank's sums where they belong."""
        if self.kind == "all-gather":
            return
        into = self.pieces[self.rank] if self.own is None else self.own
        chunks = self.chunks[self.rank]
        for chunk in range(chunks):
            start, stop = span(into.numel(), chunks, chunk)
            found = self._now.get((self.rank, chunk))
            into[start:stop] = self.pieces[self.rank][start:stop] if found is None else found


def add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum in their order, a new tensor; in fp32 where they have fewer bits."""
    first, second, *others = parts
    narrow = first.is_floating_point() and first.element_size() < 4
    total = torch.add(first.float(), second.float()) if narrow else torch.add(first, second)
    for part in others:
        total += part
    return total.to(first.dtype)


def pieces_of(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Views of consecutive pieces of a contiguous tensor, which are written without autograd's notice.

    Raises:
        ValueError: it is not contiguous, or of another size.
    """
    if not tensor.is_contiguous() or tensor.numel() != sum(sizes):
        raise ValueError(f"a contiguous tensor of {sum(sizes)} elements is needed, got {tuple(tensor.shape)}")
    flat, starts = tensor.detach().view(-1), accumulate(sizes, initial=0)
    return [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]
