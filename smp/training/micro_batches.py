"""One rank's share of a step as micro-batches of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.image_batches import ImageBatch
from smp.kernels.sequence_cut import SequenceCut, cut_sequences
from smp.kernels.transfer import to_device
from smp.models.micro_batch import MicroBatch, MTPBatch
from smp.parallel.collectives import Group


class MicroBatches:
    """Micro-batches in order, each made (and moved to the device) when it is asked for. A pipeline asks for one once
    per stage.

    Args:
        count: how many there are.
        make: makes number i.
    """

    def __init__(self, count: int, make: Callable[[int], MicroBatch]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> MicroBatch:
        return self._make(i)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self._make, range(self._count))


def token_micro_batch(
    batch: RankBatch,
    i: int,
    num_valid_tokens: int,
    device: torch.device,
    cp: Group | None = None,
    mtp: int = 0,
) -> MicroBatch:
    """Micro-batch ``i``, whose loss counts tokens.

    Args:
        batch: this rank's share.
        i: number of the micro-batch.
        num_valid_tokens: of the global batch: the weights make the sum of the losses of all tokens, over micro-batches
            and ranks, the mean over these.
        device: where the model is.
        cp: ranks that share the micro-batch: each gets a part of every sequence. Everything that depends on a token's
            neighbours (its label, position, document and number) is known before the cut.
        mtp: layers of multi-token prediction, whose losses are means over the same number of tokens.
    """
    full_length = batch.input_ids.shape[-1]
    length, cut = _cut(batch, i, 1 if cp is None else cp.size)
    own = _Columns(length, None if cut is None or cp is None else cut.index(cp.rank), device)

    def weights_of(labels: torch.Tensor) -> torch.Tensor:
        # Tokens without a label have weight 0; max(.., 1) for a batch without labels.
        return (labels != IGNORE_INDEX).float() / max(num_valid_tokens, 1)

    def ahead(k: int) -> MTPBatch:
        """What the layer that predicts k more tokens ahead reads and predicts."""
        ids, labels = (own.of(x) for x in shifted(batch, i, k))
        return MTPBatch(ids, labels, weights_of(labels))

    columns, labels, index = own.numbers(), own.of(batch.labels[i]), to_device(batch.sample_index[i], device)
    counted = None if cut is None else columns  # of whole sequences the model counts them itself
    return MicroBatch(
        input_ids=own.of(batch.input_ids[i]),
        labels=labels,
        loss_weights=weights_of(labels),
        position_ids=counted if batch.position_ids is None else own.of(batch.position_ids[i]),
        # The cut has those of whole sequences, on the host; the columns of one rank would not say where documents
        # begin.
        document_ids=batch.document_ids[i, :, :length] if cut is None and batch.document_ids is not None else None,
        # Tokens keep the numbers that they have in whole rows: trimming and cutting change no dropout mask.
        token_index=index[:, None] * full_length + columns,
        cut=cut,
        sequence_lengths=None if batch.sequence_lengths is None else own.of(batch.sequence_lengths[i]),
        mtp=tuple(ahead(k) for k in range(1, mtp + 1)),
        images=batch.images[i].each(lambda t: to_device(t, device)) if isinstance(batch, ImageBatch) else None,
    )


def _cut(batch: RankBatch, i: int, cp: int) -> tuple[int, SequenceCut | None]:
    """(columns of micro-batch ``i`` that are computed, how ``cp`` ranks share them; None with one rank)."""
    full_length, rows = batch.input_ids.shape[-1], batch.input_ids.shape[1]
    length = full_length if batch.lengths is None else batch.lengths[i]
    if cp == 1:
        return length, None
    # A split needs 2 x cp equal chunks: trimmed rows get back some of their columns of padding.
    length = min(-(-length // (2 * cp)) * 2 * cp, full_length)
    document_ids = None if batch.document_ids is None else batch.document_ids[i, :, :length]
    # Whole sequences are cut, after labels were shifted: a token's label may be on another rank.
    return length, cut_sequences(rows, length, cp, document_ids)


def held_tokens(batch: RankBatch, i: int, cp: int) -> list[torch.Tensor]:
    """For each of ``cp`` ranks that share sequences, the tokens of micro-batch ``i`` that it computes, in its order:
    int64, row x full_length + column."""
    full_length, rows = batch.input_ids.shape[-1], batch.input_ids.shape[1]
    length, cut = _cut(batch, i, cp)
    columns = [torch.arange(length).expand(rows, -1)] if cut is None else [cut.index(rank) for rank in range(cp)]
    return [(torch.arange(rows)[:, None] * full_length + held).flatten() for held in columns]


@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns of a micro-batch's rows that this rank computes.

    Attributes:
        length: the first columns, where ``chosen`` is None.
        chosen: int64 (rows, length / cp), on the host: those of this context-parallel rank.
        device: where the model is.
    """

    length: int
    chosen: torch.Tensor | None
    device: torch.device

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a tensor (rows, full length), on the device."""
        if self.chosen is None:
            return to_device(x, self.device)[:, : self.length]
        # (rows, full length) -> (rows, length / cp)
        return to_device(x.gather(1, self.chosen), self.device)

    def numbers(self) -> torch.Tensor:
        """Token indices in the whole row, on the device: (length,), or (rows, length / cp)."""
        return (
            torch.arange(self.length, device=self.device)
            if self.chosen is None
            else to_device(self.chosen, self.device)
        )


def shifted(batch: RankBatch, i: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels k positions after each token of micro-batch ``i``, both (rows, full_length). After the end
    of a sequence the id is 0 and there is no label; nor is there one where another document has begun by then."""
    ids, labels = (x[i, :, k:] for x in (batch.input_ids, batch.labels))
    if batch.document_ids is not None:
        documents = batch.document_ids[i]
        # No prediction across the end of a document.
        labels = labels.masked_fill(documents[:, k:] != documents[:, :-k], IGNORE_INDEX)
    return F.pad(ids, (0, k)), F.pad(labels, (0, k), value=IGNORE_INDEX)
