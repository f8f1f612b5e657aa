"""Check that all ranks of a group begin the same collective, before any of its data is sent.

gloo ends the process that receives more bytes than it waits for, and its peers then blame a lost rank. So each rank
says in a message of fixed size what it calls, and learns in log2(ranks) rounds the first and the last of what all say,
in the order of the texts: where these differ, every rank can name the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from smp.parallel.network.run import Posted, Transport

_TEXT, _RANK = 156, 4


@dataclass(frozen=True)
class Call:
    """A collective as a rank calls it.

    Attributes:
        kind: name of the collective, for messages.
        size: in bytes, what has to be the same on all ranks.
        detail: dtype, operation, root.
    """

    kind: str
    size: int
    detail: str = ""

    def __str__(self) -> str:
        size = f" of {self.size:,} bytes" if self.size else ""
        return f"{self.kind}{size}{f' ({self.detail})' if self.detail else ''}"


def first_and_last(
    said: str, rank: int, size: int, transport: Transport, wait: Callable[[Posted, int], None]
) -> tuple[tuple[str, int], tuple[str, int]]:
    """The first and the last of the texts of all ranks, each with the first rank that says it.

    Args:
        said: by this rank.
        wait: for a message from or to the rank that is named.
    """
    text = _of_fixed_size(said.encode())
    # Of several ranks that say the same the lowest one, in both.
    # Bytes compare first by text, then by rank. The rank counts down in ``last``, of which the largest is kept.
    first, last = (text + number.to_bytes(_RANK, "big") for number in (rank, size - 1 - rank))
    step = 1
    while step < size:
        mine = torch.frombuffer(bytearray(first + last), dtype=torch.uint8)
        other = torch.empty_like(mine)
        # Dissemination: after the round of step s each rank knows of 2 s ranks before it. Minimum
        # and maximum do not mind that some are counted twice.
        to, source = (rank + step) % size, (rank - step) % size
        sent, received = transport.send(mine, to), transport.receive(other, source)
        wait(received, source)
        wait(sent, to)
        found = bytes(other.numpy())
        first, last = min(first, found[: len(first)]), max(last, found[len(first) :])
        step *= 2
    (low, rank), (high, number) = _decoded(first), _decoded(last)
    return (low, rank), (high, size - 1 - number)


def _of_fixed_size(text: bytes) -> bytes:
    """``text`` as bytes of fixed size. A longer text is cut and ends in a hash, so that different texts stay
    different."""
    if len(text) > _TEXT:
        digest = b"... " + hashlib.sha256(text).hexdigest()[:16].encode()
        text = text[: _TEXT - len(digest)] + digest
    return text.ljust(_TEXT, b"\0")


def _decoded(said: bytes) -> tuple[str, int]:
    return said[:_TEXT].rstrip(b"\0").decode(errors="replace"), int.from_bytes(said[_TEXT:], "big")
