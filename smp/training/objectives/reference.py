"""Models that an objective compares with, and where their log-probabilities come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from smp.data.loader import RankBatch
from smp.data.tuning.batches import PairBatch
from smp.layers.heads.answers import AnswerLoss
from smp.parallel.collectives import Group, reduce_from_group
from smp.sharding.parallelize import free_gathered
from smp.training.forward_backward import ForwardBackward
from smp.training.objectives.contract import answer_micro_batches


@dataclass(frozen=True)
class ModelReference:
    """A model that is run on every batch, without dropout: a frozen copy, or the policy with its adapters off.

    Attributes:
        model: as ``forward_backward`` uses it.
        forward_backward: through it.
        device: of the results.
        around: entered for each batch.
        cp: ranks that share every sequence.
        temperature: of the log-probabilities.
    """

    model: nn.Module
    forward_backward: ForwardBackward
    device: torch.device
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    cp: Group | None = None
    temperature: float = 1.0

    def of_tokens(self, batch: RankBatch) -> list[torch.Tensor]:
        """Of each micro-batch, fp32 (rows, length) on this rank's columns, 0 outside of answers; nothing on a pipeline
        rank that does not have the head."""
        training = self.model.training
        # Without dropout, as evaluations: the same log-probabilities at every time.
        self.model.eval()
        wanted = AnswerLoss(temperature=self.temperature)
        with self.around():
            outputs = self.forward_backward.forward(answer_micro_batches(batch, lambda _: wanted, self.device, self.cp))
        self.model.train(training)
        if not any(p.requires_grad for p in self.model.parameters()):
            free_gathered(self.model)  # of a copy: no backward pass comes that would
        return [output.values for output in outputs if output.values is not None]

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
        found = [values.sum(1) for values in self.of_tokens(batch)]
        if not found:
            return torch.zeros(batch.labels.shape[:2], device=self.device)
        total = torch.stack(found)
        return total if self.cp is None else reduce_from_group(total, self.cp)


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
