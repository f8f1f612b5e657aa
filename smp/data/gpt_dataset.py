"""Samples cut from a stream of documents.

Samples are numbered without end; sample i belongs to epoch i // n, where n = (tokens - 1) // seq_length. In every epoch
the documents are shuffled and laid end to end, the stream is cut every seq_length tokens (neighbours share one token:
the last label of one sample is the first input of the next), and the cuts are shuffled. Both shuffles are keyed by
(seed, first document, epoch). The order therefore depends on nothing else: not on the length of the run, the number of
data-parallel ranks, the number of workers, or what was read before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from smp.data.epochs import DocumentSamples
from smp.data.keyed_random import keyed_permutation
from smp.data.sample import IGNORE_INDEX, Sample


def split_documents(num_documents: int, fractions: Sequence[float]) -> tuple[range, range, range]:
    """Contiguous train, validation and test ranges of documents.

    Args:
        fractions: of the three, with a sum of 1. As in Megatron the boundaries are round(sum so far x documents).
    """
    # The sum of all shares so far is rounded, not each share: no document is lost between two parts.
    ends = [round(share * num_documents) for share in itertools.accumulate(fractions)]
    return range(0, ends[0]), range(ends[0], ends[1]), range(ends[1], ends[2])


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch."""

    documents: npt.NDArray[np.int64]  # (documents,), shuffled
    starts: npt.NDArray[np.int64]  # (documents + 1,), where each of them starts in the epoch's stream of tokens
    samples: npt.NDArray[np.int64]  # (samples per epoch,), shuffled


@dataclass(eq=False)
class GPTDataset(DocumentSamples[_Epoch]):
    """Samples of ``seq_length`` tokens and their labels from a stream of documents.

    Args:
        mask_ends: no loss where the last token of a document would have to predict the first one of the next.
    """

    packing = "stream"
    needs = "{tokens} tokens, one sample needs {least} (sequence length + 1)"

    _: KW_ONLY
    mask_ends: bool = False

    @property
    def samples_per_epoch(self) -> int:
        return max(0, self.num_tokens - 1) // self.seq_length

    def _size(self) -> int:
        return 2 * len(self.document_range) + self.samples_per_epoch

    def sample(self, index: int) -> Sample:
        """Sample ``index`` >= 0. Raises ValueError when the split is too small for one, or the file became shorter."""
        epoch, position = self._locate(index)
        start = int(epoch.samples[position]) * self.seq_length
        stop = start + self.seq_length + 1
        # The documents that the sample's tokens lie in: from the last that starts at or before it to the last
        # that starts before its end.
        first = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        last = int(np.searchsorted(epoch.starts, stop, side="left"))
        # A position in the epoch's stream becomes one in the file by a shift for each document.
        begins = self.dataset.document_offsets[epoch.documents[first:last]] - epoch.starts[first:last]
        lows = np.maximum(epoch.starts[first:last], start) + begins
        highs = np.minimum(epoch.starts[first + 1 : last + 1], stop) + begins
        pieces = [self.dataset.read(low, high) for low, high in zip(lows.tolist(), highs.tolist(), strict=True)]
        # casting="safe" refuses floats.
        tokens = np.concatenate(pieces, dtype=np.int64, casting="safe")
        # Number of the document within the sample, for each token.
        documents = np.repeat(np.arange(len(pieces)), highs - lows)
        labels = tokens[1:].copy()
        if self.mask_ends:
            labels[documents[1:] != documents[:-1]] = IGNORE_INDEX
        return Sample(tokens[:-1], labels, documents[:-1])

    def _parse(self, packed: npt.NDArray[np.int64]) -> _Epoch:
        count = len(self.document_range)
        return _Epoch(packed[:count], packed[count : 2 * count + 1], packed[2 * count + 1 :])

    def _shuffle(self, epoch: int) -> npt.NDArray[np.int64]:
        first, count = self.document_range.start, len(self.document_range)
        # One array, so that the cache keeps one file.
        packed = np.empty(2 * count + 1 + self.samples_per_epoch, np.int64)
        documents, starts = packed[:count], packed[count : 2 * count + 1]
        # The first document keys the draw, so that training and validation are shuffled differently.
        documents[:] = keyed_permutation(count, self.seed, first, epoch, purpose=0)
        documents += first
        offsets = self.dataset.document_offsets
        starts[0] = 0
        np.cumsum(offsets[documents + 1] - offsets[documents], out=starts[1:])
        packed[2 * count + 1 :] = keyed_permutation(self.samples_per_epoch, self.seed, first, epoch, purpose=1)
        return packed
