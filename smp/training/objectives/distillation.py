"""Distillation: each token's distribution follows a teacher's. The formulas are in
``smp.layers.heads.distillation``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from smp.config import Config
from smp.data.loader import RankBatch
from smp.layers.heads.distillation import Distilled
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.training.micro_batches import MicroBatches, token_micro_batch
from smp.training.objectives.contract import Implementation, Surroundings, Teacher


@dataclass(frozen=True)
class Distillation:
    """The divergence from a teacher, a mean over the tokens that have a label.

    Attributes:
        teacher: what to follow.
        device: of the model.
        beta, temperature, alpha: of the loss, see ``Distilled``.
        cp: ranks that share every sequence.
        metrics: none; an evaluation is the same loss.
    """

    teacher: Teacher
    device: torch.device
    beta: float
    temperature: float
    alpha: float
    cp: Group | None = None
    metrics: tuple[str, ...] = ()

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        # The teacher's forward passes of the whole step come first: they are collective.
        said = self.teacher.begin(batch)

        def make(i: int) -> MicroBatch:
            micro_batch = token_micro_batch(batch, i, num_valid, self.device, self.cp)
            teacher = said(i, micro_batch)
            # A pipeline rank without the head: another one computes the loss.
            if teacher is None:
                return micro_batch
            return replace(micro_batch, distilled=Distilled(teacher, self.beta, self.temperature, self.alpha))

        return MicroBatches(len(batch.input_ids), make)


def _build(config: Config, around: Surroundings) -> Distillation:
    rollouts, distillation = config.rollouts, config.distillation
    assert rollouts is not None and rollouts.beta is not None and distillation is not None, "filled in before"
    return Distillation(
        teacher=around.teacher(),
        device=around.device,
        beta=rollouts.beta,
        temperature=rollouts.temperature,
        alpha=distillation.kd_loss_alpha,
        cp=around.context.cp_group,
    )


IMPLEMENTATION = Implementation(_build)
