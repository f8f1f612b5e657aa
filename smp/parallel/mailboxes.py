"""Messages between ranks of one machine through memory that they share, for a pipeline's links.

Each channel, from one rank to another, has a list of its messages and room for the bytes of a few of them. Who sends
copies the tensor there and goes on: the message is delivered while the other one computes. Who receives copies it out,
and the room is free again. A message that finds no room, or is larger than that, goes over gloo, and the list says so:
how much there is room for changes how fast a message is, never whether it arrives.

A rank that waits for a message or for room in the list learns within moments that the other one's process ended, that
it left the group, or that a collective of the group failed there.
"""

from __future__ import annotations

import mmap
import socket
import sys
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp.parallel.shared_memory import (
    DTYPES,
    HEADER,
    LEFT,
    WHY,
    AbsentRankError,
    close_all,
    has_ended,
    numbers_of,
    share,
)
from smp.parallel.shared_numbers import AbsentError

Channel = tuple[int, int]  # source, destination
ROOM = 32 << 20
"""Bytes of the largest message that goes through memory. Pages that nothing was written to take none."""
ROOMS = 8
"""Rooms of each channel."""
LISTED = 1024
"""Messages of a channel that have not been received: one more waits for the receiver. (A schedule has as many under way
as it has micro-batches, at most.)"""
_LINE = 8
"""Numbers (int64) of a cache line: what two processes write lies on different ones."""
_SENT, _TAKEN, _USED, _LIST = 0, _LINE, 2 * _LINE, 3 * _LINE
"""Where in a channel's numbers is what: how many messages were sent, how many received, which rooms are in use, and
for each message bytes, dtype and room."""
_NUMBERS = _LIST + LISTED
_GLOO = ROOMS
"""In place of a room."""


class Mailboxes:
    """The channels of one group.

    Args:
        channels: the same on all ranks.
        memory: numbers of all channels after HEADER, then their rooms.
        processes: descriptors of the other ranks' processes, by rank.
        gone: why a rank has told that it does not go on, in :data:`WHY`; 0: it has not.
        timeout: of a message.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        channels: Iterable[Channel],
        memory: mmap.mmap,
        processes: dict[int, int],
        gone: Callable[[int], int],
        timeout: timedelta,
    ) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout.total_seconds()
        self._processes, self._gone = processes, gone
        self._numbers, ordered = numbers_of(memory, size), sorted(channels)
        self._starts = {channel: HEADER // 8 + i * _NUMBERS for i, channel in enumerate(ordered)}
        with torch.inference_mode(False):
            rooms = torch.frombuffer(memory, dtype=torch.uint8, offset=_rooms_at(len(ordered)))
        self._rooms = dict(zip(ordered, rooms.view(len(ordered), ROOMS, ROOM), strict=True))
        self._counts = dict.fromkeys(ordered, 0)  # messages that this rank has sent or asked for
        self._close = weakref.finalize(self, close_all, tuple(processes.values()))

    def send(self, x: torch.Tensor, to: int) -> int | None:
        """Deliver a message; what is returned is its tag where it has to go over gloo."""
        channel = self._rank, to
        start, values, number = self._starts[channel], self._numbers.values, self._counts[channel]
        self._counts[channel] += 1
        if number - values[start + _TAKEN] >= LISTED:
            self._wait(start + _TAKEN, number - LISTED + 1, to, "has not received")
        used = start + _USED
        small = fits(x)
        room = next((i for i in range(ROOMS) if small and not values[used + i]), _GLOO)
        if room != _GLOO:
            # Numbers last: a rank that sees them sees the bytes (x86 keeps the order of stores).
            values[used + room] = 1
            self._rooms[channel][room, : x.nbytes].view(x.dtype).copy_(x.detach().reshape(-1))
        values[start + _LIST + number % LISTED] = _describe(x, room)
        self._numbers.publish(start + _SENT, number + 1)
        return _tag(number) if room == _GLOO else None

    def receive(self, into: torch.Tensor, source: int, over_gloo: Callable[[int], dist.Work]) -> ReceivedWork:
        """The next message of a rank; ``over_gloo`` begins to receive one with this tag by gloo."""
        channel = source, self._rank
        number = self._counts[channel]
        self._counts[channel] += 1
        # What fits in no room comes by gloo, which moves nothing before both ends have begun: a sender may wait for its
        # message to be received before this rank waits for it.
        begun = None if fits(into) else over_gloo(_tag(number))
        return ReceivedWork(self, channel, number, into, lambda: begun or over_gloo(_tag(number)))

    def take(self, channel: Channel, number: int, into: torch.Tensor, over_gloo: Callable[[], dist.Work]) -> None:
        """Wait for a message and copy it.

        Raises:
            AbsentRankError: it does not come.
            RuntimeError: it is not as large as ``into``, or of another dtype.
        """
        start, values = self._starts[channel], self._numbers.values
        if values[start + _SENT] <= number:
            self._wait(start + _SENT, number + 1, channel[0], "has not sent")
        told = values[start + _LIST + number % LISTED]
        room = told & 15
        if told != _describe(into, room):
            nbytes, index = told >> 16, told >> 4 & 255
            dtype = DTYPES[index] if index < len(DTYPES) else "another dtype"
            raise RuntimeError(
                f"a message from rank {channel[0]} of {nbytes:,} bytes ({dtype}) for a tensor of {into.nbytes:,} bytes "
                f"({into.dtype})"
            )
        if room == _GLOO:
            over_gloo().wait()
        else:
            into.detach().copy_(self._rooms[channel][room, : into.nbytes].view(into.dtype).view(into.shape))
            values[start + _USED + room] = 0
        self._numbers.publish(start + _TAKEN, values[start + _TAKEN] + 1)

    def _wait(self, at: int, least: int, other: int, what: str) -> None:
        def absent(passed: float) -> str:
            gone = self._gone(other) or LEFT * has_ended(self._processes[other], passed)
            if not gone and passed < self._timeout:
                return ""
            return (
                f"after {passed:.1f} s on rank {self._rank} of {self._size} on {socket.gethostname()}: rank {other} of "
                f"the group {what}: {WHY[gone]}"
            )

        try:
            self._numbers.wait(at, least, absent)
        except AbsentError as error:
            raise AbsentRankError(str(error)) from None


class ReceivedWork(dist.Work):
    """The handle of a message that is received where it is waited for."""

    def __init__(
        self,
        mailboxes: Mailboxes,
        channel: Channel,
        number: int,
        into: torch.Tensor,
        over_gloo: Callable[[], dist.Work],
    ) -> None:
        super().__init__()
        self._mailboxes, self._channel, self._number, self._over_gloo = mailboxes, channel, number, over_gloo
        self._into: torch.Tensor | None = into

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._into is not None:
            self._mailboxes.take(self._channel, self._number, self._into, self._over_gloo)
            self._into = None
        return True

    def is_completed(self) -> bool:
        return self._into is None


def fits(x: torch.Tensor) -> bool:
    """Whether a message can go through a room; the same on both ends."""
    return x.nbytes <= ROOM and x.dtype in DTYPES and x.device.type == "cpu"


def _describe(x: torch.Tensor, room: int) -> int:
    return x.nbytes << 16 | (DTYPES.index(x.dtype) if x.dtype in DTYPES else 255) << 4 | room


def _tag(number: int) -> int:
    """The tag of a message over gloo: no other one under way has it, and messages without mailboxes have 0."""
    return number % LISTED + 1


def _rooms_at(channels: int) -> int:
    """Bytes before the first room: whole pages."""
    return -(-(HEADER + 8 * _NUMBERS * channels) // mmap.PAGESIZE) * mmap.PAGESIZE


def open_mailboxes(group: Any, channels: Iterable[Channel], timeout: timedelta | None) -> Mailboxes | None:
    """Mailboxes of a group whose ranks share memory, or None on all of its ranks, which all call this.

    Args:
        group: of the backend ``smp_node``; others have none.
        channels: that will be used, of ranks in the group; the same on all of them.
    """
    known = list(channels)
    if getattr(group, "memory", None) is None or not known:
        return None
    found = share(group.rank(), group.size(), group.new_store(), _rooms_at(len(known)) + len(known) * ROOMS * ROOM)
    if found is None:
        if group.rank() == 0:
            print("note: messages of the pipeline go by gloo: the system has no memory for them", file=sys.stderr)
        return None
    return Mailboxes(group.rank(), group.size(), known, *found, group.memory.gone, timeout or group.network.timeout)
