"""The head of a reward model: one number for an answer, and the Bradley-Terry loss of pairs of them.

The score of a text is ``w . x`` of the hidden state x of its last token, as transformers' ...ForSequenceClassification
with one label computes it. The loss of a pair is -log sigmoid(score(chosen) - score(rejected)), plus c times the square
of their sum, which keeps scores around 0 (Eisenstein et al. 2023, arXiv 2312.09244; TRL's center_rewards_coefficient).

What crosses links is one float per token, outside of autograd: each rank then differentiates the scores of its own
tokens, each with the weight d loss / d score.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.layers.head import ModelOutput
from smp.layers.parameter import REPLICATE, Initializer, Normal, local, tp_parameter
from smp.layers.preference import METRICS, Preference
from smp.parallel.collectives import gather_tokens, reduce_from_group
from smp.parallel.context import ParallelContext


class ScoreHead(nn.Module):
    """In place of the output matrix.

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
        preference: Preference | None = None,
    ) -> ModelOutput:
        """The loss of pairs; without a preference the scores of all tokens, as logits (tokens, 1).

        Args:
            x: (tokens [/p], hidden).
            labels: of no use here.
            loss_weights: fp32 (tokens,), above 0 at the last token of each text.
            tied_weight: None.
            preference: ``rows`` texts of ``length`` tokens: chosen, rejected, chosen, rejected, ...
        """
        # fp32 after the product, whose inputs are rounded already; each rank has its own tokens.
        scores = F.linear(x, local(self.weight, x.dtype, summed_over=self.shared_by)).squeeze(1).float()
        # Outside of autograd: the gradient is put together below, for this rank's tokens alone.
        with torch.no_grad():
            everywhere = scores if self.shared_by is None else gather_tokens(scores, self.shared_by)  # (tokens,)
        if preference is None or loss_weights is None:
            return ModelOutput(logits=everywhere[:, None])
        loss, slopes, sums = self._loss(everywhere, loss_weights, preference)
        if torch.is_grad_enabled():
            first = 0 if self.shared_by is None else self.shared_by.rank * len(scores)
            weighted = (scores * slopes[first : first + len(scores)]).sum()
            loss = loss + (weighted - weighted.detach())  # this value with that gradient
        return ModelOutput(loss=loss, metrics=dict(zip(METRICS, sums.unbind(), strict=True)))

    @torch.no_grad()
    def _loss(
        self, scores: torch.Tensor, counted: torch.Tensor, preference: Preference
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, 0-dim; its derivative by the score of each token; sums of ``METRICS``), equal on all TP ranks. Of the
        ranks that share sequences the first has loss and metrics, each the derivatives of its tokens."""
        rows, length = preference.rows, preference.length
        last = (counted[: rows * length] > 0).view(rows, length)
        # One token of each text counts; without one, a text that only fills up, the score is 0.
        of_rows = torch.where(last, scores[: rows * length].view(rows, length), 0.0).sum(1)
        real = last.any(1).float()
        if self.cp is not None:
            of_rows, real = reduce_from_group(of_rows, self.cp), reduce_from_group(real, self.cp)
        loss, slopes, sums = bradley_terry(of_rows, real > 0, preference.num_pairs, preference.center)
        # As in ``linear_preference``: the ranks' losses are added up later.
        if self.cp is not None and self.cp.rank > 0:
            loss, sums = torch.zeros_like(loss), torch.zeros_like(sums)
        of_tokens = (slopes[:, None] * last).view(-1)
        return loss, F.pad(of_tokens, (0, len(scores) - len(of_tokens))), sums


def bradley_terry(
    scores: torch.Tensor, real: torch.Tensor, num_pairs: int, center: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(part of the mean loss, 0-dim fp32; its derivative by each score, (rows,); sums of ``METRICS`` over pairs, fp64).

    Args:
        scores: fp32 (rows,): chosen, rejected, chosen, rejected, ...
        real: bool (rows,), False for both of a pair that only fills up.
        num_pairs: of the global batch.
        center: weight of the squared sum.
    """
    with torch.enable_grad():
        given = scores.detach().double().requires_grad_()
        chosen, rejected = given[::2], given[1::2]
        losses = -F.logsigmoid(chosen - rejected) + center * (chosen + rejected).square()
        loss = torch.where(real[::2], losses, 0.0).sum() / max(num_pairs, 1)
        (slopes,) = torch.autograd.grad(loss, given)
    chosen, rejected = chosen.detach(), rejected.detach()
    measured = torch.stack([(chosen > rejected).double(), chosen - rejected, chosen, rejected])  # (4, pairs)
    return loss.detach().float(), slopes.float(), torch.where(real[::2], measured, 0.0).sum(1)
