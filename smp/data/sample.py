"""A sample: what one row of a batch is made of, and the protocol of whatever yields numbered samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""Label of a token without loss; PyTorch's own losses ignore it as well."""


@dataclass(frozen=True)
class Sample:
    """One sequence. All arrays are int64 (seq_length,).

    Attributes:
        input_ids: the tokens.
        labels: the id that follows each; IGNORE_INDEX: no loss here.
        document_ids: numbers of the documents within the sequence, ascending; padding counts as one.
        padding: tokens at the end that are none.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int64]
    padding: int = 0

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, without padding."""
        # Where the number changes, and at the first token.
        begins = np.flatnonzero(np.diff(self.document_ids, prepend=self.document_ids[0] - 1))
        lengths = np.diff(begins, append=len(self.document_ids))
        # Padding is the last document.
        return lengths[:-1] if self.padding else lengths

    def sequence_lengths(self, of_documents: bool) -> npt.NDArray[np.int64]:
        """For each token the length of its document or of the whole sample, int64 (seq_length,); padding counts as a
        document."""
        if of_documents:
            begins = np.flatnonzero(np.diff(self.document_ids, prepend=self.document_ids[0] - 1))
            lengths = np.diff(begins, append=len(self.document_ids))
            return np.repeat(lengths, lengths)
        return np.full_like(self.input_ids, len(self.input_ids) - self.padding)

    @property
    def position_ids(self) -> npt.NDArray[np.int64]:
        """Positions of the tokens within their documents, or within the part of them that the sequence holds."""
        position = np.arange(len(self.document_ids))
        # -1 before the first token: it begins a document, too.
        begins = np.diff(self.document_ids, prepend=-1) != 0
        return position - np.maximum.accumulate(np.where(begins, position, 0))


class SampleDataset(Protocol):
    """Numbered samples without end, as the loader reads them."""

    seq_length: int

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples before any token repeats; None: never."""

    def sample(self, index: int) -> Sample:
        """Sample ``index`` >= 0. Raises ValueError or OSError when it cannot be read, naming file and place."""
