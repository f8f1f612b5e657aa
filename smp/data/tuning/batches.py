"""Sequences as batches: what the loader asks for, a function of (seed, samples, sequence number) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smp.data.keyed_random import keyed_permutation
from smp.data.loader import RankBatch, unlabelled
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.encode import Encoded
from smp.data.tuning.image_batches import ImageBatch, ImageReader
from smp.data.tuning.samples import Samples, fingerprint
from smp.data.tuning.sequences import Sequences


@dataclass(frozen=True)
class PairBatch(RankBatch):
    """Pairs of answers: row 2 i is the chosen answer of a pair, row 2 i + 1 the rejected one."""

    texts: torch.Tensor | None = None  # int64 (num_microbatches, rows): number of the answer; -1: none, to fill up

    @property
    def num_samples(self) -> int:
        """Pairs of this rank."""
        return super().num_samples // 2

    def num_valid(self) -> int:
        """Pairs of this rank, without those that only fill up."""
        return int((self.labels[:, ::2] != IGNORE_INDEX).any(-1).sum())


@dataclass(frozen=True)
class LabelledBatch(RankBatch):
    """Single answers, each desirable or not (KTO); and, for an estimate of a KL divergence, the same prompts with
    answers of other samples."""

    desirable: torch.Tensor | None = None  # bool (num_microbatches, rows)
    mismatched: RankBatch | None = None  # row i: the prompt of row i, and the answer of the sample after it

    def num_valid(self) -> int:
        """Answers of this rank, without those that only fill up."""
        return int((self.labels != IGNORE_INDEX).any(-1).sum())

    def pinned(self) -> RankBatch:
        """Page-locked, the mismatched batch, too."""
        assert self.mismatched is not None
        return replace(super().pinned(), mismatched=self.mismatched.pinned())  # type: ignore[call-arg]


@dataclass(frozen=True)
class NumberedBatch(RankBatch):
    """Sequences with the number of each label among all tokens of the samples, for values that were computed for each
    before."""

    numbers: torch.Tensor | None = None  # int64 like labels; -1: padding


class TuningDataset:
    """Numbered sequences without end: number i is one of epoch i // n, where n is their number.

    The order within an epoch is drawn with (seed, epoch), so it depends neither on the length of the run nor on the
    layout nor on what was read before.

    Args:
        samples: all texts.
        sequences: the ones of this dataset.
        seed: of the order; None: as they are, once, and after them sequences without text.
        scores: a text is to get one number, at its last token: that is read, too, and is the one with a label.
        pairs: two sequences after each other are a pair and one sample: the chosen and the rejected answer.
        trim: leave out columns at the end of a micro-batch that hold padding only. Not for pipelines and compiled
            models, which want one shape.
        numbered: batches say which token of the samples each label is.
        images: reads those of the samples; None: the model sees none.
        notes: what the user should hear.
    """

    def __init__(
        self,
        samples: Samples,
        sequences: Sequences,
        *,
        seed: int | None,
        pairs: bool = False,
        scores: bool = False,
        trim: bool = False,
        numbered: bool = False,
        images: ImageReader | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = notes
        self.samples, self.sequences, self.seed, self.trim = samples, sequences, seed, trim
        self.predicted = 0 if scores else 1  # tokens at the end of a text that are only labels
        self.seq_length = sequences.length
        self.rows = 2 if pairs else 1  # of a sample
        self.numbered, self.images = numbered, images
        self.packed = sequences.packed
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Samples before any is repeated."""
        return len(self.sequences) // self.rows

    @property
    def manifest(self) -> list[dict[str, str]]:
        """What the order is a function of, other than the seed, for checkpoints."""
        return [{"samples": self.samples.fingerprint(), "sequences": fingerprint(self.sequences.order)}]

    def resume(self, manifest: list[dict[str, str]] | None, consumed: int) -> list[str]:
        """Notes for the user when a run resumes that has read ``consumed`` samples of ``manifest``."""
        if manifest is None or consumed == 0 or manifest == self.manifest:
            return []
        return [f"note: these are not the samples of the checkpoint: after {consumed:,} of those the order is another"]

    def batch(self, indices: npt.NDArray[np.int64]) -> RankBatch:
        """Samples by number, ``indices`` (micro-batches, samples); ~i is sample i to fill up, see ``rank_share``."""
        real = np.repeat(indices >= 0, self.rows, axis=1)
        # Sample numbers to sequence numbers: a pair is two in a row.
        numbers = np.where(indices < 0, ~indices, indices)[:, :, None] * self.rows
        rows = (numbers + np.arange(self.rows)).reshape(len(indices), -1)
        texts = [self._texts(int(row)) for row in rows.flat]
        fields = self._fields(rows, [[self.samples[n] for n in held.tolist()] for held in texts], real)
        if self.samples.desirable is not None:
            desirable = [bool(len(held)) and bool(self.samples.desirable[held[0]]) for held in texts]
            others = [self._mismatched(int(row)) for row in rows.flat]
            return LabelledBatch(
                **fields,
                desirable=torch.tensor(desirable).view(rows.shape),
                mismatched=RankBatch(**self._fields(rows, others, real)),
            )
        if self.numbered:
            numbers = np.stack([self._numbers(held) for held in texts]).reshape(*rows.shape, self.seq_length)
            return NumberedBatch(**fields, numbers=torch.from_numpy(numbers))
        if self.images is not None:
            lengths = fields["lengths"] or (self.seq_length,) * len(rows)
            shares = [texts[i * rows.shape[1] :][: rows.shape[1]] for i in range(len(rows))]
            read = (self.images.micro_batch(held, n) for held, n in zip(shares, lengths, strict=True))
            return ImageBatch(**fields, images=tuple(read))
        if self.rows == 1:
            return RankBatch(**fields)
        answers = torch.tensor([int(h[0]) if len(h) and r else -1 for h, r in zip(texts, real.flat, strict=True)])
        return PairBatch(**fields, texts=answers.view(rows.shape))

    def text(self, number: int) -> Encoded:
        """The text of a sample that is alone in its sequence: (ids, which are trained)."""
        (held,) = self._texts(number)
        return self.samples[int(held)]

    def _fields(
        self, rows: npt.NDArray[np.int64], texts: list[list[Encoded]], real: npt.NDArray[np.bool_]
    ) -> dict[str, Any]:
        """Fields of a batch of sequences of texts; ``rows``: their numbers, (micro-batches, sequences); ``real``: those
        that do not only fill up."""
        # (micro-batches, sequences, 5, seq_length)
        stacked = np.stack([self._row(held) for held in texts]).reshape(*rows.shape, 5, self.seq_length)
        input_ids, labels, document_ids, position_ids, lengths = (
            torch.from_numpy(np.ascontiguousarray(stacked[:, :, i])) for i in range(5)
        )
        return {
            "input_ids": input_ids,
            "labels": unlabelled(labels, real),
            "sample_index": torch.from_numpy(rows),
            "document_ids": document_ids if self.packed else None,
            "position_ids": position_ids if self.packed else None,
            "lengths": _lengths(document_ids) if self.trim else None,
            "sequence_lengths": lengths,
            # -1 in document_ids is padding.
            "padding": document_ids.numel() - int((document_ids[torch.from_numpy(real)] >= 0).sum()),
            "filling": int((~real).sum()),
            # the last token of a text is only predicted
            "attended_lengths": np.array(
                [len(ids) - self.predicted for held, r in zip(texts, real.flat, strict=True) if r for ids, _ in held],
                np.int64,
            ),
        }

    def _numbers(self, texts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of a sequence's labels, int64 (seq_length,), then -1. A label is the token after the one that is
        read."""
        offsets, out = self.samples.offsets, np.full(self.seq_length, -1, np.int64)
        held = [np.arange(offsets[n] + 1, offsets[n + 1]) for n in texts]
        count = sum(map(len, held))
        out[:count] = np.concatenate(held) if held else 0
        return out

    def _mismatched(self, row: int) -> list[Encoded]:
        """The prompt of a text with the answer of the next text in the epoch's order (of the last: the first): a
        function of (seed, samples, number), as everything here."""
        own, other = self._texts(row), self._texts(row, later=1)
        if not len(own):
            return []
        (ids, trained), (others, others_trained) = self.samples[int(own[0])], self.samples[int(other[0])]
        # The first token that is trained: where the answer begins.
        prompt, answer = int(trained.argmax()), int(others_trained.argmax())
        longest = self.seq_length + 1
        mixed = np.concatenate([ids[:prompt], others[answer:]])[:longest]
        return [(mixed, np.concatenate([trained[:prompt], others_trained[answer:]])[:longest])]

    def _texts(self, row: int, later: int = 0) -> npt.NDArray[np.int64]:
        """Texts in the sequence with number ``row``, or ``later`` positions after it in its epoch; none after the end
        of data that are read once."""
        index, part = divmod(row, self.rows)
        epoch, position = divmod(index, self.samples_per_epoch)
        # Validation is read once; the last batch is filled up with sequences without text.
        if self.seed is None and epoch > 0:
            return np.empty(0, np.int64)
        if self.seed is not None:
            order = self._order  # several threads read
            if order is None or order[0] != epoch:
                # In one step: another thread may look at it meanwhile.
                order = self._order = epoch, keyed_permutation(self.samples_per_epoch, self.seed, 1, epoch)
            position = int(order[1][(position + later) % self.samples_per_epoch])
        else:
            position = (position + later) % self.samples_per_epoch
        return self.sequences[position * self.rows + part]

    def _row(self, texts: list[Encoded]) -> npt.NDArray[np.int64]:
        """Tokens, labels, documents, positions and lengths of the texts of a sequence, int64 (5, seq_length). Padding
        is document -1."""
        row = np.zeros((5, self.seq_length), np.int64)
        row[1], row[2] = IGNORE_INDEX, -1
        at = 0
        for number, (ids, trained) in enumerate(texts):
            end = at + len(ids) - self.predicted
            row[0, at:end] = ids[: end - at]
            # Labels are shifted here, before packing: no label leads from one text to the next.
            if self.predicted:
                row[1, at:end] = np.where(trained[1:], ids[1:], IGNORE_INDEX)
            else:
                # A score for the last token: any label but IGNORE_INDEX marks it.
                row[1, end - 1] = ids[-1]
            row[2, at:end] = number
            row[3, at:end] = np.arange(end - at)
            row[4, at:end] = end - at
            at = end
        return row


def _lengths(document_ids: torch.Tensor) -> tuple[int, ...]:
    """Columns of each micro-batch that some row uses; at least one."""
    return tuple(int(n) for n in (document_ids >= 0).sum(-1).amax(-1).clamp(min=1))
