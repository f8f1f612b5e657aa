"""One rank's share of a step as micro-batches of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.kernels.sequence_cut import cut_sequences
from smp.kernels.transfer import to_device
from smp.models.micro_batch import MicroBatch
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
    batch: RankBatch, i: int, num_valid_tokens: int, device: torch.device, cp: Group | None = None
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
    """
    full_length, rows = batch.input_ids.shape[-1], batch.input_ids.shape[1]
    length = full_length if batch.lengths is None else batch.lengths[i]
    if cp is not None:
        length = min(-(-length // (2 * cp.size)) * 2 * cp.size, full_length)
    document_ids = None if batch.document_ids is None else batch.document_ids[i, :, :length]
    cut = None if cp is None else cut_sequences(rows, length, cp.size, document_ids)
    chosen = None if cut is None or cp is None else cut.index(cp.rank)  # (rows, length / cp)

    def own(x: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a tensor (micro-batches, rows, full_length)."""
        return to_device(x[i], device)[:, :length] if chosen is None else to_device(x[i].gather(1, chosen), device)

    columns = torch.arange(length, device=device) if chosen is None else to_device(chosen, device)
    labels, index = own(batch.labels), to_device(batch.sample_index[i], device)
    places = None if cut is None else columns  # what the model counts itself in whole sequences
    return MicroBatch(
        input_ids=own(batch.input_ids),
        labels=labels,
        loss_weights=(labels != IGNORE_INDEX).float() / max(num_valid_tokens, 1),
        position_ids=places if batch.position_ids is None else own(batch.position_ids),
        document_ids=document_ids if cut is None else None,
        # tokens keep the numbers that they have in whole rows
        token_index=index[:, None] * full_length + columns,
        cut=cut,
        sequence_lengths=None if batch.sequence_lengths is None else own(batch.sequence_lengths),
    )
