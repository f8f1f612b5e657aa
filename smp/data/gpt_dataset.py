"""Samples of seq_length + 1 tokens, packed from the documents of an indexed dataset.

Samples are numbered without end; sample i belongs to epoch i // n, where n = (tokens - 1) // seq_length. In every epoch
the documents are shuffled and laid end to end, the stream is cut every seq_length tokens (neighbours share one token:
the last label of one sample is the first input of the next), and the cuts are shuffled. Both shuffles are keyed by
(seed, first document, epoch). The order therefore depends on nothing else: not on the length of the run, the number of
data-parallel ranks, the number of workers, or what was read before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from smp.data.indexed_dataset import IndexedDataset
from smp.data.keyed_random import keyed_permutation


class SampleDataset(Protocol):
    """What the loader reads: numbered samples without end."""

    seq_length: int

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples before any token repeats; None: never."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample ``index`` >= 0, int64 (seq_length + 1,)."""


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Contiguous train, validation and test ranges of documents.

    Args:
        split: relative sizes such as ``969,30,1``; missing ones are 0. Boundaries are rounded as in Megatron:
            round(cumulative fraction x documents).

    Raises:
        ValueError: ``split`` is not one to three non-negative numbers with a positive sum.
    """
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        raise ValueError(f"split {split!r} is not up to three relative sizes such as 969,30,1")
    ends = [0]
    for count in range(1, 4):
        ends.append(round(sum(weights[:count]) / sum(weights) * num_documents))
    return range(0, ends[1]), range(ends[1], ends[2]), range(ends[2], ends[3])


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch."""

    number: int
    documents: npt.NDArray[np.int64]  # (documents,), shuffled
    starts: npt.NDArray[np.int64]  # (documents + 1,), where each of them starts in the epoch's stream of tokens
    samples: npt.NDArray[np.int64]  # (samples per epoch,), shuffled


class GPTDataset:
    """Endless, shuffled, packed samples from a range of documents. Only one epoch's order is held in memory.

    Args:
        dataset: the tokens.
        document_range: documents of this split.
        seq_length: tokens a model sees at once; a sample has one more.
        seed: key of the order.
        vocab_size: token ids from here on are refused when they are read. Default: only negative ones are.

    Raises:
        ValueError: the dataset does not hold integers.
    """

    def __init__(
        self, dataset: IndexedDataset, document_range: range, seq_length: int, seed: int, vocab_size: int | None = None
    ) -> None:
        assert seq_length > 0 and 0 <= document_range.start <= document_range.stop <= dataset.num_documents
        if dataset.dtype.kind not in "iu":
            raise ValueError(f"{dataset.bin_path}: holds {dataset.dtype}, token ids are integers")
        self.dataset = dataset
        self.document_range = document_range
        self.seq_length = seq_length
        self.seed = seed
        self.vocab_size = vocab_size
        offsets = dataset.document_offsets
        self.num_tokens = int(offsets[document_range.stop] - offsets[document_range.start])
        self._epoch: _Epoch | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples before a document repeats; 0 when the split is too small for one."""
        return max(0, self.num_tokens - 1) // self.seq_length

    def check_not_empty(self) -> None:
        """Raises ValueError when the split has too few tokens for one sample."""
        if self.samples_per_epoch == 0:
            raise ValueError(
                f"{self.dataset.bin_path}: documents {self.document_range.start} to {self.document_range.stop} hold "
                f"{self.num_tokens} tokens, one sample needs {self.seq_length + 1} (sequence length + 1)"
            )

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample ``index`` >= 0, int64 (seq_length + 1,).

        Raises:
            ValueError: the split is too small for one sample, or a token id is outside the vocabulary.
        """
        assert index >= 0
        self.check_not_empty()
        number, position = divmod(index, self.samples_per_epoch)
        epoch = self._order_of(number)
        start = int(epoch.samples[position]) * self.seq_length
        sample = self._read(epoch, start, start + self.seq_length + 1)
        if sample.min() < 0 or (self.vocab_size is not None and sample.max() >= self.vocab_size):
            self._refuse(sample, epoch, start)
        return sample

    def _order_of(self, number: int) -> _Epoch:
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            epoch = self._epoch = self._shuffle(number)
        return epoch

    def _shuffle(self, number: int) -> _Epoch:
        first = self.document_range.start
        documents = first + keyed_permutation(len(self.document_range), self.seed, first, number, purpose=0)
        starts = np.zeros(len(documents) + 1, dtype=np.int64)
        offsets = self.dataset.document_offsets
        np.cumsum(offsets[documents + 1] - offsets[documents], out=starts[1:])
        samples = keyed_permutation(self.samples_per_epoch, self.seed, first, number, purpose=1)
        return _Epoch(number, documents, starts, samples)

    def _read(self, epoch: _Epoch, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) of the epoch's stream."""
        first = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        last = int(np.searchsorted(epoch.starts, stop, side="left"))
        begins = self.dataset.document_offsets[epoch.documents[first:last]] - epoch.starts[first:last]
        lows = np.maximum(epoch.starts[first:last], start) + begins
        highs = np.minimum(epoch.starts[first + 1 : last + 1], stop) + begins
        tokens = self.dataset.tokens
        pieces = [tokens[low:high] for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
        return np.concatenate(pieces, dtype=np.int64, casting="safe")

    def _refuse(self, sample: npt.NDArray[np.int64], epoch: _Epoch, start: int) -> None:
        limit = np.iinfo(np.int64).max if self.vocab_size is None else self.vocab_size
        bad = int(np.argmax((sample < 0) | (sample >= limit)))
        place = int(np.searchsorted(epoch.starts, start + bad, side="right")) - 1
        vocabulary = "" if self.vocab_size is None else f", the vocabulary has {self.vocab_size}"
        raise ValueError(
            f"{self.dataset.bin_path}: token id {sample[bad]} in document {epoch.documents[place]} at offset "
            f"{start + bad - epoch.starts[place]}{vocabulary}"
        )
