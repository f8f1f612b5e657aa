"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) on top of the vocabulary-parallel head.

With r(y) = log p(y) - log p_ref(y), summed over the tokens of an answer, and z = beta (r(chosen) - r(rejected)):

    loss of a pair = -(1 - s) log sigmoid(z) - s log sigmoid(-z)        s: label smoothing

The loss is no sum over tokens, but its gradient is: every token of an answer has the weight d loss / d log p(answer).
So the head runs twice, each time a chunk of tokens at a time: once for the log-probabilities, once for the weighted
cross-entropy whose gradient is that of the loss. Logits of all tokens never exist, and one exchange of three floats per
token between the TP ranks serves any of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smp.layers.cross_entropy import VocabShard, linear_cross_entropy, linear_token_losses
from smp.parallel.collectives import Group, reduce_from_group

METRICS = ("reward accuracy", "reward margin", "reward of chosen", "reward of rejected")
"""What the loss measures of a pair: 1 where the chosen answer is rewarded more, the margin between the rewards, and
both. A reward is beta r."""


@dataclass(frozen=True)
class Preference:
    """What turns the log-probabilities of a micro-batch's answers into a loss.

    Attributes:
        rows, length: answers in the micro-batch (chosen, rejected, chosen, rejected, ...) and tokens of each, on this
            rank.
        beta, label_smoothing: see the formula above.
        num_pairs: of the global batch, over which the loss is averaged.
        reference: fp32 (rows,), log-probabilities by the reference; None: only those of this model are wanted.
    """

    rows: int
    length: int
    beta: float = 0.0
    label_smoothing: float = 0.0
    num_pairs: int = 1
    reference: torch.Tensor | None = None


def preference_loss(
    log_probs: torch.Tensor, counts: torch.Tensor, preference: Preference
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(this micro-batch's part of the mean loss, 0-dim fp32; its derivative by each log-probability, (rows,); sums of
    ``METRICS`` over the pairs, fp64).

    Args:
        log_probs: fp32 (rows,).
        counts: bool (rows / 2,), False for a pair that only fills up.
        preference: what to compare with, and how.
    """
    assert preference.reference is not None
    rewards = preference.beta * (log_probs - preference.reference).double()
    chosen, rejected = rewards[::2], rewards[1::2]
    margin = chosen - rejected
    smoothing = preference.label_smoothing
    losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    slope = preference.beta * (smoothing * torch.sigmoid(margin) - (1 - smoothing) * torch.sigmoid(-margin))
    weight = counts.double() / max(preference.num_pairs, 1)
    slopes = torch.stack((slope * weight, -slope * weight), dim=1).flatten()
    measured = torch.stack([(margin > 0).double(), margin, chosen, rejected])  # (4, pairs)
    loss = torch.where(counts, losses * weight, 0.0).sum()
    return loss.float(), slopes.float(), torch.where(counts, measured, 0.0).sum(1)


def _over_answers(x: torch.Tensor, cp: Group | None) -> torch.Tensor:
    """The sum over the ranks that have parts of an answer."""
    return x if cp is None else reduce_from_group(x, cp)


def linear_preference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    counted: torch.Tensor,
    shard: VocabShard,
    preference: Preference,
    *,
    chunk_tokens: int,
    backend: str = "torch",
    cp: Group | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """(log-probability of each answer, fp32 (rows,), without gradient; the loss of the pairs in the micro-batch, 0-dim
    fp32; sums of ``METRICS`` over them). All are equal on all ranks of the group; without a reference there are only
    log-probabilities.

    Args:
        hidden, weight, labels, shard, chunk_tokens, backend: as in ``linear_cross_entropy``; ``hidden`` holds ``rows``
            answers of ``length`` tokens, one after the other, then padding.
        counted: (n,), above 0 where a token belongs to an answer.
        preference: what the loss is.
        cp: ranks that hold other tokens of the same answers. Log-probabilities are sums over all of them; the first
            returns loss and metrics, the others 0 with the gradient of their tokens, so that the sum over all ranks is
            the loss.
    """
    rows, length = preference.rows, preference.length
    with torch.no_grad():
        losses = linear_token_losses(hidden, weight, labels, shard, chunk_tokens=chunk_tokens, backend=backend)
        in_answer = counted[: rows * length] > 0
        log_probs = -torch.where(in_answer, losses[: rows * length], 0.0).view(rows, length).sum(1)
        log_probs = _over_answers(log_probs, cp)
        if preference.reference is None:
            return log_probs, None, {}
        counts = _over_answers(in_answer.view(rows // 2, -1).any(1).float(), cp) > 0
        loss, slopes, sums = preference_loss(log_probs, counts, preference)
        if cp is not None and cp.rank > 0:
            loss, sums = torch.zeros_like(loss), torch.zeros_like(sums)
        weights = torch.where(in_answer, -slopes.repeat_interleave(length), 0.0)  # log p = - cross-entropy
        weights = F.pad(weights, (0, len(labels) - len(weights)))
    metrics = dict(zip(METRICS, sums.unbind(), strict=True))
    if torch.is_grad_enabled():
        weighted = linear_cross_entropy(
            hidden, weight, labels, weights, shard, chunk_tokens=chunk_tokens, backend=backend
        )
        loss = loss + (weighted - weighted.detach())  # this value with that gradient
    return log_probs, loss, metrics
