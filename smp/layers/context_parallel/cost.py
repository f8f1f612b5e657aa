"""Bytes that each exchange sends, by formula. Imports no torch, so it runs on a login node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Exchanged:
    """One layer's attention on one process.

    Attributes:
        tokens: of all sequences of a micro-batch, on this process.
        heads, groups: query heads and key/value heads, on this process.
        head_dim: width of a head.
        element: bytes of a number in the precision that is computed in.
        cp: processes that share the sequences.
        heads_group: of these, neighbours that exchange heads, for a2a+p2p.
    """

    tokens: int
    heads: int
    groups: int
    head_dim: int
    element: int
    cp: int
    heads_group: int = 1

    @property
    def query_bytes(self) -> int:
        """Bytes of this process's queries; its output has as many."""
        return self.tokens * self.heads * self.head_dim * self.element

    def key_bytes(self, copies: int = 1) -> int:
        """Bytes of this process's keys and values, with ``copies`` of each head."""
        return 2 * self.tokens * self.groups * copies * self.head_dim * self.element


class Sent(NamedTuple):
    """Bytes that a process sends."""

    forward: int
    backward: int


def bytes_sent(kind: str, of: Exchanged) -> Sent:
    """Bytes that a process sends for one layer and micro-batch, at most: a ring ends earlier where documents stay
    whole, or a window hides the rest.

    Args:
        kind: of --cp-comm-type, but not auto.
        of: sizes; for a2a and a2a+p2p the query heads are divisible by the processes that exchange them.
    """
    size = {"p2p": 1, "all_gather": 1, "a2a": of.cp, "a2a+p2p": of.heads_group}[kind]  # processes that exchange heads
    keys = of.key_bytes(key_copies(of.heads, of.groups, size))
    # Queries there and the output back, and keys and values there; a rank keeps 1 / size of each.
    both = (size - 1) * (2 * of.query_bytes + keys) // size
    statistics = (size - 1) * of.tokens * of.heads * 4 // size  # log-sum-exps
    rest = of.cp // size
    # In the backward pass keys travel again, and their gradients in fp32.
    return Sent(both + statistics + (rest - 1) * keys, both + (rest - 1) * (keys + keys * 4 // of.element))


def key_copies(heads: int, groups: int, ranks: int) -> int:
    """How often each key/value head is repeated so that ``ranks``, which divide ``heads``, can share them."""
    each = heads // groups
    return next(n for n in range(1, each + 1) if each % n == 0 and (groups * n) % ranks == 0)
