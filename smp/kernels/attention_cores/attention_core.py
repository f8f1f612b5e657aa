"""Attention: out = softmax(scale q k^T + mask) v, lse = logsumexp(scale q k^T + mask), for each head.

q is (tokens, heads, head_dim), k and v are (keys, groups, head_dim), each group for heads / groups query heads. out is
like q; lse is fp32 (heads, tokens), of the natural logarithm and without gradient. A row that sees no key has out 0 and
lse -inf. Which keys a query sees is a matter of the tokens' layout and of the layer.

A core is a frozen value that computes this. :class:`smp.kernels.attention_cores.math_attention.MathAttention` is the
one to read, and the only one with dropout of probabilities;
:class:`smp.kernels.attention_cores.fused_attention.FusedAttention` is an operator of PyTorch;
:class:`smp.kernels.attention_cores.fused_attention.DefaultAttention` is one or the other, by the device.
:class:`smp.kernels.attention_cores.varlen.VarlenAttention` is FlashAttention's variable-length kernel. This file says
what all of them take and return.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange

from smp.kernels.token_layout import Pattern, TokenLayout

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """Settings of one layer's attention.

    Attributes:
        causal: a token does not see later ones.
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        scale: of q k^T; None: 1 / sqrt(head_dim).
        dropout: of probabilities, in calls that come with a key.
        first_head: global number of the first query head, by which dropout is keyed and ALiBi's slope chosen.
        softcap: scores s become softcap x tanh(s / softcap) before the mask; None: no cap.
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
        """Whether scores are more than scale q k^T + mask: only the math core computes such."""
        return self.softcap is not None or self.alibi_heads is not None

    def pattern(self, layout: TokenLayout) -> Pattern:
        """The mask pattern, shared by layers of the same causality and window."""
        return layout.pattern(self.causal, self.window)


class AttentionCore(Protocol):
    """Protocol of the attention implementation of a run."""

    @property
    def name(self) -> str:
        """Name of its backend."""

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
        token_index, the global head and the position of the key. With ``sinks``, (heads,), each head has a score next
        to those of its keys, see :mod:`smp.kernels.attention_cores.sinks`."""


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


class Masked:
    """Cores whose layout carries a mask for each pattern."""

    def prepare(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> TokenLayout:
        return layout.with_masks([spec.pattern(layout) for spec in specs], dtype, device)


def merge(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> Pair:
    """Attention to two sets of keys from attention to each, in fp32 at least; out has the wider dtype of the two."""
    # In fp32 at least: the shares of blocks add up to 1 only as exactly as these are.
    # Without overflow, and -inf where neither set of keys was seen.
    total = torch.logaddexp(lse, other_lse)
    shift = total.masked_fill(total.isneginf(), 0.0)  # where both are empty: -inf - -inf is NaN
    shares = [(part - shift).exp().t()[..., None] for part in (lse, other_lse)]  # (tokens, heads, 1)
    # (tokens, heads, head_dim); the shares add up to 1, or are both 0 where no key was seen.
    merged = out * shares[0] + other_out * shares[1]
    return merged.to(torch.promote_types(out.dtype, other_out.dtype)), total


def unfold(x: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(tokens, heads, head_dim) -> (batch, heads, length, head_dim), without the padding."""
    # A view where it can be: the operators take strided heads.
    return rearrange(x[: batch * length], "(batch length) heads dim -> batch heads length dim", batch=batch)


def unfold_keys(k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, heads: int) -> Pair:
    """Each (keys, groups, head_dim) -> (batch, heads, keys, head_dim), heads repeated for their query heads. Those of a
    cache are (batch, groups, keys, head_dim) already: a copy of them for every token would cost more than attention."""
    k, v = (x if x.ndim == 4 else unfold(x, layout.batch, layout.keys) for x in (k, v))
    if k.shape[1] == heads:
        return k, v
    repeats = heads // k.shape[1]
    # Query heads of a group are neighbours, so each key/value head is repeated next to itself.
    return k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)


def fold(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(batch, heads, length, head_dim) -> (rows, heads, head_dim), padded with zeros."""
    return pad_rows(rearrange(x, "batch heads length dim -> (batch length) heads dim"), rows)


def unfold_lse(lse: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """(heads, rows) -> (batch, heads, length), without the padding."""
    return lse[:, : layout.num_queries].unflatten(1, (layout.batch, -1)).transpose(0, 1)


def fold_lse(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """(batch, heads, length) -> (heads, rows), padded with -inf."""
    lse = rearrange(lse, "batch heads length -> heads (batch length)")
    # -inf, as of any row that sees no key: a merge then gives padding no share.
    return lse if lse.shape[1] == rows else F.pad(lse, (0, rows - lse.shape[1]), value=-torch.inf)


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(tokens, heads, head_dim) -> (rows, heads, head_dim), zeros after."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, 0, 0, rows - x.shape[0]))
