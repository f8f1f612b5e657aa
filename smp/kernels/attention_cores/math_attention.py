"""Attention by plain operations, one after the other: the reference of all other cores, see
:mod:`smp.kernels.attention_cores.attention_core`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp.kernels.attention_cores.attention_core import (
    AttentionSpec,
    Masked,
    Pair,
    fold,
    fold_lse,
    unfold,
    unfold_keys,
    unfold_lse,
)
from smp.kernels.attention_cores.sinks import attend_with_sinks
from smp.kernels.dropout import keyed_dropout
from smp.kernels.token_layout import TokenLayout


@dataclass(frozen=True)
class MathAttention(Masked):
    """Unfused attention: scores and probabilities are materialised, (batch, heads, length, keys) in fp32.

    Without dropout the products are fp32 too. With dropout they have the dtype of q, k and v.
    """

    name: str = "math"

    def __str__(self) -> str:
        return self.name

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        if sinks is not None:
            return attend_with_sinks(self, q, k, v, layout, spec, dropout_key, sinks)
        rows, dtype, accumulation = q.shape[0], q.dtype, torch.promote_types(q.dtype, torch.float32)
        # With dropout there is another tensor of the size of the scores, so products stay in the narrow dtype.
        if dropout_key is None:
            q, k, v = (x.to(accumulation) for x in (q, k, v))
        heads = q.shape[1]
        # (batch, heads, length or keys, head_dim)
        q, k, v = unfold(q, layout.batch, layout.length), *unfold_keys(k, v, layout, heads)
        scores = _scores(q, k, layout, spec, dtype)  # (batch, heads, length, keys)
        # The log-sum-exp has no gradient, see ``smp.kernels.attention_cores.attention_core``.
        lse = scores.detach().logsumexp(dim=-1)
        blind = None if layout.sees_itself else lse.isneginf()[..., None]
        if blind is not None:
            scores = scores.masked_fill(blind, 0.0)  # softmax of nothing but -inf is NaN, and so are its gradients
        probabilities = scores.softmax(dim=-1)
        if blind is not None:
            probabilities = probabilities.masked_fill(blind, 0.0)
        if dropout_key is not None:
            probabilities = _drop(probabilities, layout, spec, dropout_key)
        out = probabilities.to(v.dtype) @ v
        return fold(out.to(dtype), rows), fold_lse(lse, rows)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Every step in fp32 at least but for scores with dropout, which are those of the forward pass; see
        :mod:`smp.kernels.attention_cores.sdpa`."""
        given, groups, accumulation = (q, k, v), k.shape[1], torch.promote_types(q.dtype, torch.float32)
        k, v = unfold_keys(k, v, layout, q.shape[1])
        q, dout, out = (unfold(x, layout.batch, layout.length) for x in (q, dout, out))
        # Before the operands are widened: with dropout the forward pass made its scores from the narrow ones.
        scores = None if dropout_key is None else _scores(q, k, layout, spec, q.dtype)
        dout, q, k, v, out = (x.to(accumulation) for x in (dout, q, k, v, out))
        if scores is None:
            scores = _scores(q, k, layout, spec, given[0].dtype)
        lse = lse.masked_fill(lse.isneginf(), 0.0)  # nobody is seen: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        probabilities = (scores - unfold_lse(lse, layout)[..., None]).exp()
        # (batch, heads, length, keys) both
        dropped, dp = probabilities, dout @ v.transpose(-1, -2)
        if dropout_key is not None:
            # The mask is made again from the same keys; the gradient passes where the probability did.
            dropped, dp = (_drop(x, layout, spec, dropout_key) for x in (probabilities, dp))
        # D is over all keys, because ``out`` is; so one block's gradients are right by themselves.
        ds = probabilities * (dp - (dout * out).sum(-1, keepdim=True)) * _scale(q, spec)
        if spec.softcap is not None:
            ds = ds * (1 - (scores / spec.softcap).clamp(-1, 1).square())  # tanh' = 1 - tanh^2; what is masked has ds 0
        # dk and dv of each query head; those of a group are added up below.
        pairs = (ds.transpose(-1, -2) @ q, dropped.transpose(-1, -2) @ dout)
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in pairs)
        return tuple(fold(dx, x.shape[0]).to(x.dtype) for dx, x in zip((ds @ k, dk, dv), given, strict=True))


def _scale(q: torch.Tensor, spec: AttentionSpec) -> float:
    return q.shape[-1] ** -0.5 if spec.scale is None else spec.scale


def _scores(
    q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, spec: AttentionSpec, dtype: torch.dtype
) -> torch.Tensor:
    """(batch, heads, length, keys), masked; ``dtype`` is that of masks."""
    scores, pattern = q @ k.transpose(-1, -2), spec.pattern(layout)
    # fp32 before anything is added: bf16 scores of hundreds have steps of whole units.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * _scale(q, spec)
    if spec.softcap is not None:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    if spec.alibi_heads is not None:
        scores = scores + _alibi(scores, layout, spec.first_head, spec.alibi_heads)
    # A kernel has a flag for causal attention; here it is a mask like any other.
    if not spec.causal and not layout.needs_mask(pattern):
        return scores
    known = layout.mask(pattern, dtype, q.device)
    return scores + (layout.make_mask(pattern, dtype, q.device) if known is None else known)


def alibi_slopes(heads: int) -> list[float]:
    """Slope of each head (Press et al. 2021, arXiv 2108.12409): 2^(-8 / n), 2^(-16 / n), ... for n heads, a power of
    two; for other numbers those of the power below, then every other one of the power above."""
    below = 1 << (heads.bit_length() - 1)
    # For heads that are no power of two, as in the paper's code: odd multiples of half the step.
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2.0 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]


def _alibi(scores: torch.Tensor, layout: TokenLayout, first_head: int, heads: int) -> torch.Tensor:
    """ALiBi's bias for scores (batch, heads, length, keys): minus slope x distance, ([batch,] heads, length,
    keys)."""
    # Slopes follow from all heads of the model, of which this rank has some.
    own = alibi_slopes(heads)[first_head : first_head + scores.shape[1]]
    slopes = torch.tensor(own, dtype=scores.dtype, device=scores.device)[:, None, None]
    queries, keys = layout.positions(scores.device)
    distance = keys[..., None, :] - queries[..., :, None]  # ([batch,] length, keys)
    return slopes * distance.unsqueeze(-3)


def _drop(p: torch.Tensor, layout: TokenLayout, spec: AttentionSpec, key: torch.Tensor) -> torch.Tensor:
    """Dropout of probabilities (batch, heads, length, keys) by (global token, global head, position of the key)."""
    if layout.token_index is None:
        raise ValueError("dropout needs TokenLayout.token_index: its masks are keyed by it")
    tokens = layout.token_index[: layout.num_queries].view(layout.batch, 1, layout.length)
    heads = spec.first_head + torch.arange(p.shape[1], device=p.device)
    # Heads have 16 bits of the number: tokens never meet across heads.
    rows = (tokens * (1 << 16) + heads[None, :, None]).flatten()  # a number per (token, global head)
    # ``first_channel``: keys that a rank or a block holds keep their position in the sequence.
    return keyed_dropout(p.flatten(0, 2), key, rows, spec.dropout, first_channel=layout.key_start).view_as(p)
