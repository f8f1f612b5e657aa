"""Losses of pairs of answers by their log-probabilities: DPO and its kin, ORPO.

With l(y) = log p(y), summed over the tokens of an answer, r(y) = l(y) - l_ref(y), and z = beta (r(chosen) -
r(rejected)), the loss of a pair is:

- sigmoid: -(1 - s) log sigmoid(z) - s log sigmoid(-z), s: label smoothing. DPO (Rafailov et al. 2023, arXiv 2305.18290)
- hinge: max(0, 1 - z). SLiC (Zhao et al. 2023, arXiv 2305.10425) with DPO's rewards
- ipo: (r'(chosen) - r'(rejected) - 1 / (2 beta))^2, where r' is the mean over tokens, as in TRL. IPO (Azar et al. 2023,
  arXiv 2310.12036)
- orpo: -l'(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), where l' is the mean over tokens and
  odds = p / (1 - p) of exp l'. There is no reference. ORPO (Hong et al. 2024, arXiv 2403.07691)

Rewards, which are reported, are beta r; of ipo and orpo with means over tokens, of orpo without a reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from smp.config import Config
from smp.data.loader import RankBatch
from smp.data.tuning.batches import PairBatch
from smp.kernels.transfer import to_device
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.parallel.collectives import Group
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.contract import (
    PAIR_METRICS,
    Implementation,
    Reference,
    Surroundings,
    answer_micro_batches,
    judge_answers,
    pair_metrics,
)


@dataclass(frozen=True)
class PairLoss:
    """A loss of pairs, by one of the module's formulas, with its settings."""

    kind: Literal["sigmoid", "hinge", "ipo", "orpo"]
    beta: float
    label_smoothing: float = 0.0

    @staticmethod
    def of(config: Config) -> PairLoss:
        """The loss that the settings ask for."""
        objective = config.objective
        assert objective is not None, "settings of a fine-tuning run"
        if objective.objective == "orpo":
            return PairLoss("orpo", objective.orpo_beta)
        return PairLoss(objective.dpo_loss_type, objective.dpo_beta, objective.dpo_label_smoothing)

    def judge(self, num_pairs: int, reference: torch.Tensor | None, tokens: TokenValues) -> Judged:
        """Judge a micro-batch: chosen, rejected, chosen, ...

        Args:
            num_pairs: of the global batch, over which the loss is averaged.
            reference: fp32 (rows,), log-probabilities by the reference; None: there is none.
        """

        def formula(given: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            # (rows,) -> (pairs, 2)
            # A pair that only fills a batch up has no tokens, in neither of its answers.
            real = lengths.view(-1, 2).sum(1) > 0
            ratios = given if reference is None else given - reference.double()
            if self.kind in ("ipo", "orpo"):
                # Means over tokens, as in TRL.
                ratios = ratios / lengths.clamp(min=1)
            losses = self._of_pairs(ratios[::2], ratios[1::2])
            loss = torch.where(real, losses, 0.0).sum() / max(num_pairs, 1)
            return loss, pair_metrics(self.beta * ratios, real)

        return judge_answers(tokens, formula)

    def _of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Losses of pairs, fp64 (pairs,), from their (mean) log-ratios."""
        beta, smoothing = self.beta, self.label_smoothing
        margin = beta * (chosen - rejected)
        match self.kind:
            case "sigmoid":
                # logsigmoid and not log(sigmoid), which is -inf where sigmoid rounds to 0.
                return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
            case "hinge":
                return (1 - margin).relu()
            case "ipo":
                return (chosen - rejected - 1 / (2 * beta)).square()
            case "orpo":
                return -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """Log odds of a probability given by its logarithm. A filler has 0, whose odds would make the gradient NaN."""
    # ``where`` before the logarithm: a mask after it would leave a NaN in the gradient.
    log_prob = torch.where(log_prob < 0, log_prob, -1e-12)
    # log(1 - p) from log p, exact also where p is close to 1.
    return log_prob - torch.log(-torch.expm1(log_prob))


@dataclass(frozen=True)
class PreferredAnswer:
    """A loss of pairs of answers, a mean over pairs.

    Attributes:
        device: of the model.
        loss: of a pair.
        reference: what to compare with, if with anything.
        cp: ranks that share every sequence.
        metrics: means over the pairs.
    """

    device: torch.device
    loss: PairLoss
    reference: Reference | None = None
    cp: Group | None = None
    metrics: tuple[str, ...] = PAIR_METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        assert isinstance(batch, PairBatch)
        # Log-probabilities of the reference first, for the whole share: the model then runs through
        # its micro-batches as always.
        reference = None if self.reference is None else to_device(self.reference.log_probs(batch), self.device)

        def answers(i: int) -> AnswerLoss:
            return AnswerLoss(partial(self.loss.judge, num_valid, None if reference is None else reference[i]))

        return answer_micro_batches(batch, answers, self.device, self.cp)


def _build(config: Config, around: Surroundings) -> PreferredAnswer:
    reference = around.reference() if config.has_reference else None
    return PreferredAnswer(around.device, PairLoss.of(config), reference, around.context.cp_group)


def _fake(config: Config, rows: int) -> AnswerLoss:
    reference = torch.zeros(rows) if config.has_reference else None
    return AnswerLoss(partial(PairLoss.of(config).judge, 1, reference))


# ORPO differs by its formula, which ``PairLoss.of`` chooses.
DPO = ORPO = Implementation(_build, _fake)
