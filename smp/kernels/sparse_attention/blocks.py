"""Computing by blocks of queries with the keys that they may see, which bounds the size of (pairs, heads) tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCK_BYTES = 64 * 2**20
"""Bound on the largest tensor that a block makes."""


@dataclass(frozen=True)
class Pairs:
    """Where queries and keys lie. Keys are a table of ``batch`` x ``keys`` rows, one sequence after the other.

    Attributes:
        batch, length: sequences, and queries of each on this rank.
        keys: of each sequence.
        start: number of the first query among the batch x length ones; rows after the last of these are padding.
        aligned: query i of a sequence is its key i, and sees none after it.
    """

    batch: int
    length: int
    keys: int
    start: int = 0
    aligned: bool = True

    def blocks(self, rows: int, bytes_of_pair: int) -> Iterator[tuple[slice, slice]]:
        """Slices of ``rows`` queries, each with the slice of the table that contains all keys that these queries see.
        Padding is in none of them."""
        # As many queries at once as keep the largest tensor, (queries, heads, keys), within the bound.
        size = max(1, BLOCK_BYTES // (bytes_of_pair * self.keys))
        for sequence in range(self.batch):
            first = sequence * self.length - self.start
            for low in range(max(first, 0), min(first + self.length, rows), size):
                high = min(low + size, first + self.length, rows)
                # Causal: no query of the block sees a key after its last one.
                seen = high - first if self.aligned else self.keys
                yield slice(low, high), slice(sequence * self.keys, sequence * self.keys + seen)


def rows_at_once(rows: int, bytes_of_row: int) -> Iterator[slice]:
    """Slices of ``rows``, each with at most ``BLOCK_BYTES`` at ``bytes_of_row``."""
    size = max(1, BLOCK_BYTES // bytes_of_row)
    for low in range(0, rows, size):
        yield slice(low, min(low + size, rows))


def within(first: torch.Tensor, last: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    """bool (rows, keys): which of ``keys`` each query sees, from its ``first`` to its ``last`` of the whole table."""
    # Numbers in the whole table, as ``first`` and ``last`` are.
    number = torch.arange(keys.start, keys.stop, device=first.device)
    return (number >= first[rows, None]) & (number <= last[rows, None])
