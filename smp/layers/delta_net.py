"""A gated delta net (Yang et al. 2024, arXiv 2412.06464) as Qwen3-Next has it, split over the TP ranks by heads.

With x_t the input of a token, and for each head of keys and those of values that it serves:

    q, k, v = SiLU(short causal convolution of W x)     q and k divided by their length, q by sqrt(key_dim) too
    b       = sigmoid(W_b x)                            how much of a value is written
    g       = -exp(A) softplus(W_a x + c)               log of what the state keeps
    o       = gated delta rule of q, k, v, g, b         smp.kernels.recurrences.delta_rule
    y       = W_o (RMSNorm(o) SiLU(W_z x))              the norm is of each head

A state is key_dim x value_dim numbers for each head of values, however long the text: that, and the last tokens that
the convolution sees, is what generation keeps in place of keys and values. A document begins with an empty one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.recurrences.causal_conv import causal_conv
from smp.kernels.recurrences.delta_rule import gated_delta_rule
from smp.kernels.registry import accumulation_dtype
from smp.kernels.token_layout import TokenLayout
from smp.layers.context_parallel.states import StatesPlan
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import RMSNorm
from smp.layers.parameter import SHARD_ROWS, Constant, Initializer, LogUniform, Normal, local, tp_parameter
from smp.layers.recurrence import Documents, DocumentsNeed
from smp.layers.token_needs import TokenNeed, prepared
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext

_EPS = 1e-6
"""Under the root of a query's or key's length, squared."""
_CONVOLVED = ("query", "key", "value")


class _Tokens(NamedTuple):
    """(batch, length, ...) of queries, keys and values side by side before the convolution, of g and of b."""

    mixed: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class GatedDeltaNet(nn.Module):
    """Projections, convolution, gated delta rule, gated norm and the output projection.

    Args:
        hidden_size: width of the residual stream.
        key_heads, value_heads: global; key heads must be divisible by the mesh size, and divide value heads.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        key_dim, value_dim: channels of a head.
        conv: tokens that the convolution sees, with the token itself.
        norm_eps: of the norm of each head's output.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what computes the rule and the norm.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for heads that do not fit together, or do not split over the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        key_heads: int,
        value_heads: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        key_dim: int,
        value_dim: int,
        conv: int = 4,
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        ranks = context.tp.size()
        if key_heads % ranks or value_heads % key_heads:
            raise ValueError(f"{value_heads} heads on {key_heads} of keys do not split over {ranks} ranks")
        self.sequence_parallel, self.backend = context.sequence_parallel, kernels.delta_rule
        self.cp = None if context.cp is None else Group.of(context.cp)
        self.needs: tuple[TokenNeed, ...] = (DocumentsNeed(conv, self.cp, kernels.recurrence_exchange),)
        self.key_dim, self.value_dim, self.conv = key_dim, value_dim, conv
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.widths = keys // ranks, keys // ranks, values // ranks

        def projection(width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden_size, width, context, bias=False, init_std=init_std)

        self.query, self.key, self.value = projection(keys), projection(keys), projection(values)
        self.gate, self.beta, self.decay = projection(values), projection(value_heads), projection(value_heads)
        self.query_conv, self.key_conv, self.value_conv = (
            tp_parameter((width, conv), SHARD_ROWS, context.tp) for width in (keys, keys, values)
        )
        self.decay_log, self.decay_bias = (tp_parameter((value_heads,), SHARD_ROWS, context.tp) for _ in range(2))
        self.norm = RMSNorm(value_dim, context, eps=norm_eps, split_input=True, kernels=kernels)
        self.output = RowParallelLinear(values, hidden_size, context, bias=False, init_std=output_std)
        uniform = Normal((3 * conv) ** -0.5)  # of the width that torch's convolutions begin with
        self.initializers: dict[str, Initializer] = {f"{name}_conv": uniform for name in _CONVOLVED}
        self.initializers |= {"decay_log": LogUniform(0.01, 16.0), "decay_bias": Constant(1.0)}

    def forward(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden); ``key`` has no use: nothing is dropped here."""
        layers = [self.query, self.key, self.value, self.gate, self.beta, self.decay]
        # One gather of the input for all, and one reduction of its gradient.
        *mixed, gate, beta, decay = column_parallel(x, layers, layout.local_token_index)
        # Without the rows behind the last sequence, which are of no document.
        rows = [self._rows(y, layout) for y in (torch.cat(mixed, 1), beta, decay)]
        tokens = _Tokens(rows[0], self._decays(rows[2]), rows[1].to(accumulation_dtype(beta.dtype)).sigmoid())
        out = self._mixed(tokens, layout.cache, prepared(layout, self.needs[0].key)).flatten(0, 1)
        out = out if layout.padding == 0 else F.pad(out, (0, 0, 0, 0, 0, layout.padding))
        out = self.norm(out).flatten(1)  # (tokens, heads/p x value_dim)
        wide = accumulation_dtype(gate.dtype)
        out = (out.to(wide) * F.silu(gate.to(wide))).to(gate.dtype)
        return self.output(out, token_index=layout.token_index)

    def _rows(self, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        return x[: layout.num_queries].unflatten(0, (layout.batch, layout.length))

    def _mixed(self, tokens: _Tokens, cache: Any, documents: Documents) -> torch.Tensor:
        """(batch, length, heads/p, value_dim)."""
        plan = documents.plan
        if isinstance(plan, StatesPlan):
            return self._by_states(tokens, documents, plan)
        if plan is None:
            return self._whole(tokens, cache, documents)
        if cache is not None:
            # All ranks keep the state of a text, so each goes through its prompt.
            whole = _Tokens(*(plan.gathered(x) for x in (tokens.mixed, tokens.g, tokens.beta)))
            return plan.own(self._whole(whole, cache, documents))
        mixed = torch.cat(plan.to_heads(tokens.mixed.split(self.widths, dim=-1)), 2)
        whole = _Tokens(mixed, *plan.to_heads([tokens.g, tokens.beta]))
        return plan.to_tokens(self._whole(whole, None, documents, plan.cp))

    def _whole(self, tokens: _Tokens, cache: Any, documents: Documents, heads: Group | None = None) -> torch.Tensor:
        """Of whole sequences, whose ``heads`` are shared by ranks."""
        g, beta, before, state = tokens.g, tokens.beta, None, None
        if cache is not None and documents.valid is not None:
            # Padding behind a prompt writes nothing, and forgets nothing.
            g, beta = (y.masked_fill(~documents.valid[..., None], 0.0) for y in (g, beta))
            before, state = cache.states(self._states(tokens))
        q, k, v = self._convolved(tokens.mixed, before, documents.places, heads)
        out, last = gated_delta_rule(q, k, v, g, beta, documents.begins, state, self.backend)
        if cache is not None and documents.valid is not None:
            assert before is not None
            cache.keep(_last_tokens(tokens.mixed, before, documents.valid), last)
        return out

    def _by_states(self, tokens: _Tokens, documents: Documents, plan: StatesPlan) -> torch.Tensor:
        """See :mod:`smp.layers.context_parallel.states`."""
        assert self.cp is not None
        mixed, g, beta = (plan.to_rows(x) for x in (tokens.mixed, tokens.g, tokens.beta))
        q, k, v = self._convolved(mixed, plan.tokens_before(mixed, self.cp), documents.places)
        v = v.to(g.dtype)  # what is multiplied with a state later is not rounded before
        unit = torch.eye(self.key_dim, dtype=g.dtype, device=g.device)
        first = F.pad(unit, (self.value_dim, 0)).expand(v.shape[0], v.shape[2], -1, -1)  # [0 | 1]
        v = F.pad(v, (0, self.key_dim))
        # Not by flash-linear-attention, whose kernels round to 16 bits.
        both, maps = gated_delta_rule(q, k, v, g, beta, documents.begins, first)
        out, factor = both.split((self.value_dim, self.key_dim), dim=3)
        before = plan.states_before(maps, self.cp)  # (rows, heads, key_dim, value_dim)
        out = out + (factor.transpose(1, 2) @ before).transpose(1, 2)
        return plan.to_tokens(out.to(mixed.dtype), tokens.mixed.shape[0])

    def _convolved(
        self,
        mixed: torch.Tensor,
        before: torch.Tensor | None,
        places: torch.Tensor | None,
        heads: Group | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, (rows, length, heads, channels)."""
        weights = [local(getattr(self, f"{name}_conv"), mixed.dtype) for name in _CONVOLVED]
        if heads is not None:
            weights = [weight.unflatten(0, (heads.size, -1))[heads.rank] for weight in weights]
        convolved = causal_conv(mixed, torch.cat(weights), before, places)
        q, k, v = convolved.split([weight.shape[0] for weight in weights], dim=-1)
        q, k = (_unit(y.unflatten(2, (-1, self.key_dim))) for y in (q, k))
        return q * self.key_dim**-0.5, k, v.unflatten(2, (-1, self.value_dim))

    def _decays(self, x: torch.Tensor) -> torch.Tensor:
        """g, in the precision of sums."""
        wide = accumulation_dtype(x.dtype)
        # Rounded as FSDP would round them, then wide again.
        log, bias = (local(p, x.dtype).to(wide) for p in (self.decay_log, self.decay_bias))
        return -log.exp() * F.softplus(x.to(wide) + bias)

    def _states(self, tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Like what is kept of a text while it is written, without numbers."""
        last = tokens.mixed.new_empty((1, self.conv - 1, tokens.mixed.shape[2]), device="meta")
        state = tokens.beta.new_empty((1, tokens.beta.shape[2], self.key_dim, self.value_dim), device="meta")
        return last, state


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Of length 1, over the last dimension; the arithmetic is fp32 inside."""
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)).to(x.dtype)


def _last_tokens(x: torch.Tensor, before: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The tokens that the convolution of the next one sees, (batch, conv - 1, channels), of ``x`` with those before it,
    where only ``valid`` ones count, which come first."""
    count = valid.sum(1)[:, None] + torch.arange(before.shape[1], device=x.device)
    return torch.cat((before, x), 1).gather(1, count[..., None].expand(-1, -1, x.shape[2]))
