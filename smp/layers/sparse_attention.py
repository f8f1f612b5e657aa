"""DeepSeek's sparse attention (DSA): latent attention in which a query sees the keys that an indexer chooses.

    dense        while sequences have no more keys than would be chosen, and in the warm-up stage: latent attention
    sparse       the chosen rows of the table of latents, see smp.kernels.sparse_attention.selected

The indexer reads the layer's input and the latent of queries without their graph, and its choice has no gradient: what
trains it is its own loss, which the mixer returns with its output. So the language loss never moves the indexer, nor
the indexer's loss the model.

Context parallelism: each rank gathers the table of all ranks, kv_lora_rank + rope_dim numbers a token, and the
indexer's keys, head_dim numbers, whatever the number of heads; their gradients are summed and scattered back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from smp.kernels.registry import first_derivative_only
from smp.kernels.sparse_attention.selected import head_sums_op, selected_backward_op, selected_op
from smp.kernels.token_layout import TokenLayout
from smp.layers.indexer import LOSS_WEIGHTS, Index, Indexer, SeenKeys, SeenKeysNeed
from smp.layers.latent_attention import LatentAttention
from smp.layers.token_needs import prepared
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext

Stage = Literal["warm-up", "dense loss", "sparse loss"]
"""Attention to all keys, the indexer's loss over all; to chosen keys, its loss over all, or over the chosen ones."""


@dataclass(frozen=True)
class IndexerOptions:
    """Settings of :class:`smp.layers.indexer.Indexer`, and the ``stage`` of its training."""

    heads: int
    head_dim: int
    topk: int
    interleaved: bool = False
    stage: Stage = "sparse loss"


class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer. Arguments as of :class:`LatentAttention`, with a latent of queries and without
    window or dropout.

    Shapes: (tokens [/p], hidden) -> the same, and the indexer's loss, 0-dim, or None where nothing measures it: where
    ``layout.prepared`` has no :data:`~smp.layers.indexer.LOSS_WEIGHTS`, or the indexer's weights are frozen.
    """

    measures = True

    def __init__(
        self, hidden_size: int, num_heads: int, parallel: Any, *, indexer: IndexerOptions, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, parallel, **options)
        context, low = ParallelContext.of(parallel), options["q_lora_rank"]
        if low is None or self.spec.window is not None or self.spec.dropout:
            raise ValueError("sparse attention needs a latent of queries, and has neither window nor dropout")
        self.stage = indexer.stage
        self.indexer = Indexer(
            hidden_size,
            low,
            context,
            heads=indexer.heads,
            head_dim=indexer.head_dim,
            topk=indexer.topk,
            interleaved=indexer.interleaved,
            init_std=options.get("init_std", 0.02),
            kernels=self.kernels,
        )
        seen = SeenKeysNeed(None if context.cp is None else Group.of(context.cp))
        self.seen = seen.key
        self.needs = (*self.needs, seen)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """((tokens [/p], hidden), the indexer's loss); ``key`` has no use: nothing is dropped here."""
        low, q, latent, key_rope = self._projected(x, layout.local_token_index)
        plain, rotated, key_rope = self._rotated(q, key_rope, layout)
        index = self.indexer(x.detach(), low.detach(), layout, self.rope)
        if layout.cache is not None:
            # Two tensors in the cache: rows of the table, and the indexer's keys.
            kept = layout.cache.append(self._table(latent, key_rope)[:, None], index.k[:, None])
            if layout.cache.keys:
                return self.output(self._of_kept(plain, rotated, index, kept, layout).flatten(1)), None
        seen: SeenKeys = prepared(layout, self.seen)
        index = index._replace(k=seen.table(index.k))
        weights = layout.prepared.get(LOSS_WEIGHTS) if self.indexer.trains else None
        if self._dense_here(seen):
            out = self._dense(plain, rotated, latent, key_rope, layout, None)
            loss = None
            if weights is not None:
                loss = self._dense_loss(plain, rotated, self._table(latent, key_rope), index, seen, weights)
            return self.output(out.flatten(1), token_index=layout.token_index), loss
        # (keys of all sequences, kv_lora_rank + rope_dim); under context parallelism gathered from its ranks
        table, matrix = seen.table(self._table(latent, key_rope)), self._up_matrix(plain)
        # int32 (tokens, topk) and (tokens,), of all tokens that TP ranks share
        chosen = self.indexer.choose(index, seen)
        out, sums = self._selected(plain, rotated, table, matrix, chosen)
        loss = None
        if weights is not None and self.stage == "sparse loss":
            loss = self.indexer.loss(index, seen, sums, weights, chosen)
        # "dense loss": attention is sparse, and the indexer learns from all keys.
        elif weights is not None:
            loss = self._loss_of_all(plain, rotated, table, matrix, index, seen, weights)
        return self.output(out.flatten(1), token_index=layout.token_index), loss

    def _dense_here(self, seen: SeenKeys) -> bool:
        # With no more keys than would be chosen all of them are.
        return self.stage == "warm-up" or seen.pairs.keys <= self.indexer.topk

    def _selected(
        self,
        plain: torch.Tensor,
        rotated: torch.Tensor,
        table: torch.Tensor,
        matrix: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, heads/p, v_head_dim), and the probabilities of the chosen keys summed over these heads."""
        # (kv_lora_rank, heads/p, channels). The up projection is absorbed, as in
        # ``LatentAttention._to_latents``: scores are with rows of the table, and no keys or values
        # of single heads are made.
        keys, values = matrix.split((self.qk_head_dim, self.v_head_dim), dim=-1)
        # (tokens, heads/p, kv_lora_rank + rope_dim)
        q = torch.cat((torch.einsum("thd,rhd->thr", plain, keys), rotated), dim=-1)
        out, sums = _Selected.apply(q, table, *chosen, self.spec.scale, self.kv_lora_rank)
        return torch.einsum("thr,rhd->thd", out, values), sums

    def _of_kept(
        self,
        plain: torch.Tensor,
        rotated: torch.Tensor,
        index: Index,
        kept: list[torch.Tensor],
        layout: TokenLayout,
    ) -> torch.Tensor:
        """(tokens, heads/p, v_head_dim): of texts that are being written, whose latents and index keys are ``kept``."""
        seen: SeenKeys = prepared(layout, self.seen)
        if self._dense_here(seen):
            return self._to_latents(plain, rotated, kept[0], layout)
        # (batch x keys, channels), without the head dimension of the cache
        table, k = (x[:, 0].flatten(0, 1) for x in kept)
        chosen = self.indexer.choose(index._replace(k=k), seen)
        matrix = torch.cat(self._up_of_cache(plain, layout), dim=-1)
        return self._selected(plain, rotated, table, matrix, chosen)[0]

    @torch.no_grad()
    def _target(
        self, plain: torch.Tensor, rotated: torch.Tensor, table: torch.Tensor, matrix: torch.Tensor, seen: SeenKeys
    ) -> torch.Tensor:
        """(tokens, keys of a sequence): probabilities of attention to all keys, summed over this rank's heads."""
        pairs, queries = seen.pairs, (plain, rotated, matrix[..., : self.qk_head_dim])
        where = pairs.batch, pairs.length, pairs.keys, 0, pairs.aligned
        sums: torch.Tensor = head_sums_op(*queries, table, seen.first, seen.last, self.spec.scale, *where)
        return sums

    def _loss_of_all(
        self,
        plain: torch.Tensor,
        rotated: torch.Tensor,
        table: torch.Tensor,
        matrix: torch.Tensor,
        index: Index,
        seen: SeenKeys,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        sums = self._target(plain, rotated, table, matrix, seen)
        return self.indexer.loss(index, seen, sums, weights, None)

    def _dense_loss(
        self,
        plain: torch.Tensor,
        rotated: torch.Tensor,
        own: torch.Tensor,
        index: Index,
        seen: SeenKeys,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The indexer's loss in a pass of dense attention, which does not make the table of latents itself."""
        with torch.no_grad():
            table, matrix = seen.table(own), self._up_matrix(plain)
        return self._loss_of_all(plain, rotated, table, matrix, index, seen, weights)


class _Selected(torch.autograd.Function):
    """:mod:`smp.kernels.sparse_attention.selected`; the sums have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        table: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        rank: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, sums = selected_op(q, table, indices, counts, scale, rank)
        ctx.save_for_backward(q, table, indices, counts, out, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dtable = selected_backward_op(dout.contiguous(), *ctx.saved_tensors, ctx.scale)
        return dq, dtable, None, None, None, None
