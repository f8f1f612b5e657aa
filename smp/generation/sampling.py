"""The next token, drawn from logits whose columns are shared by the ranks of a vocabulary-parallel head.

Gumbel-max: argmax over tokens of (logit / T + g) is distributed as softmax(logit / T), for independent Gumbel g. A
number for each of 100,000 tokens would cost more than the rest of the model does, so it is done twice: first over the
sums of blocks of 256 tokens, then over the tokens of the block that won. Each g is a hash of (seed, prompt, sample,
position, block or token), so there is no state, and the same text is written in every layout, in a batch of any size
and after a resume. (Logits of two layouts differ in their last bits. That changes a token where the two best scores are
that close; an inverse of the cumulative sum would have as many such places as there are tokens.)

Ranks exchange the sums of blocks, 4 bytes for 256 tokens, and the logits of one block. top-k and top-p need the largest
logits of each rank as well: they are a least logit, below which tokens are left out; so tokens of equal logits stay or
go together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from smp.kernels.dropout import keyed_bits_at
from smp.layers.heads.cross_entropy import VocabShard
from smp.parallel.collectives import Group, max_over, start_all_gather, wait
from smp.parallel.rng import stable_hash

BLOCK = 256
_OF_BLOCKS, _OF_TOKENS = 1, 2
"""Keys of the two draws."""
FIRST_CANDIDATES = 1024
"""Largest logits in which top-p looks first."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: choose among so many likeliest tokens; 0: all.
        top_p: choose among the fewest likeliest tokens whose probabilities add up to this (Holtzman et al. 2020), of
            those that top_k leaves.
        seed: of the choices.

    Raises:
        ValueError: a value outside of its range.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature and top-k must not be negative, top-p must be above 0 and at most 1")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError("the seed must be an integer of 64 bits")

    def key(self, prompt: int, sample: int) -> int:
        """Key of the draws of one text; the draw of its token n is keyed by this + n."""
        return stable_hash(self.seed, "sampling", prompt, sample) >> 1  # room for the positions


class Sampled(NamedTuple):
    """The chosen tokens, equal on all ranks of the group.

    Attributes:
        ids: int64 (rows,).
        log_probs: fp32 (rows,), by the softmax of all logits / temperature, as a trainer computes them: top-k and top-p
            do not count. Of temperature 0 those of temperature 1.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor


@torch.no_grad()
def choose(logits: torch.Tensor, shard: VocabShard, sampling: Sampling, keys: torch.Tensor) -> Sampled:
    """One token for each row of logits.

    Args:
        logits: this rank's columns, (rows, columns/p), with the padding, after the soft cap.
        shard: which columns these are.
        sampling: temperature, top-k and top-p.
        keys: int64 (rows,), of the draws, see :meth:`Sampling.key`.

    Log-probabilities are not finite where a logit is no number.
    """
    group = shard.group
    # Padded columns of the vocabulary must not be drawn.
    logits = logits[:, : shard.valid].float()
    if sampling.temperature not in (0.0, 1.0):
        # In fp64 where fp32 cannot divide: the smallest temperatures make all but the largest logits infinitely small.
        logits = _tempered(logits, sampling.temperature, group)
    # The largest logit of all ranks is taken off before exp, or exp overflows.
    peaks = logits.max(1) if shard.valid else _nothing(logits)
    peak = max_over(peaks.values, [group])
    exponentials = (logits - peak[:, None]).exp_()
    sums = _block_sums(exponentials, shard)
    total = sums.sum(1)
    if sampling.temperature == 0.0:
        # Of equal logits that of the lowest id: each rank's first, of the first rank.
        first = torch.where(peaks.values == peak, peaks.indices + shard.start, shard.vocab_size)
        return Sampled(-max_over(-first, [group]), -total.log())
    if sampling.top_k or sampling.top_p < 1.0:
        # ``total`` stays that of the whole vocabulary: log-probabilities are those that a trainer computes.
        least = _least(logits, peak, total, shard, sampling)
        kept = logits >= least[:, None]
        logits, sums = logits.masked_fill(~kept, -torch.inf), _block_sums(exponentials.mul_(kept), shard)
    # P(token) = P(block) P(token | block). A block of which nothing is left sums to 0: its score is
    # -inf and it never wins.
    blocks = torch.arange(sums.shape[1], device=logits.device)[None]
    block = (sums.double().log() + _gumbel(_OF_BLOCKS, keys, blocks)).argmax(1)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)  # (rows, BLOCK), global ids
    scores = _columns(logits, columns, shard)
    best = (scores.double() + _gumbel(_OF_TOKENS, keys, columns)).argmax(1, keepdim=True)
    chosen = scores.gather(1, best)[:, 0]
    return Sampled(columns.gather(1, best)[:, 0], chosen - peak - total.log())


def _tempered(logits: torch.Tensor, temperature: float, group: Group) -> torch.Tensor:
    """Logits / temperature, moved so that the largest is 0 where a small one would make them infinite."""
    if temperature >= 1e-3:
        return logits / temperature
    peak = max_over(logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf), [group])
    return ((logits - peak[:, None]).double() / temperature).clamp(min=-1e30).float()


def _nothing(logits: torch.Tensor) -> torch.return_types.max:
    """The row maximum where a rank has no real columns, only padding: -inf."""
    return logits.new_full((len(logits), 1), -torch.inf).max(1)


def _block_sums(exponentials: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Sums over the blocks of the whole vocabulary, (rows, blocks), the same on all ranks. A block may lie on two."""
    blocks = -(-shard.vocab_size // BLOCK)
    # Blocks are counted from token id 0, not from this rank's first column, so that the draw of a
    # block means the same tokens in every layout.
    before = shard.start % BLOCK
    after = -(before + shard.valid) % BLOCK
    padded = F.pad(exponentials, (before, after)) if before or after else exponentials
    own = padded.unflatten(1, (-1, BLOCK)).sum(2) if shard.valid else padded[:, :0]
    if shard.group.size == 1:
        return own
    # Gathered and added in the order of the ranks, which gives the same bits on each; ranks whose
    # sums differed in the last bit could choose different blocks.
    sums = own.new_zeros(len(own), blocks)
    sums[:, shard.start // BLOCK :][:, : own.shape[1]] = own
    return _from_all(sums, shard.group).sum(0)


def _from_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x`` of all ranks, (ranks, ...)."""
    return wait(start_all_gather(x[None], group), group)


def _columns(logits: torch.Tensor, columns: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """The logits of ``columns`` (rows, n) of the whole vocabulary, on every rank; -inf outside of it."""
    own = columns - shard.start
    here = (own >= 0) & (own < shard.valid)
    if not shard.valid:
        return max_over(logits.new_full(columns.shape, -torch.inf), [shard.group])
    # Each id lies on one rank; the maximum takes its logit there, and -inf is below every logit.
    found = logits.gather(1, own.clamp(0, shard.valid - 1)).masked_fill(~here, -torch.inf)
    return max_over(found, [shard.group])


def _gumbel(draw: int, keys: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """fp64 (rows, columns): in fp32 the largest numbers would round to 1, whose Gumbel number is infinite."""
    # Half a step off both ends: uniform numbers in (0, 1), whose logarithms are finite.
    uniform = (keyed_bits_at(draw, keys, columns).double() + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()


def _least(
    logits: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, shard: VocabShard, sampling: Sampling
) -> torch.Tensor:
    """(rows,): the smallest logit that top-k and top-p keep."""
    # ``_largest`` is a collective. The loop ends by numbers that are equal on all ranks, so all of
    # them make the same number of turns.
    count = min(sampling.top_k or FIRST_CANDIDATES, shard.vocab_size)
    while True:
        values = _largest(logits, count, shard)  # (rows, count), falling
        weights = (values.double() - peak[:, None]).exp()
        whole = weights.sum(1) if sampling.top_k else total.double()
        # The likeliest token is always kept: nothing is before it.
        before = weights.cumsum(1) - weights
        kept = before < sampling.top_p * whole[:, None]
        # Where all candidates are kept there may be more, unless top-k says that there are not.
        if sampling.top_k or count == shard.vocab_size or not bool(kept[:, -1].any()):
            return values.gather(1, kept.sum(1, keepdim=True) - 1)[:, 0]
        count = min(count * 8, shard.vocab_size)


def _largest(logits: torch.Tensor, count: int, shard: VocabShard) -> torch.Tensor:
    """(rows, count): the largest logits of all ranks, falling."""
    own = logits.topk(min(count, shard.valid), dim=1).values
    # Equal shapes on all ranks, for the gather.
    own = F.pad(own, (0, count - own.shape[1]), value=-torch.inf)
    if shard.group.size == 1:
        return own
    return _from_all(own, shard.group).transpose(0, 1).flatten(1).topk(count, dim=1).values
