"""Vocabulary-parallel cross-entropy: no rank ever holds a full row of logits.

:func:`vocab_parallel_cross_entropy` takes local logits and returns a loss per token. :func:`linear_cross_entropy` also
makes the logits, a chunk of tokens at a time, and computes the gradients on the way: the logits of one chunk are all
that exists (compare Liger's fused linear cross-entropy, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smp.config.at_once import CAPPED_LOGITS
from smp.data.sample import IGNORE_INDEX
from smp.kernels.cross_entropy import combine_stats, logits_to_gradient, softmax_stats
from smp.kernels.matmul import linear, linear_by_onednn
from smp.kernels.registry import accumulation_dtype, first_derivative_only
from smp.kernels.returned import returned
from smp.kernels.weight_gradient import accumulate_weight_gradient
from smp.parallel.collectives import Group, reduce_from_group, start_all_gather, wait


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits.

    Attributes:
        start: the first token id.
        valid: number of columns without the padding.
        group: holds the others of the vocabulary.
        vocab_size: number of token ids.
        softcap: logits z become softcap x tanh(z / softcap); None: no cap.
        temperature: logits are divided by it after the cap, only in the fused losses (``linear_*``).
    """

    start: int
    valid: int
    group: Group
    vocab_size: int
    softcap: float | None = None
    temperature: float = 1.0

    @staticmethod
    def of(group: Group, rows_per_rank: int, vocab_size: int, softcap: float | None = None) -> VocabShard:
        """The shard of rank ``group.rank`` when each rank holds ``rows_per_rank`` rows, padding included."""
        start = group.rank * rows_per_rank
        return VocabShard(start, min(max(vocab_size - start, 0), rows_per_rank), group, vocab_size, softcap)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the soft cap, in the same dtype; differentiable."""
        if self.softcap is None:
            return logits
        return (self.softcap * (logits.to(accumulation_dtype(logits.dtype)) / self.softcap).tanh()).to(logits.dtype)

    def cap_(self, logits: torch.Tensor, *, with_slope: bool) -> torch.Tensor | None:
        """Apply the cap in place, and return its derivative if asked for; None without a cap: logits stay, and it is 1.
        Takes no memory besides the derivative but that of a block of rows in fp32, twice."""
        if self.softcap is None:
            return None
        slope = torch.empty_like(logits) if with_slope else None
        rows = max(1, CAPPED_LOGITS // max(logits.shape[1], 1))
        for start in range(0, logits.shape[0], rows):
            block = logits[start : start + rows]
            # tanh in fp32 at least; the result is rounded once.
            tanh = block.to(accumulation_dtype(block.dtype)).div_(self.softcap).tanh_()
            if slope is not None:
                # The derivative of c tanh(z / c) is 1 - tanh^2: c falls out.
                slope[start : start + rows] = tanh.square().neg_().add_(1)
            block.copy_(tanh.mul_(self.softcap))
        return slope

    def tempered(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits / temperature, in fp32 at least, as sampling divides them; the same tensor where that is 1."""
        if self.temperature == 1.0:
            return logits
        return logits.to(accumulation_dtype(logits.dtype)).div(self.temperature)


def _stats(logits: torch.Tensor, columns: torch.Tensor, shard: VocabShard, backend: str) -> torch.Tensor:
    """(M, L, target's logit) of the whole vocabulary, fp32 (3, n); see ``smp.kernels.cross_entropy``."""
    # Of this rank's columns: the peak, the log of the sum of exponentials relative to it, and the label's logit.
    stats = softmax_stats(logits, columns, shard.valid, backend)
    # Gathered and not reduced: the peak of all is needed to add up sums that are relative to different peaks.
    # (p, 3, n)
    everyone = wait(start_all_gather(stats, shard.group), shard.group).view(shard.group.size, 3, -1)
    return combine_stats(everyone)


def softmax_normalizer(logits: torch.Tensor, shard: VocabShard, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, L), fp32 (n,): the log-probability of a token id is its logit - M - L. Logits as they count."""
    nowhere = torch.full(logits.shape[:1], -1, dtype=torch.int64, device=logits.device)
    peak, log_sum, _ = _stats(logits, nowhere, shard, backend)
    return peak, log_sum


def _losses(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard, backend: str) -> tuple[torch.Tensor, ...]:
    """Loss per token (n,), NaN where the label is outside the vocabulary, and (stats, columns) from which the gradient
    follows. One exchange of 3 floats a token."""
    # Outside of [0, valid) where another rank has the label.
    columns = labels - shard.start
    stats = _stats(logits, columns, shard, backend)
    peak, log_sum, target = stats
    # No rank has the logit of an unknown label. A loss without it would be wrong and look right.
    known = (labels >= 0) & (labels < shard.vocab_size)
    return torch.where(known, log_sum - (target - peak), torch.nan), stats, columns


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard, overwrite: bool, backend: str
    ) -> torch.Tensor:
        counts = labels != IGNORE_INDEX
        losses, stats, columns = _losses(logits, labels, shard, backend)
        ctx.save_for_backward(logits, stats, columns, counts)
        ctx.valid, ctx.overwrite, ctx.backend = shard.valid, overwrite, backend
        # ``where`` and not a product: 0 x NaN is NaN.
        return torch.where(counts, losses, 0.0)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, stats, columns, counts = ctx.saved_tensors
        # The same for the gradient.
        weights = torch.where(counts, grad, 0.0)
        target = logits if ctx.overwrite else logits.clone()
        # (n, rows per rank), from the logits alone: no probabilities are saved.
        dlogits = logits_to_gradient(target, stats, columns, ctx.valid, weights, ctx.backend)
        return dlogits, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    *,
    overwrite: bool = False,
    backend: str = "torch",
) -> torch.Tensor:
    """Loss per token in nats, fp32 (n,); 0 where the label is ``IGNORE_INDEX``.

    Args:
        logits: this rank's columns, (n, rows per rank), after the soft cap, if there is one.
        labels: int64 (n,), global token ids. One outside the vocabulary, other than ``IGNORE_INDEX``, gives NaN.
        shard: which columns these are.
        overwrite: the backward pass writes the gradient over the logits, for no memory and 6 bytes of traffic per logit
            in bf16. Nothing else may need them then; a second backward pass is an error.
        backend: torch, triton, cuda or cpp.
    """
    return _CrossEntropy.apply(logits, labels, shard, overwrite, backend)


def weighted_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    shard: VocabShard,
    with_gradient: bool,
    backend: str,
) -> torch.Tensor:
    """Weighted loss of a chunk of tokens, 0-dim fp32; ``logits``, before a cap, become its gradient by them if that is
    asked for.

    Tokens with weight 0 add nothing, whatever their label.
    """
    # In place: from here on ``logits`` are what the loss sees, and ``slope`` leads back to what was computed.
    slope = shard.cap_(logits, with_slope=with_gradient)
    seen = shard.tempered(logits)
    losses, stats, columns = _losses(seen, labels, shard, backend)
    if with_gradient:
        # Of the softmax's input; that of the logits is 1 / temperature times it.
        weights = loss_weights if shard.temperature == 1.0 else loss_weights / shard.temperature
        # In place: softmax - onehot, times the weights, over the logits of the chunk.
        logits_to_gradient(seen, stats, columns, shard.valid, weights, backend)
        if seen is not logits:
            logits.copy_(seen)
        if slope is not None:
            # The chain rule, to the logits before the cap.
            logits.mul_(slope)
    return torch.where(loss_weights != 0, losses * loss_weights, 0.0).sum()


ChunkLoss = Callable[[torch.Tensor, slice, bool], torch.Tensor]
"""(logits of a chunk of tokens, before a cap; which tokens; whether the logits are to become the gradient by them) -> a
part of the loss, 0-dim fp32."""


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        chunk_loss: ChunkLoss,
        chunk_tokens: int,
        with_gradient: bool,
    ) -> torch.Tensor:
        # fp32 in every run: thousands of chunks are added up.
        total = torch.zeros((), device=hidden.device)
        buffer = hidden.new_empty(0)  # one for all chunks
        dhidden = torch.empty_like(hidden) if with_gradient else None
        dweight = None  # of a frozen matrix there is none
        # A frozen matrix needs no gradient, and its fp32 buffer is the largest here.
        if with_gradient and ctx.needs_input_grad[1]:
            make = torch.empty if hidden.shape[0] else torch.zeros  # without tokens there is no chunk to write it
            dweight = make(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            # At most one chunk of logits exists: in the same buffer each time, or freed (oneDNN writes to no buffer).
            if linear_by_onednn(hidden[part], weight):
                logits = linear(hidden[part], weight)
            else:
                buffer = buffer if len(buffer) else hidden.new_empty(hidden[part].shape[0], weight.shape[0])
                logits = torch.mm(hidden[part], weight.t(), out=buffer[: hidden[part].shape[0]])
            total += chunk_loss(logits, part, with_gradient)
            if dhidden is not None:
                if linear_by_onednn(logits, weight.t()):
                    dhidden[part] = linear(logits, weight.t())
                else:
                    torch.mm(logits, weight, out=dhidden[part])
            if dweight is not None:
                # ``logits`` are the gradient by them now; dW sums over chunks in fp32.
                accumulate_weight_gradient(dweight, logits, hidden[part], first=start == 0)
            del logits
        # The gradients are ready: the backward pass has only to multiply them by the gradient of the loss.
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        return returned(total)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales in place, to touch no new memory; autograd refuses a second backward pass through it."""
        dhidden, dweight = ctx.saved_tensors
        return dhidden.mul_(grad), None if dweight is None else dweight.mul_(grad), None, None, None


def linear_loss(hidden: torch.Tensor, weight: torch.Tensor, chunk_loss: ChunkLoss, chunk_tokens: int) -> torch.Tensor:
    """A loss of ``hidden @ weight^T`` that is a sum over tokens, a chunk of them at a time; 0-dim fp32.

    Args:
        hidden, weight, chunk_tokens: as in :func:`linear_cross_entropy`.
        chunk_loss: of a chunk; equal on all ranks of the group.
    """
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearLoss.apply(hidden, weight, chunk_loss, chunk_tokens, with_gradient)


@torch.no_grad()
def linear_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    *,
    chunk_tokens: int,
    backend: str = "torch",
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(cross-entropy of each token; entropy of its distribution in nats, if asked for), fp32 (n,), without gradient;
    arguments as in :func:`linear_cross_entropy`.

    At labels outside of the vocabulary the cross-entropy is NaN.
    """
    losses = torch.empty(hidden.shape[0], device=hidden.device)
    entropies = torch.empty_like(losses) if with_entropy else None
    for start in range(0, hidden.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        logits = linear(hidden[part], weight)
        shard.cap_(logits, with_slope=False)
        logits = shard.tempered(logits)
        losses[part], stats, _ = _losses(logits, labels[part], shard, backend)
        if entropies is not None:
            entropies[part] = _entropies(logits, stats, shard)
    return losses, entropies


def _entropies(logits: torch.Tensor, stats: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """(n,): log of the sum of exponentials minus the mean logit, both relative to the peak. One exchange of a float a
    token; of the logits another copy in fp32 exists."""
    peak, log_sum, _ = stats
    relative = logits[:, : shard.valid].to(accumulation_dtype(logits.dtype)) - peak[:, None]
    # H = -sum p log p with log p = relative - log_sum, and p adds up to 1.
    mean = ((relative - log_sum[:, None]).exp() * relative).sum(1)
    return log_sum - reduce_from_group(mean, shard.group)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    shard: VocabShard,
    *,
    chunk_tokens: int,
    backend: str = "torch",
) -> torch.Tensor:
    """Sum over tokens of ``loss_weights`` x cross-entropy of ``hidden @ weight^T``, capped as ``shard`` says; 0-dim
    fp32, equal on all ranks.

    Args:
        hidden: (n, h), all tokens, equal on every rank of the group. Its gradient is this rank's part of a sum: pass it
            through ``copy_to_group`` or ``gather_tokens`` first.
        weight: this rank's rows of the output matrix, (rows per rank, h).
        labels: int64 (n,). Tokens that do not count have weight 0; their label may be anything. Another label outside
            the vocabulary makes the loss NaN.
        loss_weights: fp32 (n,), no gradient.
        shard: which rows these are.
        chunk_tokens: tokens per chunk; bounds the memory at chunk_tokens x rows per rank.
        backend: torch, triton, cuda or cpp.
    """

    def chunk_loss(logits: torch.Tensor, part: slice, with_gradient: bool) -> torch.Tensor:
        return weighted_losses(logits, labels[part], loss_weights[part], shard, with_gradient, backend)

    return linear_loss(hidden, weight, chunk_loss, chunk_tokens)
