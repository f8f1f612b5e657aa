"""The head of a reward model: one number for an answer.

The score of a text is ``w . x`` of the hidden state x of its last token, as transformers' ...ForSequenceClassification
with one label computes it. What is minimised is a loss of answers, as of the vocabulary-parallel head; see
``smp.layers.heads.answers``.

What crosses links is one float per token, outside of autograd: each rank then differentiates the scores of its own
tokens, each with the weight d loss / d score.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.layers.heads.answers import AnswerLoss, judged, with_gradient_of
from smp.layers.heads.head import ModelOutput
from smp.layers.parameter import REPLICATE, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import Group, gather_tokens
from smp.parallel.context import ParallelContext


class ScoreHead(nn.Module):
    """A head of scores, instead of the output matrix.

    Args:
        hidden_size: width of the input.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` the input is split
            along dim 0.
        init_std: standard deviation of the initial weights.
    """

    def __init__(self, hidden_size: int, parallel: ParallelContext | DeviceMesh, *, init_std: float = 0.02) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.shared_by, self.cp = context.shared_by, context.cp_group
        self.weight = tp_parameter((1, hidden_size), REPLICATE, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        tied_weight: torch.Tensor | None = None,
        answers: AnswerLoss | None = None,
        shape: tuple[int, int] | None = None,
    ) -> ModelOutput:
        """The loss of answers; without one the scores of all tokens, as logits (tokens, 1).

        Args:
            x: (tokens [/p], hidden).
            labels: not used.
            loss_weights: fp32 (tokens,), above 0 at the last token of each text.
            tied_weight: None.
            answers: the loss over the scores.
            shape: (rows, length) of the texts; after these tokens is padding.
        """
        weight = local(self.weight, x.dtype, summed_over=self.shared_by)
        return scored(x, weight, loss_weights, answers, shape, shared_by=self.shared_by, cp=self.cp)


def scored(
    x: torch.Tensor,
    weight: torch.Tensor,
    loss_weights: torch.Tensor | None,
    answers: AnswerLoss | None,
    shape: tuple[int, int] | None,
    *,
    shared_by: Group | None = None,
    cp: Group | None = None,
) -> ModelOutput:
    """The forward pass of :class:`ScoreHead` with a given row ``weight`` (1, hidden).

    Args:
        shared_by: ranks that have some of the tokens each.
        cp: ranks that share every sequence.
    """
    # fp32 after the product, whose inputs are rounded already; each rank has its own tokens.
    scores = F.linear(x, weight).squeeze(1).float()
    # Outside of autograd: the gradient is joined below, for this rank's tokens alone.
    with torch.no_grad():
        everywhere = scores if shared_by is None else gather_tokens(scores, shared_by)  # (tokens,)
        if answers is None or loss_weights is None or shape is None:
            return ModelOutput(logits=everywhere[:, None])
        # Computed alike on all TP ranks, which have all scores.
        values, result = judged(answers, everywhere, loss_weights, shape, cp)
    if result is None:
        return ModelOutput(values=values)
    loss = result.loss
    if torch.is_grad_enabled():
        # The slopes are of all tokens, ``scores`` with its graph of this rank's.
        first = 0 if shared_by is None else shared_by.rank * len(scores)
        loss = with_gradient_of(loss, (scores * result.slopes[first : first + len(scores)]).sum())
    return ModelOutput(loss=loss, metrics=result.metrics)
