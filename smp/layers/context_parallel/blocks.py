"""Which rectangles of queries and keys a rank computes, and the calls of an attention core that do it.

The rows that a rank holds are runs of consecutive tokens of one document. A run of queries sees a run of keys in full,
up to itself, or as far as a window reaches; what no query of it sees is left out. Rectangles of equal shape go into one
call as its sequences. A variable-length kernel takes rectangles of any shape in one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec, BlockCore
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.token_layout import Pattern, TokenLayout
from smp.kernels.transfer import to_device
from smp.layers.context_parallel.split_plan import Kind

SMALLEST_TILE = 128
"""Queries of a tile under a window: smaller ones leave a kernel too little to do."""


class Run(NamedTuple):
    """Consecutive tokens of one document among the rows of a rank: columns ``start`` to ``stop`` of a sequence, the
    first of which is row ``row``."""

    sequence: int
    document: int
    start: int
    stop: int
    row: int


class Block(NamedTuple):
    """Queries and keys, as ranges of rows, of which each query sees each key, or some.

    Attributes:
        queries, keys: (first, after the last) of each range; several only where all is seen.
        causal, window: what a query sees of the keys.
        distance: column of the first query - column of the first key.
        column: of the first key.
    """

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    causal: bool = False
    window: int | None = None
    distance: int = 0
    column: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return sum(b - a for a, b in self.queries), sum(b - a for a, b in self.keys)

    @property
    def reach(self) -> int | None:
        """The window as a kernel means it that counts distances from the last query and the last key."""
        queries, keys = self.shape
        return None if self.window is None else self.window - (self.distance + queries - keys)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an attention core.

    Attributes:
        queries, keys: int64, their rows; None: all rows in their order.
        layout: of these queries and keys.
        causal, window: of the call's spec.
        pairs: of a query and a key that are computed; of a causal square a kernel skips what is hidden.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    layout: TokenLayout
    causal: bool
    window: int | None
    pairs: int

    def spec(self, layer: AttentionSpec) -> AttentionSpec:
        """The spec of ``layer`` with the causality and window of this call."""
        return replace(layer, causal=self.causal, window=self.window)


def runs_of(cut: SequenceCut, rank: int | None) -> list[Run]:
    """The rank's tokens; with None those of all ranks, in the order of the sequences."""
    # On the host: plans are made of Python numbers, and no device is waited for.
    columns = torch.arange(cut.length).expand(cut.batch, -1) if rank is None else cut.index(rank)
    # (batch, length / cp), the document of each of the rank's tokens
    ids = torch.zeros_like(columns) if cut.document_ids is None else cut.document_ids.gather(1, columns)
    first = torch.ones_like(columns, dtype=torch.bool)
    # A run ends where the cut jumps to another chunk, or a document ends.
    first[:, 1:] = (columns.diff() != 1) | (ids.diff() != 0)
    # The first token of each run, row by row.
    sequence, column = first.nonzero(as_tuple=True)
    rows = sequence * columns.shape[1] + column
    sizes = torch.cat((rows, rows.new_tensor([columns.numel()]))).diff()
    starts = columns[sequence, column]
    return [
        Run(*run) for run in torch.stack((sequence, ids[sequence, column], starts, starts + sizes, rows), 1).tolist()
    ]


def halves_of(run: Run) -> list[Run]:
    """A run cut in the middle, if it has two tokens."""
    middle = (run.stop - run.start) // 2
    later = run._replace(start=run.start + middle, row=run.row + middle)
    return [run._replace(stop=later.start), later] if middle else [run]


def blocks_of(
    queries: Iterable[Run], keys: Iterable[Run], pattern: Pattern, *, tile: bool = True, join: bool = True
) -> list[Block]:
    """All that ``queries`` see of ``keys``.

    Args:
        queries: of one rank.
        keys: of one rank, or of all.
        pattern: causal, and the window.
        tile: cut long runs under a window into tiles, of which each meets few keys: for kernels that visit all keys.
        join: put queries that see the same keys in full, and keys that queries see in full, into one block. Their
            columns have gaps, so not with dropout.
    """
    causal, window = pattern
    known: dict[tuple[int, int], list[Run]] = {}
    for run in keys:
        # Queries see keys of their own document only, so nothing else has to be compared.
        known.setdefault((run.sequence, run.document), []).append(run)
    blocks = []
    for query in queries:
        for part in _tiles(query, window) if tile and window is not None else [query]:
            others = known.get((query.sequence, query.document), [])
            blocks += [block for key in others for block in _meet(part, key, causal, window)]
    return _joined(blocks) if join else blocks


def _tiles(run: Run, window: int) -> list[Run]:
    """A window's half meets twice as many keys as a query sees, or less."""
    size = max(window // 2, SMALLEST_TILE)
    cuts = [*range(run.start, run.stop, size), run.stop]
    return [run._replace(start=a, stop=b, row=run.row + a - run.start) for a, b in itertools.pairwise(cuts)]


def _meet(query: Run, key: Run, causal: bool, window: int | None) -> list[Block]:
    """Blocks of what a run of queries sees of a run of keys, which ends before the queries, contains them, or comes
    after them (and then is not seen)."""
    # Columns of keys that some query may see: causally none after the last query, by the window
    # none that is too far before the first.
    stop = min(key.stop, query.stop) if causal else key.stop
    start = key.start if window is None else max(key.start, query.start - window + 1)
    if start >= stop:
        return []
    last = query.stop if window is None else min(query.stop, stop - 1 + window)  # the others see none of these keys
    # The window cuts through the block: its last query does not see its first key.
    hidden = window is not None and last - 1 - start >= window
    near = max(start, query.start) if causal else stop  # from here on keys may come after queries

    def block(first: int, stop_key: int, **rest: int | bool | None) -> Block:
        rows = query.row, query.row + last - query.start
        keys = key.row + first - key.start, key.row + stop_key - key.start
        return Block((rows,), (keys,), distance=query.start - first, column=first, **rest)  # type: ignore[arg-type]

    # Then one block with a window; else what all queries see in full, and what is causal.
    if hidden:
        return [block(start, stop, causal=near < stop, window=window)]
    found = [block(start, min(near, stop))] if start < near else []
    return [*found, block(near, stop, causal=True)] if near < stop else found


def _joined(blocks: list[Block]) -> list[Block]:
    """Blocks of which those that are seen in full are joined: each set of queries and each set of keys comes once."""
    rest = [block for block in blocks if block.causal or block.window is not None]
    by_queries: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for block in blocks:
        if not (block.causal or block.window is not None):
            by_queries.setdefault(block.queries, []).extend(block.keys)
    # First all keys that a set of queries sees in full, then all queries that see the same set of keys.
    by_keys: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for queries, keys in by_queries.items():
        by_keys.setdefault(tuple(sorted(keys)), []).extend(queries)
    # What remains are sets of queries that see the same set of keys: one block for each.
    return [*rest, *(Block(tuple(queries), keys) for keys, queries in by_keys.items())]


@dataclass(frozen=True)
class Planner:
    """Makes calls of blocks.

    Attributes:
        core: what computes them.
        dtype, device: of the queries.
        token_index: of the rank's rows, which dropout is keyed by; None without dropout.
    """

    core: BlockCore
    dtype: torch.dtype
    device: torch.device
    token_index: torch.Tensor | None = None

    def calls(self, queries: list[Run], keys: list[Run], kind: Kind) -> tuple[Call, ...]:
        """Calls for layers of one kind; first those in which queries see themselves."""
        pattern, dropout = kind
        ragged = isinstance(self.core, VarlenAttention) and not dropout
        blocks = blocks_of(queries, keys, pattern, tile=not ragged, join=not dropout)
        sizes = [sum(run.stop - run.start for run in runs) for runs in (queries, keys)]
        kinds: dict[object, list[Block]] = {}
        # Causal blocks first: in them each query sees itself.
        for block in sorted(blocks, key=lambda block: (not block.causal, block.queries)):
            hidden = None if block.window is None else block.distance
            # What one call has in common: a window's reach for the ragged kernel, which knows shapes by document; the
            # whole shape for others, and with dropout the column, which masks are keyed by.
            alike = (block.reach,) if ragged else (hidden, block.shape, block.column if dropout else None)
            kinds.setdefault((block.causal, *alike), []).append(block)
        make = self._ragged if ragged else self._equal
        return tuple(make(group, *sizes) for alike in kinds.values() for group in _apart(alike, sizes[0]))

    def _equal(self, blocks: list[Block], num_queries: int, num_keys: int) -> Call:
        """Blocks of equal shape as the sequences of a call."""
        block, rows = blocks[0], self._rows([b.queries for b in blocks], num_queries)
        # Dropout is keyed by the tokens' numbers, wherever a call puts them.
        index = self.token_index if rows is None or self.token_index is None else self.token_index[rows]
        (length, key_length), column = block.shape, block.column
        layout = TokenLayout(
            len(blocks),
            length,
            token_index=index,
            query_start=column + block.distance,
            key_start=column,
            key_length=key_length,
        )
        made = AttentionSpec(causal=block.causal, window=block.window)
        layout = self.core.prepare(layout, [made], self.dtype, self.device)
        keys = self._rows([b.keys for b in blocks], num_keys)
        return Call(rows, keys, layout, block.causal, block.window, _pairs(blocks))

    def _ragged(self, blocks: list[Block], num_queries: int, num_keys: int) -> Call:
        """Blocks of any shape as the documents of a call. The kernel counts distances from the last query and the last
        key of each."""
        shapes = torch.tensor([block.shape for block in blocks])
        # Block i is document i, on both sides.
        ids = [torch.arange(len(blocks)).repeat_interleave(sizes)[None] for sizes in shapes.unbind(1)]
        ends = [torch.cat((sizes.new_zeros(1), sizes.cumsum(0))).int() for sizes in shapes.unbind(1)]
        longest = shapes.amax(0).tolist()
        layout = TokenLayout(
            1,
            ids[0].shape[1],
            document_ids=ids[0],
            key_length=ids[1].shape[1],
            key_document_ids=ids[1],
            cu_seqlens_q=to_device(ends[0], self.device),
            cu_seqlens_k=to_device(ends[1], self.device),
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
        )
        rows = self._rows([b.queries for b in blocks], num_queries), self._rows([b.keys for b in blocks], num_keys)
        return Call(*rows, layout, blocks[0].causal, blocks[0].reach, _pairs(blocks))

    def _rows(self, ranges: Sequence[Sequence[tuple[int, int]]], count: int) -> torch.Tensor | None:
        """All numbers in ``ranges``, on the device; None if they are those below ``count``."""
        # Block by block: the order in which the call sees its sequences.
        found = np.concatenate([np.arange(*one) for several in ranges for one in several])
        # All rows in their order need no index, and no copy.
        if len(found) == count and (found == np.arange(count)).all():
            return None
        return to_device(torch.from_numpy(found), self.device)


def _pairs(blocks: list[Block]) -> int:
    """Number of pairs of a query and a key; of causal squares only those that are seen."""
    shapes = [(*block.shape, block.causal and block.window is None) for block in blocks]
    return sum(n * (n + 1) // 2 if square else n * m for n, m, square in shapes)


def _apart(blocks: list[Block], num_queries: int) -> list[list[Block]]:
    """Blocks in groups without common queries: the results of a call are merged at once."""
    groups: list[tuple[np.ndarray, list[Block]]] = []
    # First fit: a block goes to the first group that has none of its queries.
    for block in blocks:
        free = (group for group in groups if not any(group[0][a:b].any() for a, b in block.queries))
        used, members = next(free, (np.zeros(num_queries, dtype=bool), []))
        if not members:
            groups.append((used, members))
        members.append(block)
        for a, b in block.queries:
            used[a:b] = True
    return [members for _, members in groups]


def last_step(runs: dict[int, list[Run]], pattern: Pattern) -> int:
    """The last step of a ring in which some rank sees something, 0 if all see their own tokens only."""
    # All ranks compute this from the same cut, so they agree how many steps the ring has.
    size = len(runs)
    for step in reversed(range(1, size)):
        for rank in range(size):
            if blocks_of(runs[rank], runs[(rank - step) % size], pattern, tile=False, join=False):
                return step
    return 0
