"""Samples of whole documents: sequences filled by best-fit decreasing.

A document of n tokens takes n - 1 places of a sequence: each place holds a token, and its label is the next one, so
every step from one token to the next is learned once and none leads from one document to another. A document with more
than seq_length + 1 tokens is cut into pieces that share a token; no other is. Documents of one token hold no step and
are left out. In every epoch equal lengths are shuffled before packing, and the sequences after it, keyed by (seed,
first document, epoch); their number is the same in every epoch, because it depends on the lengths alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smp.data.cache import NodeCache
from smp.data.epochs import Epochs
from smp.data.indexed_dataset import IndexedDataset
from smp.data.keyed_random import keyed_permutation
from smp.data.packing import pack_best_fit
from smp.data.sample import IGNORE_INDEX, Sample


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch."""

    bounds: npt.NDArray[np.int64]  # (sequences + 1,), first piece of each sequence, then their number
    starts: npt.NDArray[np.int64]  # (pieces,), first token of each piece in the data set
    places: npt.NDArray[np.int64]  # (pieces,), places that it takes
    sequences: npt.NDArray[np.int64]  # (sequences,), shuffled


class PackedDataset:
    """Endless, shuffled, packed samples from a range of documents.

    Args:
        dataset: the tokens.
        document_range: documents of this split.
        seq_length: places of a sequence.
        seed: key of the order.
        cache: where large orders are kept, with ``key``, which stands for the contents of ``dataset``. Without one
            each process makes its own.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        document_range: range,
        seq_length: int,
        seed: int,
        *,
        cache: NodeCache | None = None,
        key: str = "",
    ) -> None:
        assert seq_length > 0 and 0 <= document_range.start <= document_range.stop <= dataset.num_documents
        self.dataset = dataset
        self.document_range = document_range
        self.seq_length = seq_length
        self.seed = seed
        tokens = int(dataset.document_offsets[document_range.stop] - dataset.document_offsets[document_range.start])
        numbers, name = 3 * (len(document_range) + tokens // seq_length), f"{key}-{self.order_key.replace(' ', '_')}"
        self._epochs = Epochs(self._pack, self._parse, numbers=numbers, cache=cache, name=name)
        first = self._epochs.order(0)
        self.samples_per_epoch = len(first.sequences)
        self.filled = int(first.places.sum()) / max(1, self.samples_per_epoch * seq_length)
        """Fraction of the places that hold a token."""

    @property
    def order_key(self) -> str:
        """Everything that sample numbers depend on besides the tokens."""
        first, stop = self.document_range.start, self.document_range.stop
        return f"best-fit documents {first} to {stop} length {self.seq_length} seed {self.seed}"

    def check_not_empty(self) -> None:
        """Raises ValueError when the split has no document of two tokens."""
        if self.samples_per_epoch == 0:
            raise ValueError(
                f"{self.dataset.bin_path}: documents {self.document_range.start} to {self.document_range.stop} hold "
                "no two tokens in a row"
            )

    def sample(self, index: int) -> Sample:
        """Sample ``index`` >= 0. Raises ValueError when the split has none, or the file became shorter."""
        assert index >= 0
        self.check_not_empty()
        number, position = divmod(index, self.samples_per_epoch)
        epoch = self._epochs.order(number)
        if 2 * position >= self.samples_per_epoch:
            self._epochs.prepare(number + 1)
        sequence = int(epoch.sequences[position])
        chosen = slice(int(epoch.bounds[sequence]), int(epoch.bounds[sequence + 1]))
        tokens = np.zeros(self.seq_length, np.int64)
        labels = np.full(self.seq_length, IGNORE_INDEX, np.int64)
        documents = np.full(self.seq_length, chosen.stop - chosen.start, np.int64)  # what is left is padding
        at = 0
        pieces = zip(epoch.starts[chosen].tolist(), epoch.places[chosen].tolist(), strict=True)
        for document, (start, places) in enumerate(pieces):
            piece = self.dataset.read(start, start + places + 1)
            tokens[at : at + places], labels[at : at + places] = piece[:-1], piece[1:]
            documents[at : at + places] = document
            at += places
        return Sample(tokens, labels, documents, padding=self.seq_length - at)

    @staticmethod
    def _parse(packed: npt.NDArray[np.int64]) -> _Epoch:
        pieces, sequences = int(packed[0]), int(packed[1])
        ends = np.cumsum([2, sequences + 1, pieces, pieces, sequences]).tolist()
        return _Epoch(*(packed[low:high] for low, high in itertools.pairwise(ends)))

    def _pack(self, number: int) -> npt.NDArray[np.int64]:
        """Number of pieces, number of sequences, and the arrays of the epoch one behind the other."""
        first = self.document_range.start
        starts, places = self._pieces()
        shuffled = keyed_permutation(len(starts), self.seed, first, number, purpose=2)
        starts, places = starts[shuffled], places[shuffled]
        packing = pack_best_fit(places, self.seq_length)
        sequences = keyed_permutation(len(packing), self.seed, first, number, purpose=3)
        counts = np.array([len(starts), len(packing)])
        return np.concatenate((counts, packing.offsets, starts[packing.order], places[packing.order], sequences))

    def _pieces(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First token of each piece and the places that it takes, document after document."""
        offsets = self.dataset.document_offsets[self.document_range.start : self.document_range.stop + 1]
        steps = np.maximum(np.diff(offsets) - 1, 0)
        count = -(-steps // self.seq_length)  # pieces of each document
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        starts = np.repeat(offsets[:-1], count) + within * self.seq_length
        places = np.minimum(np.repeat(steps, count) - within * self.seq_length, self.seq_length)
        return starts, places
