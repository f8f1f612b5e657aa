"""What a step minimises: the next token, or a preference between two answers (DPO), and what that is compared with."""

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
from smp.layers.preference import METRICS, Preference
from smp.models.micro_batch import MicroBatch
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
    """Cross-entropy, a mean over the tokens that have a label."""

    device: torch.device
    metrics: tuple[str, ...] = ()

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        make = partial(token_micro_batch, batch, num_valid_tokens=num_valid, device=self.device)
        return MicroBatches(len(batch.input_ids), make)


class Reference(Protocol):
    """Where log-probabilities to compare with come from."""

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        """fp32 (micro-batches, rows); without a meaning on a pipeline rank that does not have the head."""


@dataclass(frozen=True)
class PreferredAnswer:
    """Direct preference optimization, a mean over pairs; see ``smp.layers.preference``.

    Attributes:
        device: of the model.
        reference: what to compare with.
        beta, label_smoothing: of the loss.
        metrics: means over the pairs.
    """

    device: torch.device
    reference: Reference
    beta: float
    label_smoothing: float
    metrics: tuple[str, ...] = METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        assert isinstance(batch, PairBatch)
        reference = self.reference.log_probs(batch).to(self.device)
        make = partial(
            pair_micro_batch,
            batch,
            device=self.device,
            num_pairs=num_valid,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            reference=reference,
        )
        return MicroBatches(len(batch.input_ids), make)


def pair_micro_batch(
    batch: PairBatch,
    i: int,
    *,
    device: torch.device,
    num_pairs: int = 1,
    beta: float = 0.0,
    label_smoothing: float = 0.0,
    reference: torch.Tensor | None = None,
) -> MicroBatch:
    """Micro-batch ``i`` of pairs.

    Args:
        batch: this rank's share.
        i: number of the micro-batch.
        device: where the model is.
        num_pairs: of the global batch, over which the loss is averaged.
        beta, label_smoothing: of the loss.
        reference: fp32 (micro-batches, rows); without it the model returns log-probabilities.
    """
    micro_batch = token_micro_batch(batch, i, 1, device)
    rows, length = micro_batch.input_ids.shape
    preference = Preference(
        rows=rows,
        length=length,
        beta=beta,
        label_smoothing=label_smoothing,
        num_pairs=num_pairs,
        reference=None if reference is None else reference[i],
    )
    return replace(micro_batch, preference=preference)


@dataclass(frozen=True)
class ModelReference:
    """A model that is run on every batch, without dropout: a frozen copy, or the policy with its adapters off.

    Attributes:
        model: as ``forward_backward`` uses it.
        forward_backward: through it.
        device: of the results.
        around: entered for each batch.
    """

    model: nn.Module
    forward_backward: ForwardBackward
    device: torch.device
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        training = self.model.training
        self.model.eval()
        make = partial(pair_micro_batch, batch, device=self.device)
        with self.around():
            outputs = self.forward_backward.forward(MicroBatches(len(batch.input_ids), make))
        self.model.train(training)
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
