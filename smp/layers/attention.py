"""Causal self-attention with grouped key/value heads, split over the TP ranks by heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.registry import accumulation_dtype
from smp.kernels.rope import rope
from smp.kernels.token_layout import TokenLayout
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import RMSNorm, SplitRMSNorm, l2_normed
from smp.layers.parameter import SHARD_ROWS, Initializer, Normal, local, tp_parameter
from smp.layers.token_needs import RotaryTable, TokenNeed, chunks_key, prepared
from smp.parallel.context import ParallelContext


@dataclass(frozen=True)
class QueryKeyOptions:
    """Norms, rotation and scaling of queries and keys before the product q k^T.

    Attributes:
        norm_eps: when given, queries and keys are RMS-normalized per head with this epsilon, before RoPE.
        norm_across_heads: one norm over the features of all heads instead.
        norm_one_plus: the norms multiply by 1 + weight (Gemma).
        rope: key of the rotary table in the layout's ``prepared`` that rotates them; None: nothing does.
        rope_interleaved: channels 0 and 1, 2 and 3, ... are rotated, not the two halves of a head.
        l2_norm_eps: when given, each head's are divided by sqrt(mean(x^2) + this), after RoPE.
        query_scale: key in ``prepared`` of factors of the queries; None: no factor.
    """

    norm_eps: float | None = None
    norm_across_heads: bool = False
    norm_one_plus: bool = False
    rope: str | None = None
    rope_interleaved: bool = False
    l2_norm_eps: float | None = None
    query_scale: str | None = None

    def norm(
        self, features: int, head_dim: int, context: ParallelContext, kernels: Kernels
    ) -> RMSNorm | SplitRMSNorm | None:
        """The norm of queries, or of keys, of this width over all heads."""
        if self.norm_eps is None:
            return None
        if self.norm_across_heads:
            return SplitRMSNorm(features, context, eps=self.norm_eps)
        # each rank has its own heads, as elsewhere its own tokens
        return RMSNorm(
            head_dim, context, eps=self.norm_eps, one_plus=self.norm_one_plus, split_input=True, kernels=kernels
        )


PLAIN = QueryKeyOptions()
CAUSAL = AttentionSpec()


class SelfAttention(nn.Module):
    """Query, key and value projections, RoPE, scaled dot-product attention and the output projection.

    Args:
        hidden_size: width of the residual stream.
        num_heads, num_groups: query heads, key/value heads (global). Heads must be divisible by the mesh size; groups
            by the mesh size, or the mesh size by groups: then neighbouring ranks share a key/value head.
        head_dim: width of a head; by default hidden_size / num_heads.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        bias, qkv_bias: bias on the output projection, on the others.
        query_key: norms and rotation of queries and keys.
        spec: what a token sees and how scores are made; with dropout, probabilities are materialised. Its
            ``first_head`` is set here.
        chunk: a token sees only tokens of its own chunk of so many, see :func:`smp.layers.token_needs.chunks_key`.
        needs: what has to be prepared of the tokens, where a model prepares it.
        gate: the output of the heads is multiplied by the sigmoid of one more projection, of their width.
        sinks: each head has a learned score next to those of its keys, see :mod:`smp.kernels.attention_cores.sinks`.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what normalizes queries and keys, rotates them and computes attention.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for sizes that do not fit together; on use, where dropout in training mode lacks key or
            ``token_index``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        num_groups: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qkv_bias: bool = False,
        query_key: QueryKeyOptions = PLAIN,
        spec: AttentionSpec = CAUSAL,
        chunk: int | None = None,
        needs: tuple[TokenNeed, ...] = (),
        gate: bool = False,
        sinks: bool = False,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context, groups = ParallelContext.of(parallel), num_groups or num_heads
        # Heads are what TP cuts: every rank has whole heads, so attention itself communicates nothing.
        ranks = context.tp.size()
        if num_heads % ranks or num_heads % groups:
            raise ValueError(f"{num_heads} heads do not split over {ranks} ranks and {groups} key/value heads")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden size {hidden_size} is not divisible by {num_heads} heads: give head_dim")
        self.head_dim = head_dim or hidden_size // num_heads
        if spec.window is not None and not spec.causal:
            raise ValueError("a sliding window needs causal attention")
        if spec.alibi_heads not in (None, num_heads):
            raise ValueError(f"ALiBi's slopes of {spec.alibi_heads} heads are not those of {num_heads} heads")
        self.sequence_parallel = context.sequence_parallel
        self.kernels, self.query_key, self.chunk, self.needs = kernels, query_key, chunk, needs
        width, kv_width = num_heads * self.head_dim, groups * self.head_dim
        self.query = ColumnParallelLinear(hidden_size, width, context, bias=qkv_bias, init_std=init_std)
        # ``parts``: with fewer key/value heads than ranks neighbours hold, and compute, the same head.
        self.key, self.value = (
            ColumnParallelLinear(hidden_size, kv_width, context, bias=qkv_bias, parts=groups, init_std=init_std)
            for _ in range(2)
        )
        self.gate: ColumnParallelLinear | None = None
        if gate:
            self.gate = ColumnParallelLinear(hidden_size, width, context, bias=False, init_std=init_std)
        self.output = RowParallelLinear(width, hidden_size, context, bias=bias, init_std=output_std)
        self.query_norm = query_key.norm(width, self.head_dim, context, kernels)
        self.key_norm = query_key.norm(kv_width, self.head_dim, context, kernels)
        self.sinks: nn.Parameter | None = None
        if sinks:
            # One score for each query head, cut as the heads are.
            self.sinks = tp_parameter((num_heads,), SHARD_ROWS, context.tp)
            self.initializers: dict[str, Initializer] = {"sinks": Normal(init_std)}
        # Global number of this rank's first head: dropout masks and ALiBi slopes must not depend on TP.
        self.spec = replace(spec, first_head=self.query.group.rank * (num_heads // ranks))

    def forward(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden); ``key`` is the dropout key of this layer's probabilities."""
        # One gather of the input for all, and one reduction of its gradient.
        gates = [] if self.gate is None else [self.gate]
        q, k, v, *gates_of = column_parallel(x, [self.query, self.key, self.value, *gates], layout.local_token_index)
        # Each (tokens, heads/p x head_dim).
        in_place = self.kernels.rope_in_place
        if self.query_norm is not None and self.key_norm is not None:
            if isinstance(self.query_norm, RMSNorm):
                # A norm per head wants heads apart; one across heads the flat width.
                q, k = self._heads(q), self._heads(k)
            q, k = self.query_norm(q), self.key_norm(k)
            in_place = False  # a norm's output may be a view, which cannot be written over
        if self.query_key.rope is not None:
            table: RotaryTable = prepared(layout, self.query_key.rope)
            if self.query_key.rope_interleaved:
                q, k = (deinterleaved(self._heads(y), table[0].shape[-1]) for y in (q, k))
                in_place = False
            q, k = rope(q, k, *table, self.head_dim, self.kernels.rope, in_place=in_place)
        q, k, v = (self._heads(y) for y in (q, k, v))
        # After RoPE, as in Llama 4; learned norms come before it.
        if self.query_key.l2_norm_eps is not None:
            q, k = (l2_normed(y, self.query_key.l2_norm_eps) for y in (q, k))
        if self.query_key.query_scale is not None:
            q = (q * prepared(layout, self.query_key.query_scale)).to(q.dtype)
        token_index, cache = layout.token_index, layout.cache
        if self.chunk is not None:
            # From here on the layout in which a chunk is a document.
            layout = prepared(layout, chunks_key(self.chunk))
        # By the numbers of the queries: the mask of a pair does not change when keys are cut or cached.
        dropped = dropout_key_of(self, key, token_index)
        # Rounded as FSDP would round it, then wide again, because scores are.
        sinks = None if self.sinks is None else local(self.sinks, q.dtype).to(accumulation_dtype(q.dtype))
        if cache is not None:
            out, _ = cache.attention(self.kernels.attention, q, k, v, layout, self.spec, sinks)
        else:
            out, _ = self.kernels.attention(q, k, v, layout, self.spec, dropped, sinks)
        # (tokens, heads/p x head_dim)
        out = out.flatten(1)
        # (tokens, heads/p x head_dim)
        for of_gate in gates_of:
            out = out * of_gate.sigmoid()
        return self.output(out, token_index=token_index)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.head_dim)  # (tokens, heads/p, head_dim)


def dropout_key_of(attention: Any, key: torch.Tensor | None, token_index: torch.Tensor | None) -> torch.Tensor | None:
    """``key`` if this layer applies attention dropout now, else None.

    Raises:
        ValueError: it does, and the key or ``TokenLayout.token_index`` is missing.
    """
    if attention.spec.dropout == 0.0 or not attention.training:
        return None
    if key is None or token_index is None:
        raise ValueError("dropout needs keys and TokenLayout.token_index: its masks are keyed by them")
    return key


def deinterleaved(x: torch.Tensor, rotated: int) -> torch.Tensor:
    """(tokens, heads, head_dim) with the first ``rotated`` channels in the order 0, 2, ..., 1, 3, ...: the pairs of
    interleaved RoPE become those of half rotation. Products q k^T do not depend on the order of channels."""
    pairs = x[..., :rotated].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, x[..., rotated:]), dim=-1)
