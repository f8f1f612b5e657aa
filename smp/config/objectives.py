"""Objectives of fine-tuning: a row of facts for each, and the settings of all of them.

What computes them is in ``smp.training.objectives``, a file for each family. Here is what must be known before torch
is: what is read of the data, what cannot be combined, what a step costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smp.config.declare import one_of, only_with
from smp.config.rollouts import ONLINE


@dataclass(frozen=True)
class ObjectiveFacts:
    """Properties of an objective that the rest of the program reads.

    Attributes:
        summary: for --help.
        reads: what a line of the data is: one text with trained parts, a chosen and a rejected answer to one prompt, an
            answer with a label, desirable or not, or a prompt alone.
        of_answers: the loss is an ``AnswerLoss``, made of log-probabilities or scores of an answer's tokens, and no
            cross-entropy. Samples are not packed then, prompts are never trained, and routers are not balanced.
        has_reference: it compares with a reference model, see --dpo-reference.
        mismatched: in each step both models also read the prompts with answers of other samples.
        has_scores: the model gets a scalar score head instead of the output matrix (as transformers'
            ``...ForSequenceClassification`` with one label).
        evaluates: what an evaluation measures: the loss, or the mean reward of completions.
        entropy: the loss is the cross-entropy of tokens, which has a perplexity.
        unit: of the loss, for plots.
    """

    summary: str
    reads: Literal["sample", "pair", "labelled", "prompt"] = "sample"
    of_answers: bool = False
    has_reference: bool = False
    mismatched: bool = False
    has_scores: bool = False
    evaluates: Literal["loss", "reward"] = "loss"
    entropy: bool = False
    unit: str = "nats per token"

    @property
    def rows(self) -> int:
        """Sequences per sample."""
        return 2 if self.reads == "pair" else 1


_ONLINE = {
    "grpo": "reinforcement learning on what the model writes, compared within each prompt (arXiv 2402.03300)",
    "dr_grpo": "grpo without the normalisation by lengths and deviations (2503.20783)",
    "dapo": "grpo with clip-higher, dynamic sampling and overlong shaping (2503.14476)",
    "gspo": "grpo with one ratio for each completion (2507.18071)",
    "cispo": "grpo whose clipped ratio is a weight without gradient (2506.13585)",
    "rloo": "REINFORCE with the other completions as baseline (2402.14740)",
    "reinforce++": "REINFORCE with rewards normalised over the batch (2501.03262)",
}
OBJECTIVES = {
    "sft": ObjectiveFacts("cross-entropy of the samples", entropy=True),
    "distill": ObjectiveFacts("the divergence from a teacher's distributions of tokens (arXiv 2306.13649)"),
    "dpo": ObjectiveFacts(
        "direct preference optimization on pairs of answers",
        reads="pair",
        of_answers=True,
        has_reference=True,
        unit="nats per pair",
    ),
    "orpo": ObjectiveFacts(
        "cross-entropy of the chosen answer and its odds against the rejected one, without a reference",
        reads="pair",
        of_answers=True,
        unit="nats per pair",
    ),
    "kto": ObjectiveFacts(
        "Kahneman-Tversky optimization on answers that have a label, desirable or not",
        reads="labelled",
        of_answers=True,
        has_reference=True,
        mismatched=True,
        unit="utility lost per answer",
    ),
    "reward": ObjectiveFacts(
        "a reward model, whose score of a chosen answer is above that of the rejected one",
        reads="pair",
        of_answers=True,
        has_scores=True,
        unit="nats per pair",
    ),
    **{
        name: ObjectiveFacts(summary, reads="prompt", of_answers=True, has_reference=True, evaluates="reward", unit="")
        for name, summary in _ONLINE.items()
    },
}
"""By the value of --objective. ``smp.training.objectives.add`` adds one from outside of this package."""


@dataclass
class ObjectiveConfig:
    """The loss of a fine-tuning run."""

    objective: str = one_of("sft", OBJECTIVES)
    """Which loss is minimised."""
    dpo_loss_type: Literal["sigmoid", "hinge", "ipo"] = only_with("sigmoid", objective="dpo")
    """sigmoid: DPO's own; hinge: SLiC's, max(0, 1 - beta x margin); ipo: the squared distance of the margin, of means
    over tokens, from 1 / (2 beta)."""
    dpo_beta: float = only_with(0.1, objective="dpo")
    """Strength with which the policy is kept near the reference: factor of the difference of log-ratios."""
    dpo_label_smoothing: float = only_with(0.0, dpo_loss_type="sigmoid")
    """Probability that a preference is the wrong way round, below 0.5 (conservative DPO)."""
    dpo_reference: Literal["adapters-off", "copy", "precomputed"] | None = only_with(
        None, objective=("dpo", "kto", *ONLINE)
    )
    """Where the reference's log-probabilities come from. adapters-off: the model without its adapters; copy: a frozen
    copy; precomputed: a table computed before training (dpo). Default: adapters-off with --lora-rank, else copy."""
    orpo_beta: float = only_with(0.1, objective="orpo")
    """Weight of the odds next to the cross-entropy (lambda in the paper)."""
    kto_beta: float = only_with(0.1, objective="kto")
    """Strength with which the policy is kept near the reference: factor of the log-ratios."""
    kto_desirable_weight: float = only_with(1.0, objective="kto")
    """Weight of the losses of desirable answers. The paper keeps weight x number of the two kinds within a ratio of 1
    to 4/3."""
    kto_undesirable_weight: float = only_with(1.0, objective="kto")
    """Weight of the losses of undesirable answers."""
    reward_center_coefficient: float = only_with(0.0, objective="reward")
    """Weight of the squared sum of a pair's scores, which keeps them around 0 (TRL's center_rewards_coefficient)."""
