"""Direct preference optimization in a run: pairs as inputs of the model, and where the reference comes from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from smp.data.loader import GlobalBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import PairBatch
from smp.layers.head import ModelOutput
from smp.layers.preference import METRICS, Preference
from smp.models.micro_batch import MicroBatch
from smp.parallel.context import ParallelContext
from smp.training.passes import Inputs, Passes


class Reference(Protocol):
    """Where log-probabilities to compare with come from."""

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        """fp32 (micro-batches, rows); without a meaning on a pipeline rank that does not have the head."""


class PairInputs(Inputs):
    """Arguments of the model for micro-batches of pairs. Without a reference in the batch the model returns
    log-probabilities.

    Args:
        batch, pairs, device: as of ``Inputs``; ``pairs`` of the global batch.
        beta, label_smoothing: of the loss.
    """

    def __init__(
        self, batch: GlobalBatch, pairs: int, device: torch.device, *, beta: float, label_smoothing: float
    ) -> None:
        super().__init__(batch, pairs, device)
        self.beta, self.label_smoothing = beta, label_smoothing
        self.sums = torch.zeros(len(METRICS), dtype=torch.float64, device=device)

    def __getitem__(self, i: int) -> MicroBatch:
        micro_batch = super().__getitem__(i)
        assert isinstance(self.batch, PairBatch) and micro_batch.labels is not None
        reference = None if self.batch.reference is None else self.batch.reference[i].to(self.device)
        rows, length = micro_batch.input_ids.shape
        return replace(
            micro_batch,
            loss_weights=(micro_batch.labels != IGNORE_INDEX).float(),
            preference=Preference(rows, length, self.beta, self.label_smoothing, self.valid_tokens, reference),
        )

    def measured(self, output: ModelOutput) -> None:
        self.sums += torch.stack([output.metrics[name] for name in METRICS]) if output.metrics else 0.0


class PairLoss:
    """Makes :class:`PairInputs`, and remembers what the last ones measured."""

    def __init__(self, beta: float, label_smoothing: float) -> None:
        self.beta, self.label_smoothing = beta, label_smoothing
        self.last: PairInputs | None = None

    def __call__(self, batch: GlobalBatch, pairs: int, device: torch.device) -> PairInputs:
        self.last = PairInputs(batch, pairs, device, beta=self.beta, label_smoothing=self.label_smoothing)
        return self.last


class PreferencePasses:
    """Passes of a step on pairs: first the reference's, then the policy's.

    Args:
        passes: of the policy; made with ``loss``.
        loss: see :class:`PairLoss`.
        reference: what to compare with.
        context, device: of the run.
    """

    def __init__(
        self, passes: Passes, loss: PairLoss, reference: Reference, context: ParallelContext, device: torch.device
    ) -> None:
        self.passes, self.loss, self.reference, self.context, self.device = passes, loss, reference, context, device
        self._measured = deque[torch.Tensor]()  # of steps that are not accounted for yet

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        return self.passes.copies

    def train(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        loss = self.passes.train(self._compared(batch), valid_tokens)
        assert self.loss.last is not None
        self._measured.append(self.context.sum_loss(self.loss.last.sums) / max(valid_tokens, 1))
        return loss

    def evaluate(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        return self.passes.evaluate(self._compared(batch), valid_tokens)

    def outputs(self, inputs: Inputs) -> list[ModelOutput]:
        return self.passes.outputs(inputs)

    def _compared(self, batch: GlobalBatch) -> PairBatch:
        assert isinstance(batch, PairBatch)
        return replace(batch, reference=self.reference.log_probs(batch))

    def measured(self) -> dict[str, float]:
        """Means over the pairs of the oldest step that was not asked for yet. A reward is beta (log p - log p_ref)."""
        means = self._measured.popleft().tolist()
        return dict(zip(METRICS, means, strict=True))


class ModelReference:
    """A model that is run on every batch, without dropout: a frozen copy, or the policy with its adapters off.

    Args:
        model: as ``passes`` use it.
        passes: through it.
        device: of the results.
        around: entered for each batch.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        device: torch.device,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model, self.passes, self.device, self.around = model, passes, device, around

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        training = self.model.training
        self.model.eval()
        inputs = PairInputs(replace(batch, reference=None), 1, self.device, beta=0.0, label_smoothing=0.0)
        with self.around():
            outputs = self.passes.outputs(inputs)
        self.model.train(training)
        log_probs = [output.log_probs for output in outputs if output.log_probs is not None]
        return torch.stack(log_probs) if log_probs else torch.zeros(batch.labels.shape[:2], device=self.device)


class TableReference:
    """Log-probabilities that were computed before training: no second model, no second pass.

    Args:
        table: fp32 (texts,), by the number of the text.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def log_probs(self, batch: PairBatch) -> torch.Tensor:
        assert batch.texts is not None
        return self.table[batch.texts.clamp(min=0).to(self.table.device)]
