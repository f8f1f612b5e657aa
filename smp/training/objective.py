"""The loss of a step: next-token cross-entropy or a preference loss, with its reference model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import LabelledBatch, PairBatch
from smp.kernels.transfer import to_device
from smp.layers.preference import KTO_METRICS, METRICS, Labelled, PairLoss, Preference
from smp.models.micro_batch import MicroBatch
from smp.parallel.agree import sum_over_ranks
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext
from smp.sharding.parallelize import free_gathered
from smp.training.forward_backward import ForwardBackward
from smp.training.micro_batches import MicroBatches, token_micro_batch


class Objective(Protocol):
    """Makes the micro-batches of a step; each says which loss it has."""

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
        further: layers of multi-token prediction.
    """

    device: torch.device
    cp: Group | None = None
    metrics: tuple[str, ...] = ()
    further: int = 0

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        make = partial(
            token_micro_batch,
            batch,
            num_valid_tokens=num_valid,
            device=self.device,
            cp=self.cp,
            further=self.further,
        )
        return MicroBatches(len(batch.input_ids), make)


class Reference(Protocol):
    """Source of the reference model's log-probabilities."""

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
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
        shared = Preference(
            rows=batch.input_ids.shape[1],
            length=batch.input_ids.shape[2],
            loss_type=self.loss_type,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            num_pairs=num_valid,
        )
        reference = to_device(self.reference.log_probs(batch), self.device)
        # Log-probabilities of the reference first, for the whole share: the model then runs through
        # its micro-batches as always.
        return answer_micro_batches(batch, lambda i: replace(shared, reference=reference[i]), self.device, self.cp)


@dataclass(frozen=True)
class ScoredAnswer:
    """The loss of a reward model, a mean over pairs; see ``smp.layers.score``.

    Attributes:
        device: of the model.
        center: of the loss.
        cp: ranks that share every sequence.
        metrics: means over the pairs.
    """

    device: torch.device
    center: float
    cp: Group | None = None
    metrics: tuple[str, ...] = METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        rows, length = batch.input_ids.shape[1:]
        preference = Preference(rows, length, num_pairs=num_valid, center=self.center)
        return answer_micro_batches(batch, lambda _: preference, self.device, self.cp)


@dataclass(frozen=True)
class LabelledAnswer:
    """KTO: the loss of answers that are desirable or not, a mean over them; see ``smp.layers.preference``.

    Attributes:
        device: of the model.
        reference: what to compare with.
        policy: the model itself, as it is before the step, without dropout.
        context: its ranks.
        beta, weights: of the loss; of desirable and of undesirable answers.
        metrics: means over the answers.
    """

    device: torch.device
    reference: Reference
    policy: ModelReference
    context: ParallelContext
    beta: float
    weights: tuple[float, float]
    metrics: tuple[str, ...] = KTO_METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        assert isinstance(batch, LabelledBatch) and batch.desirable is not None
        real = (batch.labels != IGNORE_INDEX).any(-1)
        # Counted once for all ranks that read the same samples.
        own = int((batch.desirable & real).sum()) if self.context.counts_tokens else 0
        # Over the global batch: means of metrics must not depend on how micro-batches were filled.
        (liked,) = sum_over_ranks(own)
        count, kl = max(num_valid, 1), self._kl(batch, num_valid)
        desirable = to_device(batch.desirable, self.device)
        reference = to_device(self.reference.log_probs(batch), self.device)
        shares = liked / count, 1 - liked / count

        def preference(i: int) -> Preference:
            labelled = Labelled(desirable[i], kl, self.weights, shares)
            rows, length = batch.input_ids.shape[1:]
            return Preference(rows, length, beta=self.beta, num_pairs=count, reference=reference[i], labelled=labelled)

        return answer_micro_batches(batch, preference, self.device, self.context.cp_group)

    def _kl(self, batch: LabelledBatch, num_valid: int) -> torch.Tensor:
        """z0 of the formula, 0-dim fp64, equal on all ranks: over the mismatched answers of the whole global batch, so
        that it depends on neither micro-batches nor layout."""
        others = batch.mismatched
        assert others is not None
        # Without a gradient: z0 is an estimate, which the loss takes as a constant.
        ratios = self.policy.log_probs(others).double() - self.reference.log_probs(others).to(self.device).double()
        real = to_device((others.labels != IGNORE_INDEX).any(-1), self.device)
        total = torch.where(real, ratios, 0.0).sum()
        if self.context.cp_rank > 0:  # these ranks have the same numbers, and the sum is over all
            total = torch.zeros_like(total)
        return (self.context.sum_loss(total) / max(num_valid, 1)).clamp(min=0)


def answer_micro_batches(
    batch: RankBatch, preference: Callable[[int], Preference], device: torch.device, cp: Group | None = None
) -> MicroBatches:
    """Micro-batches of answers. ``preference`` gives that of each by its number; without a reference in it the model
    returns log-probabilities. ``cp`` are the ranks that share every sequence."""

    def make(i: int) -> MicroBatch:
        # Weight 1 for each token of an answer: what it counts is decided by the loss of answers.
        micro_batch = token_micro_batch(batch, i, 1, device, cp)
        length = micro_batch.input_ids.shape[1]  # shorter than the batch's where rows are trimmed or cut
        return replace(micro_batch, preference=replace(preference(i), length=length))

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

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
        training = self.model.training
        # Without dropout, as evaluations: the same log-probabilities at every time.
        self.model.eval()
        wanted = Preference(rows=batch.input_ids.shape[1], length=batch.input_ids.shape[2])
        with self.around():
            outputs = self.forward_backward.forward(answer_micro_batches(batch, lambda _: wanted, self.device, self.cp))
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

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
        assert isinstance(batch, PairBatch) and batch.texts is not None
        # Texts that only fill up have the number -1; their loss counts nothing.
        return self.table[batch.texts.clamp(min=0).to(self.table.device)]


class NoReference:
    """Log-probabilities 0, where the loss compares with nothing."""

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
        return torch.zeros(batch.labels.shape[:2])
