"""Models that an objective compares with, and where their log-probabilities come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from smp.checkpoint import collect_logical_rows, training_state
from smp.data.loader import RankBatch
from smp.data.tuning.batches import PairBatch
from smp.layers.heads.answers import AnswerLoss
from smp.parallel.collectives import Group, reduce_from_group
from smp.parallel.dtensor_region import local_part
from smp.sharding.parallelize import free_gathered
from smp.training.checkpoints.persistence import REFERENCE
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
        """Log-probabilities per micro-batch, fp32 (rows, length) on this rank's columns, 0 outside answers; none on a
        pipeline rank without the head."""
        # The policy itself may be the reference, with its adapters off: its mode is restored.
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
            # A pipeline rank without the head: its values are not read.
            return torch.zeros(batch.labels.shape[:2], device=self.device)
        total = torch.stack(found)
        # A context-parallel rank has some tokens of each answer.
        return total if self.cp is None else reduce_from_group(total, self.cp)


class FollowingReference:
    """A reference that follows the policy: every so many steps its weights become alpha x those of the policy +
    (1 - alpha) x its own (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656).

    Args:
        reference: a copy of the policy in the same layout, in any dtype.
        policy: the model that is trained.
        alpha: the policy's share.
        steps: optimizer steps from one mixing to the next.
    """

    def __init__(self, reference: ModelReference, policy: nn.Module, alpha: float, steps: int) -> None:
        self.reference, self.alpha, self.steps = reference, alpha, steps
        # The sharded parameters themselves: FSDP puts others in their place while it has gathered them.
        # Both are of one architecture, so names are the same.
        self._own, self._policy = (training_state(model)[0] for model in (reference.model, policy))

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Tensors for a checkpoint, under names of the reference's own. Loading fills them in place."""
        return {_own_name(name): tensor for name, tensor in self._own.items()}

    @property
    def logical_rows(self) -> dict[str, int]:
        """Rows without padding of padded tensors, as ``smp.checkpoint.save`` asks."""
        return {_own_name(name): rows for name, rows in collect_logical_rows(self.reference.model).items()}

    @torch.no_grad()
    def after(self, steps: int) -> None:
        """Called once before each step, with the number of those that are done."""
        if steps == 0 or steps % self.steps:
            return
        for name, own in self._own.items():
            mine, its = local_part(own), local_part(self._policy[name])
            # Mixed in fp32, and rounded once to the reference's dtype.
            mixed = its if not mine.is_floating_point() else torch.lerp(mine.float(), its.float(), self.alpha)
            mine.copy_(mixed)


def _own_name(name: str) -> str:
    return REFERENCE + name.removeprefix("model.")


@dataclass(frozen=True)
class TableReference:
    """Log-probabilities that were computed before training: no second model, no second pass.

    Attributes:
        table: fp32 (texts,), by the number of the text.
    """

    table: torch.Tensor

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
        assert isinstance(batch, PairBatch) and batch.texts is not None
        # Texts that only fill up have the number -1; their loss has weight 0.
        # (micro-batches, rows) -> fp32 of the same shape
        return self.table[batch.texts.clamp(min=0).to(self.table.device)]
