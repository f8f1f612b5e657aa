"""The interface between an output head and a loss over answers: per-token values in, a loss and its derivatives out.

A head gives each token of an answer a number: the vocabulary-parallel one its log-probability, that of a reward model a
score. An :class:`AnswerLoss` makes of the numbers of a micro-batch its part of the mean loss and the derivative by each
number. The head turns these slopes into gradients. So no head knows an objective, and no objective knows how a
vocabulary or a sequence is split.

Such a loss may combine all tokens of an answer, or answers with each other, and still its gradient is a sum over
tokens, each with its slope. So the vocabulary-parallel head runs twice, each time a chunk of tokens at a time: once for
the log-probabilities, once for the weighted cross-entropy whose gradient is that of the loss. Logits of all tokens
never exist, and one exchange of three floats per token between the TP ranks serves any of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy, linear_token_losses
from smp.parallel.collectives import Group, reduce_from_group


@dataclass(frozen=True)
class TokenValues:
    """Log-probabilities or scores of the tokens of a micro-batch, on the columns of every sequence that this rank
    holds.

    Attributes:
        values: fp32 (rows, length), without gradient: log-probabilities or scores; 0 outside of the answers.
        counted: bool (rows, length), where a token belongs to an answer; False everywhere in a padding row.
        cp: ranks that hold other columns of the same sequences.
        entropy: fp32 (rows, length), entropy in nats of each token's distribution; None: not requested.
    """

    values: torch.Tensor
    counted: torch.Tensor
    cp: Group | None = None
    entropy: torch.Tensor | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank contributes numbers that all ranks of ``cp`` compute alike: losses and metrics are added
        up."""
        return self.cp is None or self.cp.rank == 0

    def over_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that hold parts of the same sequences."""
        return x if self.cp is None else reduce_from_group(x, self.cp)


class Judged(NamedTuple):
    """The result of a loss of answers.

    Attributes:
        loss: 0-dim fp32, this rank's part of the mean over the global batch.
        slopes: fp32 (rows, length), its derivative by each value; entries outside of the answers are ignored.
        metrics: fp64 sums by name, this rank's part as well.
    """

    loss: torch.Tensor
    slopes: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class AnswerLoss:
    """The loss of the answers in a micro-batch, and what the head has to compute for it.

    Attributes:
        judge: the loss; None: only the values of tokens are wanted.
        entropy: whether ``judge`` reads entropies. They cost a pass over the logits and one float per token between TP
            ranks.
        temperature: logits are divided by it; scores are not.
        states: called with this rank's output matrix; the values are then the hidden states that the matrix is applied
            to, (tokens [/p], hidden), and nothing else is computed.
    """

    judge: Callable[[TokenValues], Judged] | None = None
    entropy: bool = False
    temperature: float = 1.0
    states: Callable[[torch.Tensor], None] | None = None


def judged(
    answers: AnswerLoss,
    values: torch.Tensor,
    loss_weights: torch.Tensor,
    shape: tuple[int, int],
    cp: Group | None,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Judged | None]:
    """(values of tokens as the caller of a model gets them, (rows, length); the verdict, with slopes for all tokens of
    ``values`` and 0 outside of the answers).

    Args:
        answers: what is wanted.
        values, entropy: fp32 (tokens,): ``rows`` answers of ``length`` tokens after each other, then padding.
        loss_weights: (tokens,), above 0 where a token belongs to an answer.
        shape: (rows, length).
        cp: see :class:`TokenValues`.
    """
    size = shape[0] * shape[1]  # what follows is padding
    # (rows, length)
    counted = (loss_weights[:size] > 0).view(shape)

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        # ``where`` and not a product: the number of a token without a label may be NaN.
        return torch.where(counted, x[:size].view(shape), 0.0)

    own = laid_out(values)
    if answers.judge is None:
        return own, None
    result = answers.judge(TokenValues(own, counted, cp, None if entropy is None else laid_out(entropy)))
    # Slopes for the padding too: the second pass goes over all tokens that the head has.
    return own, result._replace(slopes=F.pad(laid_out(result.slopes.reshape(-1)).view(-1), (0, len(values) - size)))


def linear_answers(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    shard: VocabShard,
    answers: AnswerLoss,
    shape: tuple[int, int],
    *,
    chunk_tokens: int,
    backend: str = "torch",
    cp: Group | None = None,
) -> tuple[torch.Tensor, Judged | None]:
    """(log-probabilities of the answers' tokens, fp32 (rows, length), without gradient; loss, with gradient, and
    metrics). Equal on all ranks of the group.

    Args:
        hidden, weight, labels, shard, chunk_tokens, backend: as in ``linear_cross_entropy``; ``hidden`` holds the
            tokens of ``shape``, then padding.
        loss_weights, answers, shape, cp: as in :func:`judged`.
    """
    arguments = hidden, weight, labels
    # Log-probabilities of the distribution that the answers were drawn from.
    shard = replace(shard, temperature=answers.temperature)
    with torch.no_grad():
        # First pass, without gradient: log-probabilities of all tokens, from which the loss gets its slopes.
        losses, entropy = linear_token_losses(
            *arguments, shard, chunk_tokens=chunk_tokens, backend=backend, with_entropy=answers.entropy
        )
        log_probs, result = judged(answers, -losses, loss_weights, shape, cp, entropy)
    if result is None or not torch.is_grad_enabled():
        return log_probs, result
    # log p = - cross-entropy; taken from 0, so that no weight is -0.
    weights = 0.0 - result.slopes
    # Second pass: d loss = sum of slope x d log p, which is a cross-entropy with these weights.
    weighted = linear_cross_entropy(*arguments, weights, shard, chunk_tokens=chunk_tokens, backend=backend)
    return log_probs, result._replace(loss=with_gradient_of(result.loss, weighted))


def with_gradient_of(value: torch.Tensor, weighted: torch.Tensor) -> torch.Tensor:
    """``value`` with the gradient of ``weighted``, whose own value drops out."""
    return value + (weighted - weighted.detach())
