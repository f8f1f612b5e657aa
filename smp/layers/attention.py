"""Causal self-attention with grouped key/value heads, split over the TP ranks by heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.rope import rope
from smp.layers.documents import Spans, distances
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import RMSNorm
from smp.parallel.context import ParallelContext
from smp.parallel.rng import keyed_dropout


@dataclass
class SequenceInfo:
    """What a block has to know about the tokens it gets. Activations are (tokens, hidden), batch-major and flattened.

    Attributes:
        batch, length: number and length of the sequences.
        tokens: rows after padding; rows from batch x length on are padding.
        rope: cos and sin tables, fp32 (tokens, 1, rotated channels), or None.
        token_index: int64 (tokens,) global token numbers that dropout is keyed by, or None without dropout.
        local_token_index: this rank's slice of ``token_index`` under sequence parallelism; by default the same.
        mask: (batch or 1, 1, length, length) in the dtype of the activations, see ``document_mask``: which tokens see
            which, instead of a layer's own ``causal`` and ``window``. One for all layers. None: one document per
            sequence.
        spans: the same for a variable-length kernel, instead of ``mask``.
        grouped: whether torch's attention gets key/value heads as they are, see ``smp.kernels.attention``.
    """

    batch: int
    length: int
    tokens: int
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    token_index: torch.Tensor | None = None
    local_token_index: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    spans: Spans | None = None
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.local_token_index is None:
            self.local_token_index = self.token_index


class KeyValueCache:
    """Keys and values of the tokens that went through a layer so far, for generating token by token.

    Args:
        length: most tokens of a sequence.
    """

    def __init__(self, length: int) -> None:
        self.length, self.filled = length, 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens so far, these included, (batch, groups/p, length, head_dim).

        Raises:
            ValueError: there is no room.
        """
        batch, groups, count, width = k.shape
        if self.filled + count > self.length:
            raise ValueError(f"{self.filled} + {count} tokens do not fit into a cache for {self.length}")
        if self._keys is None or self._values is None:
            self._keys = k.new_empty(batch, groups, self.length, width)
            self._values = torch.empty_like(self._keys)
        self._keys[:, :, self.filled : self.filled + count] = k
        self._values[:, :, self.filled : self.filled + count] = v
        self.filled += count
        return self._keys[:, :, : self.filled], self._values[:, :, : self.filled]


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
        qk_norm_eps: when given, RMS-normalize queries and keys per head with this epsilon before RoPE.
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        causal: a token does not see later ones.
        dropout: on attention probabilities; above 0 they are materialised.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what rotates queries and keys, and normalizes them.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for sizes that do not divide; on use, when dropout in training mode lacks the key or the numbers.
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
        qk_norm_eps: float | None = None,
        window: int | None = None,
        causal: bool = True,
        dropout: float = 0.0,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context, groups = ParallelContext.of(parallel), num_groups or num_heads
        ranks = context.tp.size()
        if num_heads % ranks or num_heads % groups:
            raise ValueError(f"{num_heads} heads do not split over {ranks} ranks and {groups} key/value heads")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden size {hidden_size} is not divisible by {num_heads} heads: give head_dim")
        self.head_dim = head_dim or hidden_size // num_heads
        if window is not None and not causal:
            raise ValueError("a sliding window needs causal attention")
        self.window, self.causal, self.dropout = window, causal, dropout
        self.sequence_parallel = context.sequence_parallel
        self.rope_backend, self.rope_in_place = kernels.rope, kernels.rope_in_place
        width, kv_width = num_heads * self.head_dim, groups * self.head_dim
        self.query = ColumnParallelLinear(hidden_size, width, context, bias=qkv_bias, init_std=init_std)
        self.key, self.value = (
            ColumnParallelLinear(hidden_size, kv_width, context, bias=qkv_bias, parts=groups, init_std=init_std)
            for _ in range(2)
        )
        self.output = RowParallelLinear(width, hidden_size, context, bias=bias, init_std=output_std)
        self.query_norm = self.key_norm = None
        if qk_norm_eps is not None:
            # each rank has its own heads, as elsewhere its own tokens
            self.query_norm, self.key_norm = (
                RMSNorm(self.head_dim, context, eps=qk_norm_eps, split_input=True, kernels=kernels) for _ in range(2)
            )
        self.first_head = self.query.group.rank * (num_heads // ranks)
        self.cache: KeyValueCache | None = None  # set while text is generated

    def forward(self, x: torch.Tensor, info: SequenceInfo, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden); ``key`` is the dropout key of this layer's probabilities."""
        outputs = column_parallel(x, [self.query, self.key, self.value], info.local_token_index)
        q, k, v = outputs  # (tokens, heads/p x head_dim)
        normed = self.query_norm is not None and self.key_norm is not None
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(self._heads(q)), self.key_norm(self._heads(k))
        if info.rope is not None:
            in_place = self.rope_in_place and not normed  # a norm's output may be a view, which cannot be written over
            q, k = rope(q, k, *info.rope, self.head_dim, self.rope_backend, in_place=in_place)
        q, k, v = (self._heads(y) for y in (q, k, v))
        if info.spans is not None:
            out = self._attend_in_spans(q, k, v, info, info.spans)
        else:
            q, k, v = (_unfold(y, info) for y in (q, k, v))
            out = _fold(self._attend(q, k, v, info, key), info)
        return self.output(out, token_index=info.token_index)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.head_dim)  # (tokens, heads/p, head_dim)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, info: SequenceInfo, key: torch.Tensor | None
    ) -> torch.Tensor:
        """(batch, heads/p, length, head_dim) -> the same."""
        if self.cache is not None:
            k, v = self.cache.append(k, v)
            if k.shape[2] > q.shape[2]:
                return self._attend_to_past(q, k, v)
        dropout = self.dropout > 0.0 and self.training
        if dropout or not info.grouped:
            k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        if dropout:
            return self._attend_with_dropout(q, k, v, info, key, self.dropout)
        mask = info.mask
        if mask is None and self.window is not None and self.window < info.length:
            mask = self._mask(info.length, q.device)
        causal, grouped = self.causal and mask is None, k.shape[1] < q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def _attend_in_spans(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, info: SequenceInfo, spans: Spans
    ) -> torch.Tensor:
        """(tokens, heads/p, head_dim) -> (tokens, heads/p x head_dim), each document by itself."""
        if self.cache is not None or not self.causal or (self.dropout > 0.0 and self.training):
            raise ValueError("spans are for causal attention without dropout and cache: give a mask instead")
        count = info.batch * info.length
        k, v = (x[:count].repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return _padded(spans.attend(q[:count], k, v).flatten(1), info)

    def _attend_to_past(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The last tokens of a sequence, whose keys and values are all there."""
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(k.shape[2], q.device, q.shape[2]))

    def _mask(self, length: int, device: torch.device, last: int | None = None) -> torch.Tensor:
        """Boolean (length, length), True where row may see column; of the ``last`` rows only."""
        distance = distances(length, device, last)
        mask = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return mask if self.window is None else mask & (distance < self.window)

    def _attend_with_dropout(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        info: SequenceInfo,
        key: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """Attention with materialised probabilities, so that dropout can be keyed by (token, global head, position)."""
        if key is None or info.token_index is None:
            raise ValueError("dropout needs keys and SequenceInfo.token_index: its masks are keyed by them")
        batch, heads, length, _ = q.shape
        scores = (q @ k.transpose(-1, -2)).float() * self.head_dim**-0.5  # (batch, heads/p, length, length)
        if info.mask is not None:
            scores = scores + info.mask
        else:
            scores = scores.masked_fill(~self._mask(length, q.device), -torch.inf)
        probabilities = scores.softmax(dim=-1)
        tokens = info.token_index[: batch * length].view(batch, 1, length)
        head = self.first_head + torch.arange(heads, device=q.device)
        rows = (tokens * (1 << 16) + head[None, :, None]).flatten()  # a number per (token, global head)
        dropped = keyed_dropout(probabilities.flatten(0, 2), key, rows, dropout)
        return dropped.view_as(probabilities).to(v.dtype) @ v


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(batch, groups, length, head_dim) -> (batch, heads, length, head_dim), each key/value head for its query
    heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _unfold(x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    """(tokens, heads, head_dim) -> (batch, heads, length, head_dim), without the padding."""
    tokens = x[: info.batch * info.length]
    return rearrange(tokens, "(batch length) heads dim -> batch heads length dim", batch=info.batch)


def _fold(x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    """(batch, heads, length, head_dim) -> (tokens, heads x head_dim), padded with zeros."""
    return _padded(rearrange(x, "batch heads length dim -> (batch length) (heads dim)"), info)


def _padded(flat: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    padding = info.tokens - flat.shape[0]
    return F.pad(flat, (0, 0, 0, padding)) if padding else flat
