"""Attention: out = softmax(scale q k^T + mask) v, lse = logsumexp(scale q k^T + mask), for each head.

q is (tokens, heads, head_dim), k and v are (keys, groups, head_dim), each group for heads / groups query heads. out is
like q; lse is fp32 (heads, tokens), of the natural logarithm and without gradient. A row that sees no key has out 0 and
lse -inf. Which keys a query sees is a matter of the tokens' layout and of the layer.

A core is a frozen value that computes this. :class:`MathAttention` is the one to read, and the only one with dropout of
probabilities; :class:`FusedAttention` is an operator of PyTorch; :class:`DefaultAttention` is one or the other, by the
device. :class:`smp.kernels.varlen.VarlenAttention` is FlashAttention's variable-length kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange

from smp.kernels.dropout import keyed_dropout
from smp.kernels.sdpa import Scores, operator_for
from smp.kernels.sinks import attend_with_sinks
from smp.kernels.token_layout import Pattern, TokenLayout

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention is.

    Attributes:
        causal: a token does not see later ones.
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        scale: of q k^T; None: 1 / sqrt(head_dim).
        dropout: of probabilities, in calls that come with a key.
        first_head: global number of the first query head, by which dropout is keyed and ALiBi's slope chosen.
        softcap: scores s become softcap x tanh(s / softcap) before the mask; None: they stay.
        alibi_heads: query heads of the whole model, which ALiBi's slopes follow from; None: there is no ALiBi.
    """

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    dropout: float = 0.0
    first_head: int = 0
    softcap: float | None = None
    alibi_heads: int | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than scale q k^T + mask: only :class:`MathAttention` computes such."""
        return self.softcap is not None or self.alibi_heads is not None

    def pattern(self, layout: TokenLayout) -> Pattern:
        """What this layer shares with others of the same causality and window."""
        return layout.pattern(self.causal, self.window)


class AttentionCore(Protocol):
    """What computes attention in a run."""

    @property
    def name(self) -> str:
        """Of its backend."""

    def prepare(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> TokenLayout:
        """Once per micro-batch: the layout with what calls with ``specs`` derive from it, on ``device``."""

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
        """(out, lse). With ``dropout_key``, 0-dim int64, probabilities are dropped, keyed by the layout's
        token_index, the global head and the place of the key. With ``sinks``, (heads,), each head has a score beside
        those of its keys, see :mod:`smp.kernels.sinks`."""


class BlockCore(AttentionCore, Protocol):
    """A core that computes blocks of keys, one after the other, whose results are merged."""

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
        """Gradients of q, k and v by the keys of ``layout``; ``out`` and ``lse`` may be those of more keys, merged.

        Those of q are the sum over all blocks of keys.
        """


class _Masked:
    """Cores whose layout carries a mask for each pattern."""

    def prepare(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> TokenLayout:
        return layout.with_masks([spec.pattern(layout) for spec in specs], dtype, device)


@dataclass(frozen=True)
class MathAttention(_Masked):
    """Every step by itself: scores and probabilities are materialised, (batch, heads, length, keys) in fp32.

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
        q, k, v = _unfold(q, layout.batch, layout.length), *_keys(k, v, layout, heads)
        scores = _scores(q, k, layout, spec, dtype)  # (batch, heads, length, keys)
        # The log-sum-exp has no gradient, see this file's beginning.
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
        return _fold(out.to(dtype), rows), _fold_lse(lse, rows)

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
        :mod:`smp.kernels.sdpa`."""
        given, groups, accumulation = (q, k, v), k.shape[1], torch.promote_types(q.dtype, torch.float32)
        k, v = _keys(k, v, layout, q.shape[1])
        q, dout, out = (_unfold(x, layout.batch, layout.length) for x in (q, dout, out))
        # Before the operands are widened: with dropout the forward pass made its scores from the narrow ones.
        scores = None if dropout_key is None else _scores(q, k, layout, spec, q.dtype)
        dout, q, k, v, out = (x.to(accumulation) for x in (dout, q, k, v, out))
        if scores is None:
            scores = _scores(q, k, layout, spec, given[0].dtype)
        lse = lse.masked_fill(lse.isneginf(), 0.0)  # nobody is seen: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        probabilities = (scores - _unfold_lse(lse, layout)[..., None]).exp()
        dropped, dp = probabilities, dout @ v.transpose(-1, -2)
        if dropout_key is not None:
            # The mask is made again from the same keys; the gradient passes where the probability did.
            dropped, dp = (_drop(x, layout, spec, dropout_key) for x in (probabilities, dp))
        # D is over all keys, because ``out`` is; so one block's gradients are right by themselves.
        ds = probabilities * (dp - (dout * out).sum(-1, keepdim=True)) * _scale(q, spec)
        if spec.softcap is not None:
            ds = ds * (1 - (scores / spec.softcap).clamp(-1, 1).square())  # tanh' = 1 - tanh^2; what is masked has ds 0
        pairs = (ds.transpose(-1, -2) @ q, dropped.transpose(-1, -2) @ dout)
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in pairs)
        return tuple(_fold(dx, x.shape[0]).to(x.dtype) for dx, x in zip((ds @ k, dk, dv), given, strict=True))


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
    """Of each head (Press et al. 2021, arXiv 2108.12409): 2^(-8 / n), 2^(-16 / n), ... for n heads, a power of two;
    for other numbers those of the power below, then every other one of the power above."""
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2.0 ** (-4 * i / below) for i in range(1, 2 * (heads - below), 2)]


def _alibi(scores: torch.Tensor, layout: TokenLayout, first_head: int, heads: int) -> torch.Tensor:
    """What ALiBi adds to scores (batch, heads, length, keys): minus slope x distance, (1, heads, length, keys)."""
    # Slopes follow from all heads of the model, of which this rank has some.
    own = alibi_slopes(heads)[first_head : first_head + scores.shape[1]]
    slopes = torch.tensor(own, dtype=scores.dtype, device=scores.device)[:, None, None]
    queries = torch.arange(layout.query_start, layout.query_start + layout.length, device=scores.device)
    distance = torch.arange(layout.key_start, layout.key_start + layout.keys, device=scores.device) - queries[:, None]
    return (slopes * distance)[None]


def _drop(p: torch.Tensor, layout: TokenLayout, spec: AttentionSpec, key: torch.Tensor) -> torch.Tensor:
    """Dropout of probabilities (batch, heads, length, keys) by (global token, global head, place of the key)."""
    if layout.token_index is None:
        raise ValueError("dropout needs TokenLayout.token_index: its masks are keyed by it")
    tokens = layout.token_index[: layout.num_queries].view(layout.batch, 1, layout.length)
    heads = spec.first_head + torch.arange(p.shape[1], device=p.device)
    # Heads have 16 bits of the number: tokens never meet across heads.
    rows = (tokens * (1 << 16) + heads[None, :, None]).flatten()  # a number per (token, global head)
    return keyed_dropout(p.flatten(0, 2), key, rows, spec.dropout, first_channel=layout.key_start).view_as(p)


@dataclass(frozen=True)
class FusedAttention(_Masked):
    """An operator of PyTorch, see :mod:`smp.kernels.sdpa`. Dropout is left to :class:`MathAttention`.

    Attributes:
        name: flash, efficient or cudnn.
        grouped: the operator gets key/value heads as they are; otherwise each is repeated before, for its query heads.
    """

    name: str = "flash"
    grouped: bool = False

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
        if dropout_key is not None:
            # PyTorch's kernels draw their own dropout, which depends on the layout and on the order of calls.
            return MathAttention()(q, k, v, layout, spec, dropout_key)
        queries, keys, values, scores = self.arguments(q, k, v, layout, spec)
        out, lse = operator_for(self.name, q.device).forward(queries, keys, values, scores)
        if scores.mask is not None and not layout.sees_itself:
            # Backends differ in what they say of a row that sees nothing; all say this here.
            blind = scores.mask.isneginf().all(dim=-1)  # (batch or 1, 1, length)
            out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
        return _fold(out[..., : q.shape[2]], q.shape[0]), _fold_lse(lse, q.shape[0])

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
        if dropout_key is not None:
            return MathAttention().backward(dout, q, k, v, out, lse, layout, spec, dropout_key)
        operator, groups = operator_for(self.name, q.device), k.shape[1]
        *given, scores = self.arguments(q, k, v, layout, spec)
        dout, out = (_unfold(_widened(x, operator.multiple), layout.batch, layout.length) for x in (dout, out))
        lse = lse.masked_fill(lse.isneginf(), 0.0)  # nobody is seen: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        kept = out, _unfold_lse(lse, layout)
        dq, dk, dv = operator.backward(dout, *given, *kept, scores=scores)
        # Where heads were repeated for the kernel, each copy has a part of the gradient.
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
        return tuple(_fold(dx[..., : x.shape[2]], x.shape[0]) for dx, x in ((dq, q), (dk, k), (dv, v)))

    def arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scores]:
        """What the operator gets: q, k and v (batch, heads, length, head_dim), and what the scores are.

        Raises:
            ValueError: they are more than an operator computes.
        """
        if spec.changes_scores:
            raise ValueError(f"{self.name} computes neither soft-capped scores nor ALiBi: take MathAttention")
        mask, multiple = (
            layout.mask(spec.pattern(layout), q.dtype, q.device),
            operator_for(self.name, q.device).multiple,
        )
        # Of the real width: the kernel would take the filled-up one.
        scale = q.shape[2] ** -0.5 if spec.scale is None and q.shape[2] % multiple else spec.scale
        heads = k.shape[1] if self.grouped else q.shape[1]
        q, k, v = (_widened(x, multiple) for x in (q, k, v))
        keys = _keys(k, v, layout, heads)
        return _unfold(q, layout.batch, layout.length), *keys, Scores(spec.causal and mask is None, mask, scale)


@dataclass(frozen=True)
class DefaultAttention(_Masked):
    """What runs where nobody chose: FlashAttention, or on a GPU with a mask or in fp32 the memory-efficient kernel, or
    where scores are capped or fall with the distance every step by itself."""

    name: str = "default"

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
        return self._chosen(q, layout, spec)(q, k, v, layout, spec, dropout_key, sinks)

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
        return self._chosen(q, layout, spec).backward(dout, q, k, v, out, lse, layout, spec, dropout_key)

    @staticmethod
    def _chosen(q: torch.Tensor, layout: TokenLayout, spec: AttentionSpec) -> FusedAttention | MathAttention:
        if spec.changes_scores:
            return MathAttention()
        # fp32 has no FlashAttention on a GPU.
        flash = q.dtype.itemsize == 2 and not layout.needs_mask(spec.pattern(layout))
        return FusedAttention("flash" if flash or not q.is_cuda else "efficient")


DEFAULT_ATTENTION = DefaultAttention()


def merge(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> Pair:
    """Attention to two sets of keys from attention to each, in fp32 at least; out has the wider dtype of the two."""
    # In fp32 at least: the shares of blocks add up to 1 only as exactly as these are.
    total = torch.logaddexp(lse, other_lse)
    shift = total.masked_fill(total.isneginf(), 0.0)  # where both are empty: -inf - -inf is NaN
    shares = [(part - shift).exp().t()[..., None] for part in (lse, other_lse)]  # (tokens, heads, 1)
    merged = out * shares[0] + other_out * shares[1]
    return merged.to(torch.promote_types(out.dtype, other_out.dtype)), total


def _unfold(x: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(tokens, heads, head_dim) -> (batch, heads, length, head_dim), without the padding."""
    return rearrange(x[: batch * length], "(batch length) heads dim -> batch heads length dim", batch=batch)


def _keys(k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, heads: int) -> Pair:
    """Each (keys, groups, head_dim) -> (batch, heads, keys, head_dim), heads repeated for their query heads."""
    k, v = (_unfold(x, layout.batch, layout.keys) for x in (k, v))
    if k.shape[1] == heads:
        return k, v
    repeats = heads // k.shape[1]
    return k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)


def _fold(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(batch, heads, length, head_dim) -> (rows, heads, head_dim), padded with zeros."""
    return pad_rows(rearrange(x, "batch heads length dim -> (batch length) heads dim"), rows)


def _unfold_lse(lse: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """(heads, rows) -> (batch, heads, length), without the padding."""
    return lse[:, : layout.num_queries].unflatten(1, (layout.batch, -1)).transpose(0, 1)


def _fold_lse(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """(batch, heads, length) -> (heads, rows), padded with -inf."""
    lse = rearrange(lse, "batch heads length -> heads (batch length)")
    return lse if lse.shape[1] == rows else F.pad(lse, (0, rows - lse.shape[1]), value=-torch.inf)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(tokens, heads, head_dim) -> (rows, heads, head_dim), zeros behind."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, 0, 0, rows - x.shape[0]))


def _widened(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """With channels of zeros up to a ``multiple``: they add nothing to scores."""
    return x if x.shape[-1] % multiple == 0 else F.pad(x, (0, -x.shape[-1] % multiple))
