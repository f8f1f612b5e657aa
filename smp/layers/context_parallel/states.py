"""Context parallelism of a recurrence by its states: tokens stay where they are, and only states cross links.

A rank's tokens are pieces of sequences: runs of tokens that follow each other. What a piece makes of the state S before
it is affine, S -> M S + B, and its outputs are o + P S. Each rank computes M, B, o and P of its pieces at once. M and B
of all pieces are gathered, the states before each follow one from the other, and o + P S is left. Zig-zag pieces need
no order of their own, and a piece in which a document begins has M = 0 by itself. Of a delta rule M is a matrix; of
Mamba-2, whose states only fade, a number. Heads are computed some at a time, and what these make of states travels
while the next are computed, in the backward pass as well.

Bytes sent by each rank: (cp - 1) x pieces x heads x key_dim (key_dim + value_dim) x 4 each way, or without the first
key_dim where M is a number, whatever the length, and for the convolution the last tokens of each piece. An all-gather
of tokens would be their number times more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.transfer import to_device
from smp.parallel.collectives import Group, start_gather

_SHORTEST = 64
"""Tokens of a row, to which pieces are cut at the least."""


@dataclass(frozen=True, eq=False)
class StatesPlan:
    """The pieces of all ranks, of this one as rows of equal length.

    Attributes:
        rows, length: shape of this rank's pieces, equal on all ranks: padded with empty rows and tokens.
        order: int64 (rows x length,), index among the rank's tokens; the number of tokens stands for padding.
        back: int64 (tokens,), its inverse.
        last: int64 (rows x (conv - 1),), the last tokens of each row's piece, as indices of rows x length; the number
            rows x length stands for padding.
        before: int64 (rows x (conv - 1),), tokens before a row among the last ones of all rows of all ranks.
        steps: int64 (most pieces of a sequence, batch), the pieces of each sequence in their order among the rows of
            all ranks; their number stands for no piece.
        own: int64 (rows,), the number of a row among ``steps``.
    """

    rows: int
    length: int
    order: torch.Tensor
    back: torch.Tensor
    last: torch.Tensor
    before: torch.Tensor
    steps: torch.Tensor
    own: torch.Tensor

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length / cp, ...) -> (rows, length, ...), zeros where there is no token."""
        return _Moved.apply(x.flatten(0, 1), self.order, self.back).unflatten(0, (self.rows, self.length))

    def to_tokens(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """The inverse of :meth:`to_rows`."""
        return _Moved.apply(x.flatten(0, 1), self.back, self.order).unflatten(0, (batch, -1))

    def tokens_before(self, x: torch.Tensor, cp: Group) -> torch.Tensor:
        """The tokens before each row, (rows, conv - 1, channels), of x (rows, length, channels)."""
        last = start_gather(_taken(x.flatten(0, 1), self.last), cp)()
        return last[self.before].view(self.rows, -1, x.shape[2])

    def start_states_before(self, added: torch.Tensor, factor: torch.Tensor, cp: Group) -> Callable[[], torch.Tensor]:
        """Begin to exchange what each row makes of the state before it. What is returned gives those states, (rows,
        heads, key_dim, value_dim).

        Args:
            added: B, (rows, heads, key_dim, value_dim).
            factor: M, (rows, heads, key_dim, key_dim), or (rows, heads, 1, 1) where it is a number.
            cp: the ranks.
        """
        shapes = added.shape[1:], factor.shape[1:]
        # A piece that is none changes nothing.
        nothing = torch.eye(factor.shape[3], dtype=factor.dtype, device=factor.device).expand_as(factor[:1])
        none = torch.cat((torch.zeros_like(added[:1]).flatten(2), nothing.flatten(2)), 2)
        # (rows, heads, key_dim x value_dim + the elements of M): both in one message
        arrive = start_gather(torch.cat((added.flatten(2), factor.flatten(2)), 2), cp)

        def ended() -> torch.Tensor:
            # (rows of all ranks + 1, heads, ...): the last one stands for pieces that do not exist.
            whole = torch.cat((arrive(), none)).split([x[1] * x[2] for x in shapes], dim=2)
            return self._states(*(x.unflatten(2, shape[1:]) for x, shape in zip(whole, shapes, strict=True)))

        return ended

    def _states(self, added: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The state before each of this rank's rows, from the rows of all ranks and one empty row."""
        is_number = factor.shape[3] == 1
        # S -> M S + B from piece to piece, for all sequences at once. As many steps as a sequence has pieces, whatever
        # its length. Every rank does all of them, so there is no second exchange.
        state = added.new_zeros(self.steps.shape[1], *added.shape[1:])
        found = []
        for step in self.steps:
            # (batch, heads, key_dim, value_dim), before step ``len(found)`` of each sequence.
            found.append(state)
            state = added[step] + (factor[step] * state if is_number else factor[step] @ state)
        return torch.cat(found)[self.own]


class _Moved(torch.autograd.Function):
    """Rows of x by their numbers, zeros for the number after the last; each is taken once at most. (The gradient of an
    index would be a sum: slow, and on a GPU not deterministic.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return _taken(x, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _taken(grad, back), None, None


def _taken(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[order]


@dataclass(frozen=True)
class _Piece:
    """Tokens ``start`` to ``end`` of a sequence, which a rank has one after the other from ``at`` on."""

    row: int
    start: int
    end: int
    at: int


def _pieces(cut: SequenceCut, held: np.ndarray[Any, Any], longest: int) -> list[_Piece]:
    """Pieces of the columns that a rank holds, (batch, length / cp), in its order; none is longer than ``longest``."""
    found = []
    for row, columns in enumerate(held):
        first = row * cut.local_length
        # A piece ends where the next column is not the following one, and at ``longest`` tokens.
        edges = [0, *(np.flatnonzero(np.diff(columns) != 1) + 1), len(columns)]
        for low, high in pairwise(edges):
            for at in range(low, high, longest):
                end = min(at + longest, high)
                found.append(_Piece(row, int(columns[at]), int(columns[at]) + end - at, first + at))
    return found


def _all_pieces(cut: SequenceCut) -> tuple[int, list[list[_Piece]]]:
    """The length of rows that leaves least of them empty, and the pieces of all ranks."""
    held = [cut.index(rank).numpy() for rank in range(cut.cp)]
    best: tuple[int, int, list[list[_Piece]]] | None = None
    longest = cut.local_length
    # Rows have one length for all ranks: short pieces waste less of them, long ones send fewer states.
    while best is None or longest >= _SHORTEST:
        pieces = [_pieces(cut, columns, longest) for columns in held]
        length = max(piece.end - piece.start for own in pieces for piece in own)
        size = length * max(map(len, pieces))
        # Of about equals the longest: fewer states are sent.
        if best is None or size < 0.8 * best[0]:
            best = size, length, pieces
        longest = length // 2
    return best[1], best[2]


def states_plan(
    cut: SequenceCut, rank: int, conv: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, StatesPlan]:
    """(where documents begin and how many of its tokens are before each, as of the recurrence's rows, the plan) of
    ``rank``, for a convolution that sees ``conv`` tokens."""
    length, pieces = _all_pieces(cut)
    rows, tokens = max(map(len, pieces)), cut.batch * cut.local_length
    positions = cut.document_positions().numpy()
    order, here = np.full((rows, length), tokens), np.zeros((rows, length), dtype=np.int64)
    last = np.full((rows, conv - 1), rows * length)
    before = np.zeros((rows, conv - 1), dtype=np.int64)
    known = _last_tokens(pieces, rows, conv - 1)
    for number, piece in enumerate(pieces[rank]):
        count = piece.end - piece.start
        order[number, :count] = np.arange(piece.at, piece.at + count)
        here[number, :count] = positions[piece.row, piece.start : piece.end]
        for back in range(1, conv):
            if back <= count:
                last[number, -back] = number * length + count - back
            # 0 where no token precedes: the convolution masks it, as it masks tokens of other documents.
            before[number, -back] = known.get((piece.row, piece.start - back), 0)
    # One number more: empty places of rows have the number ``tokens``, and overwrite it in any order.
    inverse = np.empty(tokens + 1, dtype=np.int64)
    inverse[order.reshape(-1)] = np.arange(rows * length)
    steps, own = _steps(cut, pieces, rows, rank)
    arrays = order.reshape(-1), inverse[:tokens], last.reshape(-1), before.reshape(-1), steps, own
    plan = StatesPlan(rows, length, *(to_device(torch.from_numpy(x.copy()), device) for x in arrays))
    begins = torch.from_numpy((here == 0) & (order < tokens))
    return to_device(begins, device), to_device(torch.from_numpy(here), device), plan


def _last_tokens(pieces: list[list[_Piece]], rows: int, count: int) -> dict[tuple[int, int], int]:
    """Where the last ``count`` tokens of each piece are: (sequence, column) -> number among those of all rows of all
    ranks."""
    found = {}
    for rank, own in enumerate(pieces):
        for number, piece in enumerate(own):
            for back in range(1, min(count, piece.end - piece.start) + 1):
                found[piece.row, piece.end - back] = (rank * rows + number) * count + count - back
    return found


def _steps(
    cut: SequenceCut, pieces: list[list[_Piece]], rows: int, rank: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """``steps`` and ``own`` of :class:`StatesPlan`."""
    of_sequence: list[list[tuple[int, int]]] = [[] for _ in range(cut.batch)]
    for owner, own in enumerate(pieces):
        for number, piece in enumerate(own):
            of_sequence[piece.row].append((piece.start, owner * rows + number))
    steps = np.full((max(map(len, of_sequence)), cut.batch), len(pieces) * rows, dtype=np.int64)
    mine = np.zeros(rows, dtype=np.int64)  # before the first piece there is nothing, which is right for rows of none
    for row, found in enumerate(of_sequence):
        # By their first column: the order in which the state goes through the pieces of a sequence.
        for step, (_, number) in enumerate(sorted(found)):
            steps[step, row] = number
            if number // rows == rank:
                mine[number % rows] = step * cut.batch + row
    return steps, mine
