"""KTO: answers alone, that somebody liked or not. Ethayarajh et al. 2024, arXiv 2402.01306.

With l(y) = log p(y), summed over the tokens of an answer, and r(y) = l(y) - l_ref(y), the loss of an answer is w_d (1 -
sigmoid(beta (r(y) - z0))) if it is desirable, else w_u (1 - sigmoid(beta (z0 - r(y)))). z0 is a number of the global
batch: max(0, mean of r over prompts with an answer that is another one's), an estimate of the KL divergence that has no
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp.config import Config
from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import LabelledBatch
from smp.kernels.transfer import to_device
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.parallel.agree import sum_over_ranks
from smp.parallel.context import ParallelContext
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.contract import (
    Implementation,
    Reference,
    Surroundings,
    answer_micro_batches,
    judge_answers,
)

METRICS = ("KL", "reward of desirable", "reward of undesirable")
"""z0, and the mean rewards beta r of both kinds of answers, 0 where a batch has none."""


@dataclass(frozen=True)
class LabelledLoss:
    """The formula for a micro-batch, except its log-probabilities.

    Attributes:
        desirable: bool (rows,).
        reference: fp32 (rows,), log-probabilities by the reference.
        kl: fp64, 0-dim: z0.
        beta, weights: of the loss; of desirable and of undesirable answers.
        count: answers of the global batch, over which the loss is averaged.
        shares: of both kinds in the global batch, for the means of metrics.
    """

    desirable: torch.Tensor
    reference: torch.Tensor
    kl: torch.Tensor
    beta: float
    weights: tuple[float, float]
    count: int
    shares: tuple[float, float]

    def judge(self, tokens: TokenValues) -> Judged:
        return judge_answers(tokens, self._formula)

    def _formula(self, given: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # Rows that only fill up have no tokens.
        desirable, real = self.desirable, lengths > 0
        ratios = given - self.reference.double()
        # One formula for both kinds: what is liked goes up from z0, what is not goes down.
        towards = torch.where(desirable, ratios - self.kl, self.kl - ratios)
        losses = torch.where(desirable, *self.weights) * (1 - torch.sigmoid(self.beta * towards))
        loss = torch.where(real, losses, 0.0).sum() / self.count
        rewards = (self.beta * ratios).detach()
        means = [
            # A batch without answers of a kind has the mean 0 and not 0 / 0.
            torch.where(real & kind, rewards, 0.0).sum() / max(share, 1 / self.count)
            for kind, share in zip((desirable, ~desirable), self.shares, strict=True)
        ]
        # ``metrics`` are divided by the number of answers later: z0, a constant, counts once for
        # each.
        return loss, dict(zip(METRICS, (self.kl * real.sum(), *means), strict=True))


@dataclass(frozen=True)
class LabelledAnswer:
    """The loss of answers that are desirable or not, a mean over them.

    Attributes:
        device: of the model.
        reference: what to compare with.
        policy: the model itself, as it is before the step.
        context: its ranks.
        beta, weights: of the loss; of desirable and of undesirable answers.
        metrics: means over the answers.
    """

    device: torch.device
    reference: Reference
    policy: Reference
    context: ParallelContext
    beta: float
    weights: tuple[float, float]
    metrics: tuple[str, ...] = METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        assert isinstance(batch, LabelledBatch) and batch.desirable is not None
        # (micro-batches, rows): a row without labels fills up.
        real = (batch.labels != IGNORE_INDEX).any(-1)
        # Counted once for all ranks that read the same samples.
        own = int((batch.desirable & real).sum()) if self.context.counts_tokens else 0
        # Over the global batch: means of metrics must not depend on how micro-batches were filled.
        (liked,) = sum_over_ranks(own)
        count, kl = max(num_valid, 1), self._kl(batch, num_valid)
        desirable = to_device(batch.desirable, self.device)
        reference = to_device(self.reference.log_probs(batch), self.device)
        # Fractions: metrics are means over all answers, these over one kind.
        shares = liked / count, 1 - liked / count

        def answers(i: int) -> AnswerLoss:
            loss = LabelledLoss(desirable[i], reference[i], kl, self.beta, self.weights, count, shares)
            return AnswerLoss(loss.judge)

        return answer_micro_batches(batch, answers, self.device, self.context.cp_group)

    def _kl(self, batch: LabelledBatch, num_valid: int) -> torch.Tensor:
        """z0 of the formula, 0-dim fp64, equal on all ranks: over the mismatched answers of the whole global batch, so
        that it depends on neither micro-batches nor layout."""
        # Each prompt with the answer of another one.
        others = batch.mismatched
        assert others is not None
        # Without a gradient: z0 is an estimate, which the loss takes as a constant.
        ratios = self.policy.log_probs(others).double() - self.reference.log_probs(others).to(self.device).double()
        real = to_device((others.labels != IGNORE_INDEX).any(-1), self.device)
        total = torch.where(real, ratios, 0.0).sum()
        if self.context.cp_rank > 0:  # these ranks have the same numbers, and the sum is over all
            total = torch.zeros_like(total)
        return (self.context.sum_loss(total) / max(num_valid, 1)).clamp(min=0)


def _build(config: Config, around: Surroundings) -> LabelledAnswer:
    objective = config.objective
    assert objective is not None, "settings of a fine-tuning run"
    return LabelledAnswer(
        device=around.device,
        reference=around.reference(),
        policy=around.policy(),
        context=around.context,
        beta=objective.kto_beta,
        weights=(objective.kto_desirable_weight, objective.kto_undesirable_weight),
    )


IMPLEMENTATION = Implementation(_build)
