"""Losses of answers, of pairs or one by one, on top of the vocabulary-parallel head.

With l(y) = log p(y), summed over the tokens of an answer, r(y) = l(y) - l_ref(y), and z = beta (r(chosen) -
r(rejected)), the loss of a pair is:

- sigmoid: -(1 - s) log sigmoid(z) - s log sigmoid(-z), s: label smoothing. DPO (Rafailov et al. 2023, arXiv 2305.18290)
- hinge: max(0, 1 - z). SLiC (Zhao et al. 2023, arXiv 2305.10425) with DPO's rewards
- ipo: (r'(chosen) - r'(rejected) - 1 / (2 beta))^2, where r' is the mean over tokens, as in TRL. IPO (Azar et al. 2023,
  arXiv 2310.12036)
- orpo: -l'(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), where l' is the mean over tokens and
  odds = p / (1 - p) of exp l'. There is no reference. ORPO (Hong et al. 2024, arXiv 2403.07691)

An answer alone, that somebody liked or not, has r(y) and a number z0 of the global batch: max(0, mean of r over prompts
with an answer that is another one's), an estimate of the KL divergence that has no gradient. KTO (Ethayarajh et al.
2024, arXiv 2402.01306):

- kto: w_d (1 - sigmoid(beta (r(y) - z0))) if it is desirable, else w_u (1 - sigmoid(beta (z0 - r(y))))

These losses are no sums over tokens, but their gradients are: every token of an answer has the weight d loss / d log
p(answer). So the head runs twice, each time a chunk of tokens at a time: once for the log-probabilities, once for the
weighted cross-entropy whose gradient is that of the loss. Logits of all tokens never exist, and one exchange of three
floats per token between the TP ranks serves any of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from smp.layers.cross_entropy import VocabShard, linear_cross_entropy, linear_token_losses
from smp.parallel.collectives import Group, reduce_from_group

METRICS = ("reward accuracy", "reward margin", "reward of chosen", "reward of rejected")
"""What the loss measures of a pair: 1 where the chosen answer is rewarded more, the margin between the rewards, and
both. A reward is beta r; of ipo and orpo with means over tokens, of orpo without a reference."""

KTO_METRICS = ("KL", "reward of desirable", "reward of undesirable")
"""What kto measures: z0, and the mean rewards beta r of both kinds of answers, 0 where a batch has none."""

PairLoss = Literal["sigmoid", "hinge", "ipo", "orpo"]


@dataclass(frozen=True)
class Labelled:
    """KTO's inputs for the answers of a micro-batch, except their log-probabilities.

    Attributes:
        desirable: bool (rows,).
        kl: fp64, 0-dim: z0 of the formula.
        weights: of desirable and of undesirable answers.
        shares: of both kinds in the global batch, for the means of metrics.
    """

    desirable: torch.Tensor
    kl: torch.Tensor
    weights: tuple[float, float]
    shares: tuple[float, float]


@dataclass(frozen=True)
class Preference:
    """Computes a loss from the log-probabilities of a micro-batch's answers.

    Attributes:
        rows, length: answers in the micro-batch (chosen, rejected, chosen, rejected, ...) and tokens of each, on this
            rank.
        loss_type, beta, label_smoothing: see the formulas above.
        num_pairs: of the global batch, over which the loss is averaged.
        reference: fp32 (rows,), log-probabilities by the reference, for orpo zeros; None: only those of this model are
            wanted.
        center: of a reward model, which compares scores and has no reference: see ``smp.layers.score``.
        labelled: rows are answers one by one, for kto; None: they are pairs. ``num_pairs`` counts answers then.
    """

    rows: int
    length: int
    loss_type: PairLoss = "sigmoid"
    beta: float = 0.0
    label_smoothing: float = 0.0
    num_pairs: int = 1
    reference: torch.Tensor | None = None
    center: float = 0.0
    labelled: Labelled | None = None


def preference_loss(
    log_probs: torch.Tensor, tokens: torch.Tensor, preference: Preference
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(this micro-batch's part of the mean loss, 0-dim fp32; its derivative by each log-probability, (rows,); sums of
    ``METRICS`` over the pairs, or of ``KTO_METRICS`` over the answers, fp64).

    Args:
        log_probs: fp32 (rows,).
        tokens: of each answer, (rows,); 0 for both of a pair that only fills up.
        preference: what to compare with, and how.
    """
    assert preference.reference is not None
    if preference.labelled is not None:
        return _labelled_loss(log_probs, tokens > 0, preference, preference.labelled)
    # A pair that only fills a batch up has no tokens, in neither of its answers.
    real = tokens.view(-1, 2).sum(1) > 0
    with torch.enable_grad():
        # fp64: log-probabilities of long answers are hundreds, and the loss is about differences of two of them.
        given = log_probs.detach().double().requires_grad_()
        ratios = given - preference.reference.double()
        if preference.loss_type in ("ipo", "orpo"):
            ratios = ratios / tokens.clamp(min=1)
        losses = _loss_of_pairs(ratios[::2], ratios[1::2], preference)
        # ``where`` and not a product, as everywhere: a filling pair may give NaN.
        loss = torch.where(real, losses, 0.0).sum() / max(preference.num_pairs, 1)
        # By autograd, so that each loss is written down once, as a formula.
        (slopes,) = torch.autograd.grad(loss, given)
    chosen, rejected = (preference.beta * ratios).detach().view(-1, 2).unbind(1)
    margin = chosen - rejected
    measured = torch.stack([(margin > 0).double(), margin, chosen, rejected])  # (4, pairs)
    return loss.detach().float(), slopes.float(), torch.where(real, measured, 0.0).sum(1)


def _labelled_loss(
    log_probs: torch.Tensor, real: torch.Tensor, preference: Preference, labelled: Labelled
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``preference_loss``, of answers one by one; those that are not ``real`` only fill up."""
    assert preference.reference is not None
    desirable, count = labelled.desirable, max(preference.num_pairs, 1)
    liked, disliked = labelled.weights
    with torch.enable_grad():
        given = log_probs.detach().double().requires_grad_()
        ratios = given - preference.reference.double()
        # One formula for both kinds: what is liked goes up from z0, what is not goes down.
        towards = torch.where(desirable, ratios - labelled.kl, labelled.kl - ratios)
        losses = torch.where(desirable, liked, disliked) * (1 - torch.sigmoid(preference.beta * towards))
        loss = torch.where(real, losses, 0.0).sum() / count
        (slopes,) = torch.autograd.grad(loss, given)
    rewards = (preference.beta * ratios).detach()
    means = [
        # A batch without answers of a kind has the mean 0 and not 0 / 0.
        torch.where(real & kind, rewards, 0.0).sum() / max(share, 1 / count)
        for kind, share in zip((desirable, ~desirable), labelled.shares, strict=True)
    ]
    return loss.detach().float(), slopes.float(), torch.stack([labelled.kl * real.sum(), *means])


def _loss_of_pairs(chosen: torch.Tensor, rejected: torch.Tensor, preference: Preference) -> torch.Tensor:
    """fp64 (pairs,), of (mean) log-ratios."""
    beta, smoothing = preference.beta, preference.label_smoothing
    margin = beta * (chosen - rejected)
    match preference.loss_type:
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
    """Of a probability by its logarithm. One that only fills up has 0, whose odds would make the gradient NaN."""
    log_prob = torch.where(log_prob < 0, log_prob, -1e-12)
    # log(1 - p) from log p, exact also where p is close to 1.
    return log_prob - torch.log(-torch.expm1(log_prob))


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
    fp32; sums of ``METRICS`` over them, of kto other ones). All are equal on all ranks of the group; without a
    reference there are only log-probabilities.

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
        # Rows behind the answers are padding.
        in_answer = counted[: rows * length] > 0
        log_probs = -torch.where(in_answer, losses[: rows * length], 0.0).view(rows, length).sum(1)
        log_probs = _over_answers(log_probs, cp)
        if preference.reference is None:
            return log_probs, None, {}
        # Lengths as well: a mean over an answer is over all its tokens, on whichever rank.
        tokens = _over_answers(in_answer.view(rows, length).sum(1), cp)
        loss, slopes, sums = preference_loss(log_probs, tokens, preference)
        # The ranks' losses are added up later: only the first one counts it.
        if cp is not None and cp.rank > 0:
            loss, sums = torch.zeros_like(loss), torch.zeros_like(sums)
        # d loss / d log p of the answer, for each of its tokens.
        weights = torch.where(in_answer, -slopes.repeat_interleave(length), 0.0)  # log p = - cross-entropy
        weights = F.pad(weights, (0, len(labels) - len(weights)))
    names = METRICS if preference.labelled is None else KTO_METRICS
    metrics = dict(zip(names, sums.unbind(), strict=True))
    if torch.is_grad_enabled():
        weighted = linear_cross_entropy(
            hidden, weight, labels, weights, shard, chunk_tokens=chunk_tokens, backend=backend
        )
        # The second pass is for the gradient alone: its value drops out.
        loss = loss + (weighted - weighted.detach())  # this value with that gradient
    return log_probs, loss, metrics
