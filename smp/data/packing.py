"""Best-fit-decreasing packing: whole documents into sequences of a fixed capacity.

Documents are placed longest first, each into the sequence with the least room that still holds it, or into a new one.
No document is split. Cutting a stream of documents every ``capacity`` tokens instead needs hardly fewer sequences, but
cuts many documents that would have fitted (Ding et al., ICML 2024, arXiv 2404.10830).

Equal lengths are placed together. Once a sequence with room r takes a document of length n, its new room r - n is the
best fit for the next document of that length as long as n fits, so it takes r // n of them in a row; all sequences with
the same room behave alike. The work is a step per (length, room) that meet, not per document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Packing:
    """Sequences, numbered as they were opened: sequence s holds ``order[offsets[s] : offsets[s + 1]]``."""

    order: npt.NDArray[np.int64]  # (documents,), indices of the documents, longest first within a sequence
    offsets: npt.NDArray[np.int64]  # (sequences + 1,)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.offsets) - 1

    def __getitem__(self, sequence: int) -> npt.NDArray[np.int64]:
        """Indices of the documents in one sequence: a view."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        return self.order[self.offsets[sequence] : self.offsets[sequence + 1]]


def pack_best_fit(lengths: npt.ArrayLike, capacity: int) -> Packing:
    """Pack documents into as few sequences as best-fit decreasing needs: at most 11/9 of the optimum plus 1, with many
    short documents a few in a million above it.

    Args:
        lengths: integers (documents,), tokens of each. Documents without tokens are in no sequence.
        capacity: tokens that a sequence holds.

    Raises:
        ValueError: lengths that are not integers in one dimension, or a document that no sequence holds.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(f"lengths are {given.dtype} {given.shape}, packing takes integers in one dimension")
    if capacity < 1:
        raise ValueError(f"a sequence of {capacity} tokens holds nothing")
    if given.size and (given.min() < 0 or given.max() > capacity):
        bad = int(np.argmax((given < 0) | (given > capacity)))
        raise ValueError(f"document {bad} has {given[bad]} tokens, a sequence holds 0 to {capacity}")
    counts = np.bincount(given.astype(np.int64), minlength=1) if given.size else np.zeros(1, np.int64)
    sequences, opened = _place(counts, capacity)
    # Longest first; sorting by room left of the capacity keeps equal lengths in their given order.
    # A stable sort of what is left of the capacity: longest first.
    documents = _stable_argsort(capacity - given.astype(np.int64))[: len(sequences)]  # those of length 0 come last
    by_sequence = _stable_argsort(sequences)
    offsets = np.zeros(opened + 1, np.int64)
    np.cumsum(np.bincount(sequences, minlength=opened), out=offsets[1:])
    return Packing(documents[by_sequence], offsets)


def _place(counts: npt.NDArray[np.int64], capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """The sequence of each document, in order of decreasing length, and the number of sequences.

    Args:
        counts: documents of each length, (longest + 1,).
    """
    # The sequence of each document, longest document first.
    placed: list[int] = []
    opened = 0
    with_room: dict[int, list[int]] = {}  # room -> sequences, the one that got it last is used first
    rooms: list[int] = []  # keys of with_room, ascending

    def put(sequences: list[int], room: int) -> None:
        if room in with_room:
            with_room[room] += sequences
        elif room:
            with_room[room] = sequences
            insort(rooms, room)

    for length in (np.flatnonzero(counts[1:])[::-1] + 1).tolist():
        left = int(counts[length])
        while left:
            # The least room that still holds this length: the best fit.
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            fits = room // length  # documents per sequence
            wanted = -(-left // fits)  # sequences for all that are left; the last may stay partly filled
            # bisect_left found a room: open sequences take it before new ones.
            if at < len(rooms):
                # Only as many as there are documents for; what is left keeps its room.
                chosen = with_room[room][-wanted:]
                del with_room[room][-wanted:]
                if not with_room[room]:
                    del with_room[room], rooms[at]
            else:
                chosen = list(range(opened, opened + wanted))
                opened += wanted
            full = min(left // fits, len(chosen))
            # The sequences one after the other, and that as often as each takes a document.
            placed += chosen[:full] * fits
            left -= full * fits
            if full:
                put(chosen[:full], room - fits * length)
            if full < len(chosen):  # fewer documents are left than this sequence holds
                placed += chosen[full:] * left
                put(chosen[full:], room - left * length)
                left = 0
    return np.array(placed, np.int64), opened


def _stable_argsort(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``np.argsort(keys, kind="stable")`` of integers from 0 on, by their 16-bit digits, which numpy sorts by radix."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, int(keys.max(initial=0)).bit_length(), 16):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order
