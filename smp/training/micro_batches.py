"""One rank's share of a step as micro-batches of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.kernels.transfer import to_device
from smp.models.micro_batch import MicroBatch


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


def token_micro_batch(batch: RankBatch, i: int, num_valid_tokens: int, device: torch.device) -> MicroBatch:
    """Micro-batch ``i``, whose loss counts tokens.

    Args:
        batch: this rank's share.
        i: number of the micro-batch.
        num_valid_tokens: of the global batch: the weights make the sum of the losses of all tokens, over micro-batches
            and ranks, the mean over these.
        device: where the model is.
    """
    full_length = batch.input_ids.shape[-1]
    length = full_length if batch.lengths is None else batch.lengths[i]
    labels = to_device(batch.labels[i], device)[:, :length]
    index = to_device(batch.sample_index[i], device)
    return MicroBatch(
        input_ids=to_device(batch.input_ids[i, :, :length], device),
        labels=labels,
        loss_weights=(labels != IGNORE_INDEX).float() / max(num_valid_tokens, 1),
        position_ids=None if batch.position_ids is None else to_device(batch.position_ids[i, :, :length], device),
        document_ids=None if batch.document_ids is None else batch.document_ids[i, :, :length],
        # tokens keep the numbers that they have in whole rows
        token_index=index[:, None] * full_length + torch.arange(length, device=device),
    )
