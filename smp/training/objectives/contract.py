"""What an objective is: its micro-batches say what the model computes, and its names what is reported of it.

An objective is built once for a run (:class:`Implementation`), from the settings and from what the run has for it
(:class:`Surroundings`): devices, ranks, and the models to compare with. In each step it makes micro-batches of a rank's
share of the batch. A loss that is no weighted cross-entropy of tokens comes along as
``MicroBatch.answers``; see ``smp.layers.heads.answers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from smp.config import Config
from smp.data.loader import RankBatch
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.layers.heads.distillation import TeacherStates, TopLogits
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext
from smp.training.micro_batches import MicroBatches, token_micro_batch


class Objective(Protocol):
    """Makes the micro-batches of a step; each says which loss it has."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what the loss measures; reported as means over what the loss is a mean over."""

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        """Micro-batches of this rank's share; ``num_valid`` of the global batch is what the loss is averaged over."""


class Reference(Protocol):
    """A source of log-probabilities of answers, without gradients."""

    def log_probs(self, batch: RankBatch) -> torch.Tensor:
        """Log-probabilities of whole answers, fp32 (micro-batches, rows); no meaning on a pipeline rank without the
        head."""


Said = Callable[[int, MicroBatch], TeacherStates | TopLogits | None]
"""What a teacher says of micro-batch number i; None on pipeline ranks without the head."""


class Teacher(Protocol):
    """A source of distributions of tokens to follow."""

    def begin(self, batch: RankBatch) -> Said:
        """The teacher's answers for this rank's share of a step. All ranks call it together."""


class Surroundings(Protocol):
    """What a run offers its objective: ranks, device, and the models to compare with."""

    @property
    def context(self) -> ParallelContext:
        """The ranks."""

    @property
    def device(self) -> torch.device:
        """The model's device."""

    def policy(self) -> Reference:
        """The model that is trained, with its weights at the time of the call, without dropout."""

    def reference(self) -> Reference:
        """What --dpo-reference names. To be called once: it may build a copy, or compute a table."""

    def teacher(self) -> Teacher:
        """What --teacher or --logits-load-dir names. To be called once: it builds it."""


class Implementation(NamedTuple):
    """How an objective is made.

    Attributes:
        build: for a run.
        fake: what the micro-batches of a dry run on fake tensors ask for, from settings and the number of rows: of the
            same operations as a run's, whatever the values. None: such a run has other passes than a reference's and
            its own, and only the formula of ``smp.training.cost.memory`` predicts it.
    """

    build: Callable[[Config, Surroundings], Objective]
    fake: Callable[[Config, int], AnswerLoss | None] | None = None


def answer_micro_batches(
    batch: RankBatch, answers: Callable[[int], AnswerLoss], device: torch.device, cp: Group | None = None
) -> MicroBatches:
    """Micro-batches of answers. ``answers`` says by the number of each what is wanted of it; ``cp`` are the ranks that
    share every sequence."""

    def make(i: int) -> MicroBatch:
        # Weight 1 for each token of an answer: the loss of answers weights it.
        return replace(token_micro_batch(batch, i, 1, device, cp), answers=answers(i))

    return MicroBatches(len(batch.input_ids), make)


Formula = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""A loss of whole answers: (fp64 (rows,), the sum of each answer's values, to be differentiated; int64 (rows,), its
tokens, 0 in a row that only fills up) -> (part of the mean loss, 0-dim; sums of metrics), both fp64."""


def judge_answers(tokens: TokenValues, formula: Formula) -> Judged:
    """Judge whole answers. The derivative by each token's log-probability is that by the sum of its answer."""
    # (rows,): under context parallelism a rank has some tokens of each row.
    totals = tokens.over_sequence(tokens.values.sum(1))
    # Lengths as well: a mean over an answer is over all its tokens, on whichever rank.
    lengths = tokens.over_sequence(tokens.counted.sum(1))
    with torch.enable_grad():
        # fp64: log-probabilities of long answers are hundreds, and losses are about differences of two of them.
        given = totals.double().requires_grad_()
        loss, metrics = formula(given, lengths)
        # By autograd, so that each loss is written down once, as a formula.
        (slopes,) = torch.autograd.grad(loss, given)
    loss, metrics = loss.detach().float(), {name: value.detach() for name, value in metrics.items()}
    if not tokens.leads:
        # All ranks of a sequence have the same loss, and losses of ranks are added up: only one counts it.
        loss, metrics = torch.zeros_like(loss), {name: torch.zeros_like(value) for name, value in metrics.items()}
    # (rows, 1) -> (rows, length): each token enters the sum with the factor 1.
    return Judged(loss, slopes.float()[:, None].expand_as(tokens.values), metrics)


PAIR_METRICS = ("reward accuracy", "reward margin", "reward of chosen", "reward of rejected")
"""Metrics of losses over pairs: 1 where the chosen answer is rewarded more, the margin between rewards, and both
rewards."""


def pair_metrics(rewards: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums of :data:`PAIR_METRICS` over the ``real`` ones (pairs,) of rewards (rows,): chosen, rejected, chosen, ..."""
    chosen, rejected = rewards.detach().view(-1, 2).unbind(1)
    margin = chosen - rejected
    measured = torch.stack([(margin > 0).double(), margin, chosen, rejected])  # (4, pairs)
    # ``where`` and not a product, as everywhere: a filling pair may give NaN.
    return dict(zip(PAIR_METRICS, torch.where(real, measured, 0.0).sum(1).unbind(), strict=True))
