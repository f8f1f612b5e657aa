"""Attention sinks: a learned score of each head that takes part in the softmax of every query and belongs to no key
(GPT-OSS; ``softmax_type`` learnable in Megatron).

    p_i = exp(s_i) / (sum_j exp(s_j) + exp(sink))

With (out, lse) of the keys alone and L = log(exp(lse) + exp(sink)), attention with a sink is (out exp(lse - L), L): the
merge with a key whose value is 0. So every core has them that gives (out, lse), and one whose keys come in parts merges
these before. Gradients of q, k and v are the core's own with out and L instead of those of the keys, for
p = exp(s - L) and D = rowsum(dout * out) (see ``sdpa``), and

    dsink = -sum over queries of exp(sink - L) D
"""

from __future__ import annotations

from typing import Any

import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec, BlockCore, Pair
from smp.kernels.registry import first_derivative_only
from smp.kernels.returned import returned
from smp.kernels.token_layout import TokenLayout


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Pair:
    """(out, lse) of keys, (tokens, heads, head_dim) and fp32 (heads, tokens), with ``sinks`` (heads,) next to them."""
    total = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    share = (lse - total).exp().t()[..., None]  # (tokens, heads, 1); 0 where a query sees no key
    return (out * share).to(out.dtype), total


def sinks_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """(heads,), of ``out`` and ``lse`` that :func:`with_sinks` gave."""
    given = (dout.to(lse.dtype) * out).sum(-1).t()  # (heads, tokens)
    # exp(sink - L) is the sink's probability, and its value is 0: its part of the softmax's gradient is - p D.
    return -((sinks[:, None].to(lse.dtype) - lse).exp() * given).sum(1).to(sinks.dtype)


def attend_with_sinks(
    core: BlockCore,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TokenLayout,
    spec: AttentionSpec,
    dropout_key: torch.Tensor | None,
    sinks: torch.Tensor,
) -> Pair:
    """Attention with ``sinks`` by a core that computes all keys in one call."""
    return _WithSinks.apply(q, k, v, sinks, dropout_key, core, layout, spec)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        dropout_key: torch.Tensor | None,
        core: BlockCore,
        layout: TokenLayout,
        spec: AttentionSpec,
    ) -> Pair:
        out, lse = with_sinks(*core(q, k, v, layout, spec, dropout_key), sinks)
        out = returned(out)
        ctx.save_for_backward(q, k, v, sinks, dropout_key, out, lse)
        ctx.core, ctx.layout, ctx.spec = core, layout, spec
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, dropout_key, out, lse = ctx.saved_tensors
        dq, dk, dv = ctx.core.backward(dout, q, k, v, out, lse, ctx.layout, ctx.spec, dropout_key)
        return dq, dk, dv, sinks_gradient(dout, out, lse, sinks), None, None, None, None
