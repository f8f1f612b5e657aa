"""How the tokens of sequences are split over context-parallel ranks: index arithmetic on the host, no communication.

With causal attention a token costs as much as there are tokens before it, so ranks that hold consecutive slices would
wait for the last one. The rank with chunk r of 2 x cp chunks has chunk 2 x cp - 1 - r as well: a cheap one and a costly
one. What counts is the position in the document, so packed documents are cut each by itself:

    cp 2, one document of 8      0 0 1 1 1 1 0 0        ranks of the tokens
    cp 2, documents of 5 and 3   0 1 1 1 0 | 0 0 1      what does not divide goes to ranks with room left

Short documents stay whole on a rank where that leaves the ranks about equal work: fewer and larger blocks. A cut is a
function of the document ids alone, so every rank computes the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from smp.config import ConfigError

UNBALANCED = 1.05
"""Work of the slowest rank / mean, up to which documents stay whole."""


@dataclass(frozen=True, eq=False)
class SequenceCut:
    """Which rank holds which token.

    Attributes:
        ranks: int64 (batch, length), on the host: the rank of each token. Each has length / cp of every sequence.
        cp: number of ranks.
        document_ids: integers (batch, length), on the host: a token sees only tokens with its number. None: a sequence
            is one document.
        whole: documents shorter than this stay on one rank where there is room; 0: none.
    """

    ranks: torch.Tensor
    cp: int
    document_ids: torch.Tensor | None = None
    whole: int = 0

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.ranks.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.ranks.shape[1]

    @property
    def local_length(self) -> int:
        """Tokens of a sequence on each rank."""
        return self.length // self.cp

    def index(self, rank: int) -> torch.Tensor:
        """int64 (batch, length / cp): the columns of the rank's tokens, in the order in which it holds them."""
        # In the order of the columns: a rank's tokens stay in the order of the sequence.
        # A stable sort puts the rank's columns first. nonzero would wait for a GPU, and tensors without data have none.
        return (self.ranks != rank).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.local_length]

    def gathered_order(self, ranks: int, part: int = 0) -> torch.Tensor:
        """int64 (tokens,): for the tokens of ``ranks`` neighbouring ranks, gathered rank by rank, the position of each
        one in the order of the sequences. The ranks are those from part x ranks on."""
        held = [self.index(part * ranks + i) for i in range(ranks)]
        rows = torch.arange(self.batch)[:, None] * self.length
        # The rank of each number among all: what is left when gaps are closed.
        return torch.stack([columns + rows for columns in held]).flatten().argsort().argsort()

    def merged(self, ranks: int) -> SequenceCut:
        """The cut over cp / ``ranks`` groups of as many neighbouring ranks, as if each were one rank."""
        return SequenceCut(self.ranks // ranks, self.cp // ranks, self.document_ids, self.whole)

    def in_chunks(self, size: int) -> SequenceCut:
        """The cut that has the same tokens on each rank, where a token sees only tokens of its own chunk: ``size``
        tokens of a document, counted from its beginning. A chunk is a document then."""
        if self.length <= size:
            return self
        ids = self.document_ids
        ids = torch.zeros(self.batch, self.length, dtype=torch.int64) if ids is None else ids
        return replace(self, document_ids=chunks_of_documents(ids, size))

    def document_positions(self) -> torch.Tensor:
        """int64 (batch, length): the number of tokens before each in its document, which it may see besides itself."""
        if self.document_ids is None:
            return torch.arange(self.length).expand(self.batch, self.length)
        return torch.stack([_document_positions(row) for row in self.document_ids])

    def work(self, window: int | None = None) -> torch.Tensor:
        """int64 (cp,): pairs of a query and a key that it sees, causally, on each rank. A pair costs each head
        4 x head_dim FLOPs in the forward pass, 2.5 times as many in the backward pass of a fused kernel."""
        seen = self.document_positions() + 1
        seen = seen if window is None else seen.clamp(max=window)
        return torch.zeros(self.cp, dtype=torch.int64).scatter_add(0, self.ranks.flatten(), seen.flatten())

    def __str__(self) -> str:
        if self.document_ids is None:
            return f"{2 * self.cp} chunks of {self.length // (2 * self.cp)} tokens, a first and a last one on each rank"
        kept = f", those below {self.whole} tokens whole where there is room" if self.whole else ""
        return f"each document in {2 * self.cp} pieces, a first and a last one on each rank{kept}"


def chunks_of_documents(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Numbers of chunks of ``size`` tokens of each document of ``ids``, integers (batch, length): int64 of that shape,
    the same for two tokens of a sequence where they are of one chunk."""
    chunks = torch.stack([_document_positions(row) for row in ids]) // size
    # Room for all chunks of a document between two ids, so that no two documents share a number.
    return ids.long() * (ids.shape[1] // size + 1) + chunks


def cut_sequences(batch: int, length: int, cp: int, document_ids: torch.Tensor | None = None) -> SequenceCut:
    """The cut of ``batch`` sequences of ``length`` tokens over ``cp`` ranks.

    Args:
        batch, length: of the whole sequences.
        cp: number of ranks.
        document_ids: integers (batch, length), on the host; None: a sequence is one document, and 2 x cp has to divide
            ``length``. With documents cp has to.

    Raises:
        ConfigError: the length does not divide; one line with the next one that does.
        ValueError: document ids of another shape, or on a device.
    """
    multiple = 2 * cp if document_ids is None else cp
    if length % multiple and cp > 1:
        what = f"2 x {cp} chunks" if document_ids is None else f"{cp} equal parts"
        raise ConfigError(
            f"--seq-length {length} cannot be cut into {what} for --context-parallel-size {cp}; "
            f"the next length that can is {length + -length % multiple}"
        )
    if document_ids is None:
        chunks = torch.arange(2 * cp) if cp > 1 else torch.zeros(1, dtype=torch.int64)
        # Chunk r and chunk 2 cp - 1 - r are on rank r.
        ranks = torch.minimum(chunks, 2 * cp - 1 - chunks).repeat_interleave(length // len(chunks))
        return SequenceCut(ranks.expand(batch, length), cp)
    if document_ids.shape != (batch, length) or document_ids.device.type != "cpu":
        raise ValueError(
            f"document ids {tuple(document_ids.shape)} on {document_ids.device} for sequences {(batch, length)}: "
            "the host counts them, one for each token"
        )
    documents = [_lengths(row) for row in document_ids]
    local, found = length // cp, []
    # As whole as possible first: whole documents need no exchange of partial results, and make large blocks.
    for whole in dict.fromkeys((length + 1, local, local // 4, local // 16, 4 * cp)):
        rows = [_deal(lengths, cp, whole) for lengths in documents]
        cut = SequenceCut(torch.from_numpy(np.stack(rows)), cp, document_ids, whole)
        work = cut.work()
        found.append((float(work.max() / work.double().mean()), cut))
        if found[-1][0] <= UNBALANCED:
            break
    # What is balanced well enough counts as equal, so of those the first is taken, with the largest documents whole.
    return min(found, key=lambda pair: max(pair[0], UNBALANCED))[1]


def _lengths(ids: torch.Tensor) -> list[int]:
    """Lengths of the runs of equal ids."""
    return torch.unique_consecutive(ids, return_counts=True)[1].tolist()


def _document_positions(ids: torch.Tensor) -> torch.Tensor:
    """For each token of a row, how many earlier ones have the same id."""
    order = ids.argsort(stable=True)
    counts = ids[order].unique_consecutive(return_counts=True)[1]
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(ids)) - starts)


def _deal(lengths: list[int], cp: int, whole: int) -> np.ndarray:
    """int64 (sum of lengths,): the rank of each token. Documents of ``whole`` tokens or more in zig-zag pieces, then
    the others, long ones first, on the rank with most room, or as much of them as there is room."""
    starts = np.cumsum([0, *lengths])
    ranks = np.empty(starts[-1], dtype=np.int64)
    # Each rank takes exactly 1 / cp of the tokens: shapes are equal on all ranks.
    room = np.full(cp, starts[-1] // cp)
    # 0 1 ... cp-1 cp-1 ... 1 0: the zig-zag.
    pieces = np.minimum(np.arange(2 * cp), np.arange(2 * cp)[::-1])  # rank of each piece
    rest = []
    for start, length in zip(starts, lengths, strict=False):
        # Short documents wait until the long ones have taken their even shares.
        if length < whole:
            rest.append((length, start))
            continue
        sizes = np.full(2 * cp, length // (2 * cp))
        extra = length % (2 * cp)
        first = np.argsort(-room, kind="stable")  # one token more for each, then for those with most room
        # A second extra token of a rank goes to its other piece.
        for rank in (*first, *first)[:extra]:
            sizes[rank if sizes[rank] == sizes[2 * cp - 1 - rank] else 2 * cp - 1 - rank] += 1
        ranks[start : start + length] = pieces.repeat(sizes)
        # A rank has piece r and piece 2 cp - 1 - r.
        room -= sizes[:cp] + sizes[cp:][::-1]
    # Long ones first, while there is room for them in one piece.
    for length, start in sorted(rest, key=lambda document: -document[0]):
        while length:
            # The first of ranks with equal room: every rank makes the same cut.
            rank = int(room.argmax())
            taken = min(length, int(room[rank]))
            ranks[start : start + taken] = rank
            room[rank] -= taken
            start, length = start + taken, length - taken
    assert not room.any()
    return ranks
