"""Reward models: the Bradley-Terry loss of pairs of scores.

The loss of a pair is -log sigmoid(score(chosen) - score(rejected)), plus c times the square of their sum, which keeps
scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244; TRL's center_rewards_coefficient). Scores are those of
``smp.layers.heads.score``, and they are the rewards that are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from smp.config import Config
from smp.data.loader import RankBatch
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.parallel.collectives import Group
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.contract import (
    PAIR_METRICS,
    Implementation,
    Surroundings,
    answer_micro_batches,
    judge_answers,
    pair_metrics,
)


def bradley_terry(center: float, num_pairs: int, tokens: TokenValues) -> Judged:
    """Judge a micro-batch of scores: chosen, rejected, chosen, ... One token of each text has one; ``num_pairs`` of the
    global batch."""

    def formula(scores: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # lengths: 1 where a text has a score, 0 in rows that fill up.
        chosen, rejected, real = scores[::2], scores[1::2], lengths[::2] > 0
        losses = -F.logsigmoid(chosen - rejected) + center * (chosen + rejected).square()
        return torch.where(real, losses, 0.0).sum() / max(num_pairs, 1), pair_metrics(scores, real)

    return judge_answers(tokens, formula)


@dataclass(frozen=True)
class ScoredAnswer:
    """The loss of a reward model, a mean over pairs.

    Attributes:
        device: of the model.
        center: of the loss.
        cp: ranks that share every sequence.
        metrics: means over the pairs.
    """

    device: torch.device
    center: float
    cp: Group | None = None
    metrics: tuple[str, ...] = PAIR_METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        answers = AnswerLoss(partial(bradley_terry, self.center, num_valid))
        return answer_micro_batches(batch, lambda _: answers, self.device, self.cp)


def _build(config: Config, around: Surroundings) -> ScoredAnswer:
    assert config.objective is not None, "settings of a fine-tuning run"
    return ScoredAnswer(around.device, config.objective.reward_center_coefficient, around.context.cp_group)


IMPLEMENTATION = Implementation(_build)
