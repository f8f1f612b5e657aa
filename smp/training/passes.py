"""One step's forward and backward passes over the micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from smp.data.loader import GlobalBatch
from smp.data.sample import IGNORE_INDEX
from smp.kernels.transfer import to_device
from smp.layers.head import ModelOutput
from smp.models.micro_batch import MicroBatch
from smp.sharding.parallelize import last_micro_batch


class Passes(Protocol):
    """How micro-batches go through the model. Losses are this rank's part of the mean over the global batch: the sum
    over all ranks that compute different parts is the loss."""

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        """Parameters that several ranks hold for different stages, and how many do; they count once in the norm."""

    def train(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        """Leave the gradients of the mean loss in the parameters; returns the loss, 0-dim fp32."""

    def evaluate(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        """The loss without gradients, 0-dim fp32."""

    def outputs(self, inputs: Inputs) -> list[ModelOutput]:
        """What the model makes of each micro-batch, in order and without gradients; of a pipeline's last stage."""


class Inputs:
    """Arguments of the model for each micro-batch, on the device when they are asked for.

    Args:
        batch: this rank's share.
        valid_tokens: what the loss is averaged over, of the global batch, over all ranks.
        device: where the model is.
    """

    def __init__(self, batch: GlobalBatch, valid_tokens: int, device: torch.device) -> None:
        self.batch, self.valid_tokens, self.device = batch, valid_tokens, device

    def __len__(self) -> int:
        return len(self.batch.tokens)

    def __getitem__(self, i: int) -> MicroBatch:
        """The weights make the sum of the losses of all tokens the mean loss over the valid tokens of the whole global
        batch."""
        batch = self.batch
        labels = to_device(batch.labels[i], self.device)
        weights = (labels != IGNORE_INDEX).float() / max(self.valid_tokens, 1)
        index, length = to_device(batch.sample_index[i], self.device), batch.tokens.shape[-1]
        width = length if batch.widths is None else batch.widths[i]
        tokens, documents, positions = (self._part(x, i) for x in (batch.tokens, batch.documents, batch.positions))
        assert tokens is not None
        return MicroBatch(
            input_ids=to_device(tokens, self.device),
            labels=labels[:, :width],
            loss_weights=weights[:, :width],
            position_ids=None if positions is None else to_device(positions, self.device),
            document_ids=documents,
            # tokens keep the numbers that they have in whole rows
            token_index=index[:, None] * length + torch.arange(width, device=self.device),
        )

    def measured(self, output: ModelOutput) -> None:
        """Note the metrics of a micro-batch that was trained on."""

    def _part(self, part: torch.Tensor | None, i: int) -> torch.Tensor | None:
        if part is None or self.batch.widths is None:
            return None if part is None else part[i]
        return part[i, ..., : self.batch.widths[i]]


MakeInputs = Callable[[GlobalBatch, int, torch.device], Inputs]


class Accumulation:
    """The whole model on every rank: forward and backward of one micro-batch after the other.

    Args:
        model: after ``parallelize``.
        device: where it is.
        make_inputs: of (batch, valid tokens, device).
    """

    def __init__(self, model: nn.Module, device: torch.device, make_inputs: MakeInputs = Inputs) -> None:
        self.model, self.device, self.make_inputs = model, device, make_inputs

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        return {}

    def train(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        total, inputs = torch.zeros((), device=self.device), self.make_inputs(batch, valid_tokens, self.device)
        for i in range(len(inputs)):
            last_micro_batch(self.model, i == len(inputs) - 1)
            output: ModelOutput = self.model(inputs[i])
            inputs.measured(output)
            loss = output.total
            assert loss is not None
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        return total_loss(self.outputs(self.make_inputs(batch, valid_tokens, self.device)), self.device)

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> list[ModelOutput]:
        return [self.model(inputs[i]) for i in range(len(inputs))]


def total_loss(outputs: Iterable[ModelOutput], device: torch.device) -> torch.Tensor:
    """Sum of all losses, auxiliary ones included, 0-dim fp32."""
    losses = (output.total for output in outputs)
    return sum((loss.detach() for loss in losses if loss is not None), torch.zeros((), device=device))
