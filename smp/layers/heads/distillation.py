"""Distillation: the divergence of a model's next-token distributions from those of a teacher.

With q the model's distribution of a token and p the teacher's, both the softmax of logits / temperature, the loss of a
token is the generalized Jensen-Shannon divergence of Agarwal et al. 2024 (GKD, arXiv 2306.13649),

    beta KL(p | m) + (1 - beta) KL(q | m),    m = beta p + (1 - beta) q,

and at its ends what it becomes after a division by beta and 1 - beta: the forward KL(p | q) for beta 0, the reverse
KL(q | p) for beta 1. It is not multiplied by temperature^2 (as in TRL, unlike Hinton et al. 2015). A loss D that has
the slope g_i by q_i has by the logits z the gradient (q_i g_i - q_i sum_j q_j g_j) / temperature; for the divergence
g_i = (1 - beta) log(q_i / m_i), for KL(p | q) -p_i / q_i, for KL(q | p) log(q_i / p_i), up to what the sum removes.

The teacher is known either by the states before its output matrix (:class:`TeacherStates`), from which a chunk of its
logits is made next to a chunk of the model's: logits of all tokens never exist. Or by the log-probabilities of its k
likeliest tokens (:class:`TopLogits`). All others are then one more token, with the sum of their probabilities, on both
sides: the exact divergence of what is known, and a lower bound of the full one, which it equals when k is the
vocabulary. Under tensor parallelism a chunk costs an exchange of three floats a token for each softmax, and one of two
or three for the sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from smp.kernels.matmul import linear
from smp.kernels.registry import accumulation_dtype
from smp.layers.heads.cross_entropy import VocabShard, linear_loss, softmax_normalizer, weighted_losses
from smp.parallel.collectives import Group, gather_tokens, reduce_from_group, start_all_gather, wait

_LEAST = 1.2e-38
"""Smallest probability: the logarithm of 0 would be minus infinity."""


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's output matrix: logits = states @ matrix^T.

    Attributes:
        matrix: this rank's rows of the output matrix, (rows, hidden), for the same token ids as the model's.
        shard: which rows these are, and the teacher's cap of logits.
        shared_by: ranks that have the states of some of the tokens each; None: every rank has all. They need not be the
            group of ``shard``: a matrix that tensor parallelism leaves whole has none.
    """

    matrix: torch.Tensor
    shard: VocabShard
    shared_by: Group | None

    def aligned(self, shard: VocabShard) -> TeacherHead:
        """This head with the rows of ``shard``: vocabularies may be padded to different sizes. Token ids that one of
        both does not have get no row."""
        own = self.shard
        # Once for a teacher, not for a step: gathered whole, then this rank's rows in the model's cut.
        whole = wait(start_all_gather(self.matrix, own.group), own.group)
        # Ids from ``common`` on have no partner: the divergence is over the ids that both know.
        common = min(own.vocab_size, shard.vocab_size)
        valid = min(max(common - shard.start, 0), shard.valid)
        return TeacherHead(
            whole[shard.start : shard.start + valid].clone(),
            replace(shard, valid=valid, vocab_size=common, softcap=own.softcap),
            self.shared_by,
        )


@dataclass(frozen=True)
class TeacherStates:
    """A teacher that was run on these tokens.

    Attributes:
        head: makes logits.
        states: what its output matrix is multiplied with, (tokens [/p], hidden).
    """

    head: TeacherHead
    states: torch.Tensor


@dataclass(frozen=True)
class TopLogits:
    """Stored log-probabilities of a teacher that ran on these tokens before: its k likeliest ids of each.

    Attributes:
        ids: int64 (tokens, k), token ids, each once.
        log_probs: fp32 (tokens, k).
        rest: fp32 (tokens,), the logarithm of the probability of all other ones. (1 - the sum of the k probabilities
            would be noise where these are nearly all.)
        vocab_size: token ids of the teacher.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    rest: torch.Tensor
    vocab_size: int

    def padded(self, tokens: int) -> TopLogits:
        """These logits, with rows for padding tokens."""
        more = tokens - len(self.ids)
        ids, log_probs = (F.pad(x, (0, 0, 0, more)) for x in (self.ids, self.log_probs))
        return TopLogits(ids, log_probs, F.pad(self.rest, (0, more)), self.vocab_size)

    def within(self, vocab_size: int) -> TopLogits:
        """These logits, with the probability of token ids that a model of ``vocab_size`` does not have added to that of
        the rest."""
        if self.vocab_size <= vocab_size:
            return self
        known = self.ids < vocab_size
        unknown = self.log_probs.masked_fill(known, -math.inf).logsumexp(1)
        log_probs = self.log_probs.masked_fill(~known, -math.inf)
        return TopLogits(self.ids, log_probs, torch.logaddexp(self.rest, unknown), vocab_size)

    def __getitem__(self, part: slice | torch.Tensor) -> TopLogits:
        """These logits for some of the tokens."""
        return TopLogits(self.ids[part], self.log_probs[part], self.rest[part], self.vocab_size)


@dataclass(frozen=True)
class Distilled:
    """A distillation loss for a micro-batch.

    Attributes:
        teacher: its hidden states, or its stored top-k log-probabilities.
        beta: of the divergence: 0 is the forward KL divergence, 1 the reverse one.
        temperature: logits of both are divided by it. Log-probabilities of :class:`TopLogits` are of such logits.
        alpha: share of the divergence in the loss; the rest is the cross-entropy of labels.
    """

    teacher: TeacherStates | TopLogits
    beta: float
    temperature: float
    alpha: float = 1.0


class Terms(NamedTuple):
    """For each token id: its term of the divergence, q times the derivative of the divergence by q, and q."""

    divergence: torch.Tensor
    slopes: torch.Tensor
    q: torch.Tensor


def divergence_terms(log_q: torch.Tensor, log_p: torch.Tensor, beta: float) -> Terms:
    """The formulas at the top of this file, elementwise."""
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        return Terms(_times(p, log_p - log_q), -p, q)
    if beta == 1:
        forward = _times(q, log_q - log_p)
        return Terms(forward, forward, q)
    # log m = log(beta p + (1 - beta) q), without leaving the logarithms.
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    slopes = (1 - beta) * _times(q, log_q - log_m)
    # (1 - beta) q log(q / m) is both the second term of the divergence and q times its slope.
    return Terms(beta * _times(p, log_p - log_m) + slopes, slopes, q)


def _times(probability: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """``probability`` x ``log_ratio``, 0 where the probability is 0."""
    return torch.where(probability > 0, probability * log_ratio, 0.0)


def linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    shard: VocabShard,
    distilled: Distilled,
    *,
    chunk_tokens: int,
    backend: str = "torch",
) -> torch.Tensor:
    """Sum over tokens of ``loss_weights`` x the loss of ``distilled``, 0-dim fp32, equal on all ranks of the group.

    Args:
        hidden, weight, labels, loss_weights, shard, backend: as in ``linear_cross_entropy``.
        distilled: of the same tokens.
        chunk_tokens: tokens per chunk; up to some thirteen tensors of that many rows of logits exist, in fp32.
    """
    teacher = _ByTeacher.of(distilled, shard, hidden.shape[0], backend)

    def chunk_loss(logits: torch.Tensor, part: slice, with_gradient: bool) -> torch.Tensor:
        weights, alpha = loss_weights[part], distilled.alpha
        # Both losses overwrite logits with their gradient: each needs a copy of its own.
        other = logits.clone() if alpha < 1 else None
        loss = teacher.chunk_loss(logits, part, weights * alpha, with_gradient)
        if other is not None:
            loss = loss + weighted_losses(other, labels[part], weights * (1 - alpha), shard, with_gradient, backend)
            logits.add_(other)
        return loss

    return linear_loss(hidden, weight, chunk_loss, chunk_tokens)


@dataclass(frozen=True)
class _ByTeacher:
    """The divergence, a chunk of tokens at a time.

    Attributes:
        loss: of the micro-batch.
        shard: the model's, with the token ids that both have, and the temperature.
        backend: of softmax statistics.
    """

    loss: Distilled
    shard: VocabShard
    backend: str

    @staticmethod
    def of(loss: Distilled, shard: VocabShard, tokens: int, backend: str) -> _ByTeacher:
        """The divergence for a micro-batch of ``tokens``, padding included."""
        teacher, shard = loss.teacher, replace(shard, temperature=loss.temperature)
        if isinstance(teacher, TopLogits):
            common = min(teacher.vocab_size, shard.vocab_size)
            valid = min(max(common - shard.start, 0), shard.valid)
            teacher = teacher.padded(tokens).within(common)
            return _ByTeacher(replace(loss, teacher=teacher), replace(shard, valid=valid, vocab_size=common), backend)
        if (group := teacher.head.shared_by) is not None:
            # The head needs all tokens on every rank, as the model's own does.
            teacher = replace(teacher, states=gather_tokens(teacher.states, group))
            loss = replace(loss, teacher=teacher)
        if (missing := tokens - len(teacher.states)) > 0:  # the model fills its tokens up, the teacher does not
            loss = replace(loss, teacher=replace(teacher, states=F.pad(teacher.states, (0, 0, 0, missing))))
        its = teacher.head.shard
        return _ByTeacher(loss, replace(shard, valid=its.valid, vocab_size=its.vocab_size), backend)

    def chunk_loss(self, logits: torch.Tensor, part: slice, weights: torch.Tensor, with_gradient: bool) -> torch.Tensor:
        """Weighted divergences; ``logits`` become its gradient by them if that is asked for."""
        slope = self.shard.cap_(logits, with_slope=with_gradient)
        log_q = self._log_probs(logits, self.shard)
        values, gradient = self._judged(log_q, part, with_gradient)
        counts = weights != 0
        if gradient is not None:
            # ``where`` and not a product: of tokens that do not count anything may be known.
            scale = torch.where(counts, weights / self.loss.temperature, 0.0)[:, None]
            valid = self.shard.valid
            logits[:, :valid] = torch.where(counts[:, None], gradient * scale, 0.0).to(logits.dtype)
            # Token ids that the teacher does not have, and padding, get no gradient.
            logits[:, valid:] = 0
            if slope is not None:
                logits.mul_(slope)
        return torch.where(counts, values * weights, 0.0).sum()

    def _log_probs(self, logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        """Log-probabilities of this rank's columns without padding, (n, valid), from logits with their cap."""
        seen = shard.tempered(logits)
        seen = seen.to(accumulation_dtype(seen.dtype))
        peak, log_sum = softmax_normalizer(seen, shard, self.backend)
        return seen[:, : shard.valid] - peak[:, None] - log_sum[:, None]

    def _judged(
        self, log_q: torch.Tensor, part: slice, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(divergences (n,), their gradients by logits / temperature (n, valid) if asked for)."""
        teacher = self.loss.teacher
        if isinstance(teacher, TopLogits):
            return self._by_likeliest(log_q, teacher[part], with_gradient)
        head = teacher.head
        logits = linear(teacher.states[part], head.matrix)
        head.shard.cap_(logits, with_slope=False)
        log_p = self._log_probs(logits, replace(head.shard, temperature=self.loss.temperature))
        terms = divergence_terms(log_q, log_p, self.loss.beta)
        # Sums over the whole vocabulary, of which each rank has columns: one exchange of two floats a token.
        values, mean = self._sums(terms.divergence.sum(1), terms.slopes.sum(1))
        # q_i g_i - q_i sum_j q_j g_j; ``slopes`` are q g already.
        return values, terms.slopes.sub_(terms.q.mul_(mean[:, None])) if with_gradient else None

    def _by_likeliest(
        self, log_q: torch.Tensor, top: TopLogits, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shard, beta = self.shard, self.loss.beta
        here, columns = _columns(top.ids, shard)
        # One more column stands for ids of other ranks; what is read there is set to 0 in the next line.
        found = F.pad(log_q, (0, 1)).gather(1, columns)
        terms = Terms(*(torch.where(here, x, 0.0) for x in divergence_terms(found, top.log_probs, beta)))
        # q of all ids that the teacher did not keep, 0 at those that it did.
        others = _without(log_q.exp(), columns)
        values, mean, rest = self._sums(terms.divergence.sum(1), terms.slopes.sum(1), others.sum(1))
        factor = torch.zeros_like(mean)
        # All other ids as one token with the sum of their probabilities, on both sides. Its slope g
        # is by that sum, so each of them has the same g: q_i (g - mean).
        if top.ids.shape[1] < shard.vocab_size:
            one = divergence_terms(rest.clamp(min=_LEAST).log(), top.rest, beta)
            values, mean = values + one.divergence, mean + one.slopes
            factor = one.slopes / one.q
        if not with_gradient:
            return values, None
        gradient = F.pad(others.mul_((factor - mean)[:, None]), (0, 1))
        # Ids of other ranks go to the column that is cut off at the end.
        gradient.scatter_(1, columns, terms.slopes - terms.q * mean[:, None])
        return values, gradient[:, : shard.valid]

    def _sums(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each of ``parts`` summed over the tensor-parallel ranks, which hold the other columns."""
        return reduce_from_group(torch.stack(parts), self.shard.group).unbind()


def _columns(ids: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """(which of these token ids are this rank's, their columns, (n, k)); a column after the last one stands for what
    another rank has."""
    here = (ids >= shard.start) & (ids < shard.start + shard.valid)
    return here, torch.where(here, ids - shard.start, shard.valid)


def _without(probabilities: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``probabilities`` with 0 in these columns, which are of :func:`_columns`."""
    return F.pad(probabilities, (0, 1)).scatter_(1, columns, 0.0)[:, :-1]


@torch.no_grad()
def top_log_probs(
    states: torch.Tensor, head: TeacherHead, k: int, temperature: float, *, chunk_tokens: int
) -> TopLogits:
    """The k likeliest tokens, likeliest first, equal on all tensor-parallel ranks; of equally likely ones any.

    Args:
        states, head: of a teacher.
        k: at most the vocabulary.
        temperature: logits are divided by it.
        chunk_tokens: tokens whose logits exist at one time.
    """
    shard = replace(head.shard, temperature=temperature)
    if head.shared_by is not None:
        states = gather_tokens(states, head.shared_by)
    parts = [_top(states[i : i + chunk_tokens], head, shard, k) for i in range(0, len(states), chunk_tokens)]
    ids, log_probs, rest = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "log_probs", "rest"))
    return TopLogits(ids, log_probs, rest, shard.vocab_size)


def _top(states: torch.Tensor, head: TeacherHead, shard: VocabShard, k: int) -> TopLogits:
    logits = linear(states, head.matrix)
    shard.cap_(logits, with_slope=False)
    seen = shard.tempered(logits)
    seen = seen.to(accumulation_dtype(seen.dtype))
    peak, log_sum = softmax_normalizer(seen, shard, "torch")
    # The k largest of all are among the k largest of each rank.
    local = min(k, shard.valid)
    values, columns = seen[:, : shard.valid].topk(local, dim=1)
    # Equal shapes for the gather, where a rank has fewer than k columns.
    values, ids = F.pad(values, (0, k - local), value=-math.inf), F.pad(columns + shard.start, (0, k - local))
    if shard.group.size > 1:
        every, which = (_all_columns(x, shard.group) for x in (values, ids))
        values, order = every.topk(k, dim=1)
        ids = which.gather(1, order)
    # (n, valid): probabilities of this rank's columns.
    own = (seen[:, : shard.valid] - peak[:, None] - log_sum[:, None]).exp()
    # Summed without the chosen ones, and not as 1 - their sum, see :class:`TopLogits`.
    rest = reduce_from_group(_without(own, _columns(ids, shard)[1]).sum(1), shard.group)
    return TopLogits(ids, values - peak[:, None] - log_sum[:, None], rest.clamp(min=_LEAST).log(), shard.vocab_size)


def _all_columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    """(n, k) of each rank -> (n, ranks x k)."""
    return torch.cat(wait(start_all_gather(x, group), group).chunk(group.size), dim=1)
