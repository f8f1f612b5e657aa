"""One step's forward and backward passes over the micro-batches of this rank."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from smp.data.loader import GlobalBatch
from smp.layers.cross_entropy import IGNORE_INDEX
from smp.parallel.rng import to_device
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


class Inputs:
    """Arguments of the model for each micro-batch, on the device when they are asked for.

    Args:
        batch: this rank's share.
        valid_tokens: of the global batch, over all ranks.
        device: where the model is.
    """

    def __init__(self, batch: GlobalBatch, valid_tokens: int, device: torch.device) -> None:
        self.batch, self.valid_tokens, self.device = batch, valid_tokens, device

    def __len__(self) -> int:
        return len(self.batch.tokens)

    def __getitem__(self, i: int) -> tuple[torch.Tensor | None, ...]:
        """(tokens, labels, token weights, sample index, documents, positions). The weights make the sum of the losses
        of all tokens the mean loss over the valid tokens of the whole global batch."""
        batch = self.batch
        labels = to_device(batch.labels[i], self.device)
        weights = (labels != IGNORE_INDEX).float() / max(self.valid_tokens, 1)
        rest = (self._on_device(part, i) for part in (batch.sample_index, batch.documents, batch.positions))
        return to_device(batch.tokens[i], self.device), labels, weights, *rest

    def _on_device(self, part: torch.Tensor | None, i: int) -> torch.Tensor | None:
        return None if part is None else to_device(part[i], self.device)


class Accumulation:
    """The whole model on every rank: forward and backward of one micro-batch after the other.

    Args:
        model: after ``parallelize``.
        device: where it is.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        return {}

    def train(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        total, inputs = torch.zeros((), device=self.device), Inputs(batch, valid_tokens, self.device)
        for i in range(len(inputs)):
            last_micro_batch(self.model, i == len(inputs) - 1)
            loss = self.model(*inputs[i])
            loss.backward()
            total += loss.detach()
        return total

    def evaluate(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        total, inputs = torch.zeros((), device=self.device), Inputs(batch, valid_tokens, self.device)
        for i in range(len(inputs)):
            total += self.model(*inputs[i])
        return total
