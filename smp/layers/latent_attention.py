"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1), split over the TP ranks by heads.

With x_t the input of a token, and for each head its own rows of the up projections:

    latent_t = norm(W_down x_t)                            kv_lora_rank numbers, which all heads share
    k_t, v_t = W_up latent_t                               qk_head_dim and v_head_dim per head
    q_t      = W_up' norm(W_down' x_t), or W x_t           qk_head_dim + rope_dim per head
    p_t      = RoPE(W_rope x_t)                            rope_dim numbers, which all heads share as a part of the key

and attention is of (q_t, RoPE of its last rope_dim channels) with (k_t, p_t). W_down and W_rope are one matrix.
The down projections are small: every rank has all of them and computes them of its own tokens, so under sequence
parallelism latents are gathered, which are narrower than the residual stream, and their weights' gradients are summed.

Attention cores take one width for queries, keys and values: the narrower ones are padded with channels of zeros, which
do not change the scores, and the output's extra channels are cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.rope import rope
from smp.kernels.token_layout import TokenLayout
from smp.layers.attention import deinterleaved, dropout_key_of
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import RMSNorm
from smp.layers.token_needs import RotaryTable, TokenNeed, prepared
from smp.parallel.collectives import copy_to_group, gather_tokens
from smp.parallel.context import ParallelContext


class LatentAttention(nn.Module):
    """Latent projections, RoPE, scaled dot-product attention and the output projection.

    Args:
        hidden_size: width of the residual stream.
        num_heads: global; must be divisible by the mesh size.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        kv_lora_rank: width of the latent of keys and values.
        q_lora_rank: width of the latent of queries; None: they are projected at once.
        qk_head_dim, rope_dim: channels of a query and a key without and with RoPE; the latter are a part of the key
            that all heads share also where ``rope`` is None.
        v_head_dim: channels of a head's value.
        norm_eps: when given, latents are RMS-normalized with this epsilon.
        scale: of scores; None: 1 / sqrt(qk_head_dim + rope_dim).
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        dropout: on attention probabilities; above 0 they are materialised.
        rope, needs: as of :class:`SelfAttention` and its ``query_key``.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what normalizes latents, rotates and computes attention.

    Shapes: (tokens [/p], hidden) -> the same. Rotated channels lie in neighbouring pairs, as in DeepSeek's files.

    Raises:
        ValueError: the ranks do not divide the heads; on use, when dropout in training mode lacks the key or
            ``token_index``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None,
        qk_head_dim: int,
        rope_dim: int,
        v_head_dim: int,
        norm_eps: float | None = None,
        scale: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        rope: str | None = "rope",
        needs: tuple[TokenNeed, ...] = (),
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        ranks, heads = context.tp.size(), num_heads
        if heads % ranks:
            raise ValueError(f"{heads} heads do not split over {ranks} ranks")
        self.group, self.sequence_parallel, self.kernels = context.tp_group, context.sequence_parallel, kernels
        self.kv_lora_rank, self.qk_head_dim, self.rope_dim = kv_lora_rank, qk_head_dim, rope_dim
        # One width for q, k and v, which kernels demand.
        self.v_head_dim, self.width = v_head_dim, max(qk_head_dim + rope_dim, v_head_dim)

        def down(width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden_size, width, context, bias=False, init_std=init_std, every_output=True)

        def up(inputs: int, width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(inputs, heads * width, context, bias=False, init_std=init_std)

        def norm(width: int) -> RMSNorm | None:
            return None if norm_eps is None else RMSNorm(width, context, eps=norm_eps, kernels=kernels)

        self.query: ColumnParallelLinear | None = None
        self.query_down: ColumnParallelLinear | None = None
        self.query_up: ColumnParallelLinear | None = None
        self.query_norm: RMSNorm | None = None
        if q_lora_rank is None:
            self.query = up(hidden_size, qk_head_dim + rope_dim)
        else:
            self.query_down, self.query_norm = down(q_lora_rank), norm(q_lora_rank)
            self.query_up = up(q_lora_rank, qk_head_dim + rope_dim)
        self.key_value_down = down(kv_lora_rank + rope_dim)
        self.key_value_norm = norm(kv_lora_rank)
        self.key_value_up = up(kv_lora_rank, qk_head_dim + v_head_dim)
        self.output = RowParallelLinear(heads * v_head_dim, hidden_size, context, bias=False, init_std=output_std)
        scale = (qk_head_dim + rope_dim) ** -0.5 if scale is None else scale  # not that of the filled-up width
        first_head = self.group.rank * (heads // ranks)
        self.spec = AttentionSpec(window=window, scale=scale, dropout=dropout, first_head=first_head)
        self.rope, self.needs = rope, needs
        self.chunk: int | None = None  # as of SelfAttention

    def forward(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden); ``key`` is the dropout key of this layer's probabilities."""
        _, q, latent, key_rope = self._projected(x, layout.local_token_index)
        plain, rotated, key_rope = self._rotated(q, key_rope, layout)
        if layout.cache is not None:
            # The latents are kept, not keys and values: that is what this kind of attention is for.
            # (tokens, 1, kv_lora_rank + rope_dim): one head that all query heads read
            (kept,) = layout.cache.append(self._table(latent, key_rope)[:, None])
            if layout.cache.keys:
                return self.output(self._to_latents(plain, rotated, kept, layout).flatten(1))
        out = self._dense(plain, rotated, latent, key_rope, layout, key)
        return self.output(out.flatten(1), token_index=layout.token_index)

    def _rotated(
        self, q: torch.Tensor, key_rope: torch.Tensor, layout: TokenLayout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split and rotate what :meth:`_projected` gives: each head's query without and with RoPE, (tokens, heads/p,
        ...), and the rotated part of the key, (tokens, 1, rope_dim), which the heads of all ranks share."""
        # The heads of all ranks use it, so its gradient is a sum over them.
        key_rope = self._of_all(key_rope)[:, None]
        # (tokens, heads/p, qk_head_dim) and (tokens, heads/p, rope_dim)
        plain, rotated = q.split((self.qk_head_dim, self.rope_dim), dim=-1)
        if self.rope is not None:
            # DeepSeek's files have pairs side by side. Kernels rotate halves; queries and keys are reordered alike.
            pairs = deinterleaved(rotated, self.rope_dim), deinterleaved(key_rope, self.rope_dim)
            table: RotaryTable = prepared(layout, self.rope)
            rotated, key_rope = rope(*pairs, *table, self.rope_dim, self.kernels.rope)
        return plain, rotated, key_rope

    def _of_all(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens [/p], channels) -> (tokens, channels), for the heads of all ranks."""
        return (gather_tokens if self.sequence_parallel else copy_to_group)(x, self.group)

    def _table(self, latent: torch.Tensor, key_rope: torch.Tensor) -> torch.Tensor:
        """(tokens, kv_lora_rank + rope_dim): a row for each token, which is key and value of all heads."""
        return torch.cat((self._of_all(latent), key_rope[:, 0]), dim=-1)

    def _dense(
        self,
        plain: torch.Tensor,
        rotated: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
        layout: TokenLayout,
        key: torch.Tensor | None,
    ) -> torch.Tensor:
        """(tokens, heads/p, v_head_dim): attention by keys and values of each head."""
        k, v = self._keys(self.key_value_up(latent, layout.local_token_index), key_rope)
        q = self._filled(torch.cat((plain, rotated), dim=-1))
        dropped = dropout_key_of(self, key, layout.token_index)
        out, _ = self.kernels.attention(q, k, v, layout, self.spec, dropped)
        return out[..., : self.v_head_dim]  # without the channels that were filled with zeros

    def _to_latents(
        self, plain: torch.Tensor, rotated: torch.Tensor, kept: torch.Tensor, layout: TokenLayout
    ) -> torch.Tensor:
        """(tokens, heads/p, v_head_dim): attention to latents and rotated keys that are kept, (batch, 1, keys,
        kv_lora_rank + rope_dim), as if each were a key and a value that all heads share (DeepSeek-V2, 2.1.2):
        q . (W latent) = (W^T q) . latent, and the sum over tokens of p (W' latent) = W' (the sum of p latent)."""
        keys, values = self._up_of_cache(plain, layout)
        # (tokens, heads/p, kv_lora_rank + rope_dim)
        q = torch.cat((torch.einsum("thd,rhd->thr", plain, keys), rotated), dim=-1)
        # The table is both keys and values; of the output only the latent part is a value.
        out, _ = layout.cache.attend(q, kept, kept, layout, self.spec)
        return torch.einsum("thr,rhd->thd", out[..., : self.kv_lora_rank], values)

    def _up_of_cache(self, like: torch.Tensor, layout: TokenLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """The key part and the value part of :meth:`_up_matrix`, made once per layer and cache."""
        view = layout.cache
        if view.layer not in view.cache.derived:
            view.cache.derived[view.layer] = self._up_matrix(like)
        keys, values = view.cache.derived[view.layer].split((self.qk_head_dim, self.v_head_dim), dim=-1)
        return keys, values

    def _up_matrix(self, like: torch.Tensor) -> torch.Tensor:
        """(kv_lora_rank, heads/p, qk_head_dim + v_head_dim): what the up projection makes of each unit latent, with
        whatever adapter or precision it has."""
        ranks = self.group.size if self.sequence_parallel else 1
        rows = -(-self.kv_lora_rank // ranks)
        # The layer gathers its input under sequence parallelism, so each rank gives its slice of
        # the unit vectors; padded, for the ranks to have equal slices.
        units = torch.eye(rows * ranks, self.kv_lora_rank, dtype=like.dtype, device=like.device)
        own = units[self.group.rank * rows :][:rows] if self.sequence_parallel else units
        return self.key_value_up(own)[: self.kv_lora_rank].unflatten(1, (-1, self.qk_head_dim + self.v_head_dim))

    def _projected(
        self, x: torch.Tensor, token_index: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The latent of queries (tokens [/p], q_lora_rank), which is ``x`` where there is none; queries (tokens,
        heads/p, qk_head_dim + rope_dim); the latent of keys and values (tokens [/p], kv_lora_rank) and their shared
        part (tokens [/p], rope_dim), which is not rotated yet."""
        if self.query_down is None or self.query_up is None:
            # Two calls, because their outputs are cut in different ways.
            assert self.query is not None
            low, q, down = x, self.query(x, token_index), self.key_value_down(x, token_index)
        else:
            # Both are whole on every rank, so nothing is gathered for them.
            low, down = column_parallel(x, [self.query_down, self.key_value_down], token_index)
            low = low if self.query_norm is None else self.query_norm(low)
            q = self.query_up(low, token_index)
        latent, key_rope = down.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        latent = latent if self.key_value_norm is None else self.key_value_norm(latent)
        return low, q.unflatten(1, (-1, self.qk_head_dim + self.rope_dim)), latent, key_rope

    def _keys(self, up: torch.Tensor, key_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each (keys, heads/p, width), from the up projection and the rotated part."""
        up = up.unflatten(1, (-1, self.qk_head_dim + self.v_head_dim))
        k, v = up.split((self.qk_head_dim, self.v_head_dim), dim=-1)
        # (tokens, heads/p, qk_head_dim + rope_dim)
        k = torch.cat((k, key_rope.expand(-1, k.shape[1], -1)), dim=-1)
        return self._filled(k), self._filled(v)

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with channels of zeros up to the width of attention."""
        return x if x.shape[-1] == self.width else F.pad(x, (0, self.width - x.shape[-1]))
