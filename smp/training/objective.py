"""What a step minimises: the next token, or a loss of pairs of answers, and what those are compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from smp.data.loader import RankBatch
from smp.data.tuning.batches import PairBatch
from smp.kernels.transfer import to_device
from smp.layers.preference import METRICS, PairLoss, Preference
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.sharding.parallelize import free_gathered
from smp.training.forward_backward import ForwardBackward
from smp.training.micro_batches import MicroBatches, token_micro_batch


class Objective(Protocol):
    """Makes the micro-batches of a step, which say what their losses are."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what the model measures beside the loss; they are reported as means over what the loss is."""

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        """Of this rank's share; ``num_valid`` is what the loss is averaged over, of the global batch."""


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy, a mean over the tokens that have a label.

    Attributes:
        device: of the model.
        cp: ranks that share every sequence.
        metrics: none.
    """

    device: torch.device
    cp: Group | None = None
    metrics: tuple[str, ...] = ()

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        make = partial(token_micro_batch, batch, num_valid_tokens=num_valid, device=self.device, cp=self.cp)
        return MicroBatches(len(batch.input_ids), make)


class Reference(Protocol):
    """Where log-probabilities to compare with come from."""

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        """fp32 (micro-batches, rows); without a meaning on a pipeline rank that does not have the head."""


@dataclass(frozen=True)
class PreferredAnswer:
    """A loss of pairs of answers, a mean over pairs; see ``smp.layers.preference``.

    Attributes:
        device: of the model.
        reference: what to compare with.
        loss_type, beta, label_smoothing: of the loss.
        cp: ranks that share every sequence.
        metrics: means over the pairs.
    """

    device: torch.device
    reference: Reference
    loss_type: PairLoss
    beta: float
    label_smoothing: float
    cp: Group | None = None
    metrics: tuple[str, ...] = METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        assert isinstance(batch, PairBatch)
        preference = Preference(
            rows=batch.input_ids.shape[1],
            length=batch.input_ids.shape[2],
            loss_type=self.loss_type,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            num_pairs=num_valid,
            reference=to_device(self.reference.log_probs(batch), self.device),
        )
        return pair_micro_batches(batch, preference, self.device, self.cp)


def pair_micro_batches(
    batch: PairBatch, preference: Preference, device: torch.device, cp: Group | None = None
) -> MicroBatches:
    """Micro-batches of pairs. ``preference`` is that of all of them, its reference fp32 (micro-batches, rows); without
    one the model returns log-probabilities. ``cp`` are the ranks that share every sequence."""

    def make(i: int) -> MicroBatch:
        micro_batch = token_micro_batch(batch, i, 1, device, cp)
        reference = None if preference.reference is None else preference.reference[i]
        length = micro_batch.input_ids.shape[1]  # shorter than the batch's where rows are trimmed or cut
        return replace(micro_batch, preference=replace(preference, length=length, reference=reference))

    return MicroBatches(len(batch.input_ids), make)


@dataclass(frozen=True)
class ModelReference:
    """A model that is run on every batch, without dropout: a frozen copy, or the policy with its adapters off.

    Attributes:
        model: as ``forward_backward`` uses it.
        forward_backward: through it.
        device: of the results.
        around: entered for each batch.
        cp: ranks that share every sequence.
    """

    model: nn.Module
    forward_backward: ForwardBackward
    device: torch.device
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    cp: Group | None = None

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        training = self.model.training
        self.model.eval()
        wanted = Preference(rows=batch.input_ids.shape[1], length=batch.input_ids.shape[2])
        with self.around():
            outputs = self.forward_backward.forward(pair_micro_batches(batch, wanted, self.device, self.cp))
        self.model.train(training)
        if not any(p.requires_grad for p in self.model.parameters()):
            free_gathered(self.model)  # of a copy: no backward pass comes that would
        found = [output.log_probs for output in outputs if output.log_probs is not None]
        return torch.stack(found) if found else torch.zeros(batch.labels.shape[:2], device=self.device)


@dataclass(frozen=True)
class TableReference:
    """Log-probabilities that were computed before training: no second model, no second pass.

    Attributes:
        table: fp32 (texts,), by the number of the text.
    """

    table: torch.Tensor

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        assert batch.texts is not None
        return self.table[batch.texts.clamp(min=0).to(self.table.device)]


class NoReference:
    """Log-probabilities 0, where the loss compares with nothing."""

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        return torch.zeros(batch.labels.shape[:2])
