"""Samples of whole documents: sequences filled by best-fit decreasing.

A document of n tokens takes n - 1 positions of a sequence: each holds a token, and its label is the next one, so
every step from one token to the next is learned once and none leads from one document to another. A document with more
than seq_length + 1 tokens is cut into pieces that share a token; no other is. Documents of one token hold no step and
are left out. In every epoch equal lengths are shuffled before packing, and the sequences after it, keyed by (seed,
first document, epoch); their number is the same in every epoch, because it depends on the lengths alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from smp.data.epochs import DocumentSamples
from smp.data.keyed_random import keyed_permutation
from smp.data.packing import pack_best_fit
from smp.data.sample import IGNORE_INDEX, Sample


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch."""

    bounds: npt.NDArray[np.int64]  # (sequences + 1,), first piece of each sequence, then their number
    starts: npt.NDArray[np.int64]  # (pieces,), first token of each piece in the data set
    lengths: npt.NDArray[np.int64]  # (pieces,), positions that it takes
    sequences: npt.NDArray[np.int64]  # (sequences,), shuffled


@dataclass(eq=False)
class PackedDataset(DocumentSamples[_Epoch]):
    """Packed samples from a range of documents."""

    packing = "best-fit"
    needs = "no two tokens in a row"

    @cached_property  # the number is the same in every epoch; the first order is not kept
    def samples_per_epoch(self) -> int:
        return len(self._order(0).sequences)

    @cached_property
    def filled(self) -> float:
        """Fraction of the positions that hold a token."""
        return int(self._order(0).lengths.sum()) / max(1, self.samples_per_epoch * self.seq_length)

    # An upper estimate: three arrays of pieces.
    def _size(self) -> int:
        return 3 * (len(self.document_range) + self.num_tokens // self.seq_length)

    def sample(self, index: int) -> Sample:
        """Sample ``index`` >= 0. Raises ValueError when the split has none, or the file became shorter."""
        epoch, position = self._locate(index)
        sequence = int(epoch.sequences[position])
        chosen = slice(int(epoch.bounds[sequence]), int(epoch.bounds[sequence + 1]))
        tokens = np.zeros(self.seq_length, np.int64)
        # What stays unfilled has no label.
        labels = np.full(self.seq_length, IGNORE_INDEX, np.int64)
        documents = np.full(self.seq_length, chosen.stop - chosen.start, np.int64)  # what is left is padding
        at = 0
        pieces = zip(epoch.starts[chosen].tolist(), epoch.lengths[chosen].tolist(), strict=True)
        for document, (start, length) in enumerate(pieces):
            # One token more: the last label.
            piece = self.dataset.read(start, start + length + 1)
            tokens[at : at + length], labels[at : at + length] = piece[:-1], piece[1:]
            documents[at : at + length] = document
            at += length
        return Sample(tokens, labels, documents, padding=self.seq_length - at)

    def _parse(self, packed: npt.NDArray[np.int64]) -> _Epoch:
        pieces, sequences = int(packed[0]), int(packed[1])
        # Two counts, then the four arrays.
        ends = np.cumsum([2, sequences + 1, pieces, pieces, sequences]).tolist()
        return _Epoch(*(packed[low:high] for low, high in itertools.pairwise(ends)))

    def _shuffle(self, epoch: int) -> npt.NDArray[np.int64]:
        """Number of pieces, number of sequences, and the arrays of the epoch."""
        first = self.document_range.start
        starts, lengths = self._pieces()
        shuffled = keyed_permutation(len(starts), self.seed, first, epoch, purpose=2)
        # Equal lengths are placed in the order in which they come: shuffling before packing changes which texts share a
        # sequence.
        starts, lengths = starts[shuffled], lengths[shuffled]
        packing = pack_best_fit(lengths, self.seq_length)
        sequences = keyed_permutation(len(packing), self.seed, first, epoch, purpose=3)
        counts = np.array([len(starts), len(packing)])
        return np.concatenate((counts, packing.offsets, starts[packing.order], lengths[packing.order], sequences))

    def _pieces(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First token of each piece and the positions that it takes, document after document."""
        offsets = self.dataset.document_offsets[self.document_range.start : self.document_range.stop + 1]
        # Documents of one token have no step.
        steps = np.maximum(np.diff(offsets) - 1, 0)
        count = -(-steps // self.seq_length)  # pieces of each document
        # Number of each piece within its document.
        # 0, 1, ... for the pieces of each document.
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        starts = np.repeat(offsets[:-1], count) + within * self.seq_length
        lengths = np.minimum(np.repeat(steps, count) - within * self.seq_length, self.seq_length)
        return starts, lengths
