"""The lightning indexer of DeepSeek's sparse attention, and the keys that each query may see; the arithmetic is in
:mod:`smp.kernels.sparse_attention.indexer`.

    q = RoPE(W_q latent of queries)     heads x head_dim numbers of a token
    k = RoPE(LayerNorm(W_k x))          head_dim numbers, one key for all heads
    w = W_w x / sqrt(heads head_dim)    heads numbers

RoPE is on the first channels of each, by halves in DeepSeek-V3.2 (its first release paired neighbours, and was
corrected) and by neighbouring pairs in GLM-5, where attention itself has pairs in both. The Hadamard rotation of q and
k that DeepSeek's code has in front of FP8 is left out: it is orthogonal, and products stay the same without FP8.

The weights are small and every rank has all of them. Under sequence parallelism each rank scores the queries of its own
tokens, so that this work is shared; keys are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from smp.config import ConfigError
from smp.kernels import Kernels
from smp.kernels.registry import first_derivative_only
from smp.kernels.rope import rope
from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.sparse_attention.blocks import Pairs
from smp.kernels.sparse_attention.indexer import choose_keys, chosen_loss_op, dense_loss_op
from smp.kernels.token_layout import TokenLayout
from smp.kernels.transfer import to_device
from smp.layers.attention import deinterleaved
from smp.layers.context_parallel.heads import whole_plan
from smp.layers.context_parallel.ulysses import Permuted
from smp.layers.norm import LayerNorm
from smp.layers.parameter import REPLICATE, Initializer, Normal, local, tp_parameter
from smp.layers.recurrences.documents import of_documents
from smp.layers.token_needs import RotaryTable, prepared
from smp.parallel.collectives import (
    Group,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from smp.parallel.context import ParallelContext

NORM_EPS = 1e-6
"""Epsilon of the norm of keys; that of the model's other norms does not apply."""
LOSS_WEIGHTS = "loss weights of tokens"
"""Key in ``TokenLayout.prepared`` of each token's loss weight, fp32 (tokens,), in a pass that measures the
indexer's."""


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """Which keys the queries of a micro-batch may see, and how the table of keys is made.

    Attributes:
        first, last: int64 (tokens,), numbers of the first and the last key of the table; last < first: none.
        pairs: where queries and keys lie.
        cp: the ranks that hold parts of the same sequences; None: they are whole.
        order, back: int64 (tokens of all these ranks,), as of :class:`~smp.layers.context_parallel.heads.WholePlan`.
    """

    first: torch.Tensor
    last: torch.Tensor
    pairs: Pairs
    cp: Group | None = None
    order: torch.Tensor | None = None
    back: torch.Tensor | None = None

    def table(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, channels) of this rank -> (batch x keys, channels); gradients are summed over the ranks."""
        x = x[: self.pairs.batch * self.pairs.length]  # without padding
        if self.cp is None or self.order is None or self.back is None:
            return x
        return Permuted.apply(gather_tokens(x, self.cp), self.order, self.back)

    def own(self, rows: int, rank: int) -> SeenKeys:
        """The part of the ``rows`` tokens of TP rank ``rank``, under sequence parallelism."""
        start = rank * rows
        first, last = (x.narrow(0, start, rows) for x in (self.first, self.last))
        return replace(self, first=first, last=last, pairs=replace(self.pairs, start=start))


@dataclass(frozen=True)
class SeenKeysNeed:
    """See :class:`SeenKeys`; ``cp``: of the run."""

    cp: Group | None = None

    @property
    def key(self) -> str:
        return "keys that each query may see"

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> SeenKeys:
        assert layout.position_ids is not None, "a model gives them"
        device, batch, length = layout.position_ids.device, layout.batch, layout.length
        if layout.cache is not None and not layout.cache.whole:
            raise ConfigError(
                "--experimental-attention-variant dsa: text is not written with --context-parallel-size above 1; leave "
                "it out"
            )
        if layout.query_positions is not None:  # of texts that are being written, whose keys are kept
            # A text's keys lie from column 0 of its slot on, so the position of a query is its last key's number.
            queries, keys = layout.query_positions, layout.keys
            numbers = _numbers(torch.zeros_like(queries), queries, keys, layout.padding)
            return SeenKeys(*numbers, Pairs(batch, length, keys, aligned=False))
        if layout.cut is not None:
            return self._of_cut(layout, layout.cut, device)
        column = torch.arange(length, device=device).expand(batch, length)
        begins = torch.zeros_like(column)
        if layout.document_ids is not None:
            positions = of_documents(to_device(layout.document_ids, device)).positions
            assert positions is not None
            # A document's first token: nothing before it may be seen.
            begins = column - positions
        return SeenKeys(*_numbers(begins, column, length, layout.padding), Pairs(batch, length, length))

    def _of_cut(self, layout: TokenLayout, cut: SequenceCut, device: torch.device) -> SeenKeys:
        assert self.cp is not None, "who cuts sequences gives layers the ranks"
        column = cut.index(self.cp.rank)
        begins = to_device(column - cut.document_positions().gather(1, column), device)
        first, last = _numbers(begins, to_device(column, device), cut.length, layout.padding)
        plan, pairs = whole_plan(cut, self.cp, device), Pairs(cut.batch, layout.length, cut.length, aligned=False)
        return SeenKeys(first, last, pairs, self.cp, plan.order, plan.back)


def _numbers(begins: torch.Tensor, ends: torch.Tensor, keys: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, last) key numbers in the table, int64 (tokens,), from columns (batch, length); padding sees nothing."""
    # The table has the keys of all sequences one after the other.
    base = torch.arange(len(begins), device=begins.device)[:, None] * keys
    first, last = (begins + base).flatten(), (ends + base).flatten()
    none = first.new_zeros(padding)
    # Padding: first 0, last -1, an empty range.
    return torch.cat((first, none)), torch.cat((last, none - 1))


class Index(NamedTuple):
    """Queries, keys and head weights of the indexer.

    Attributes:
        q: (tokens [/p], heads, head_dim).
        k: (keys of the table, head_dim).
        w: (tokens [/p], heads).
    """

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor


class Projection(nn.Module):
    """``y = x W^T`` with a matrix that every rank has. Not a linear layer, which could have an adapter: the indexer's
    choice has no gradient, and an adapter would learn nothing of the language loss."""

    def __init__(self, inputs: int, outputs: int, context: ParallelContext, init_std: float) -> None:
        super().__init__()
        self.shared_by = context.shared_by
        self.weight = tp_parameter((outputs, inputs), REPLICATE, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens [/p], inputs) -> (tokens [/p], outputs)."""
        return F.linear(x, local(self.weight, x.dtype, summed_over=self.shared_by))


class Indexer(nn.Module):
    """Projections, norm and RoPE.

    Args:
        hidden_size, low_rank: widths of the residual stream and of the latent of queries.
        heads, head_dim: of the indexer.
        context: of the layer.
        topk: keys that a query sees.
        interleaved: RoPE pairs neighbouring channels.
        init_std: of initial weights.
        kernels: what normalizes keys and rotates.
    """

    def __init__(
        self,
        hidden_size: int,
        low_rank: int,
        context: ParallelContext,
        *,
        heads: int,
        head_dim: int,
        topk: int,
        interleaved: bool,
        init_std: float,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.topk, self.interleaved = heads, head_dim, topk, interleaved
        self.group, self.sequence_parallel, self.kernels = context.tp_group, context.sequence_parallel, kernels

        self.queries = Projection(low_rank, heads * head_dim, context, init_std)
        self.keys, self.weights = (Projection(hidden_size, width, context, init_std) for width in (head_dim, heads))
        self.key_norm = LayerNorm(head_dim, context, eps=NORM_EPS, kernels=kernels)

    @property
    def trains(self) -> bool:
        """Whether the weights are trained: adapters freeze them, and so does a model without the indexer's loss."""
        return self.keys.weight.requires_grad

    def forward(self, x: torch.Tensor, low: torch.Tensor, layout: TokenLayout, rotary: str) -> Index:
        """The index of this rank's tokens; k is (tokens, head_dim), gathered from all TP ranks under sequence
        parallelism.

        Args:
            x: (tokens [/p], hidden), the layer's input.
            low: (tokens [/p], low_rank), the latent of queries.
            layout: of the tokens.
            rotary: key of the rotary table in ``layout.prepared``.
        """
        # (tokens [/p], heads, head_dim)
        q = self.queries(low).unflatten(1, (self.heads, self.head_dim))
        # (tokens [/p], 1, head_dim): one key, as a head for the rotation.
        k, w = self.key_norm(self.keys(x))[:, None], self.weights(x)
        table: RotaryTable = prepared(layout, rotary)
        if self.sequence_parallel:
            rows = x.shape[0]
            # The table has a row for every token, this rank has a slice of the tokens.
            cos, sin = (part.narrow(0, self.group.rank * rows, rows) for part in table)
            table = cos, sin
        if self.interleaved:
            q, k = (deinterleaved(part, table[0].shape[-1]) for part in (q, k))
        q, k = rope(q, k, *table, self.head_dim, self.kernels.rope)
        k = k[:, 0]
        if self.sequence_parallel:
            # Each rank scores its own queries with the keys of all tokens; gradients of the keys are summed back.
            k = gather_tokens(k, self.group)
        return Index(q, k, w * (self.heads * self.head_dim) ** -0.5)

    def choose(self, index: Index, seen: SeenKeys) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the queries of all ranks that share tokens, as of
        :func:`~smp.kernels.sparse_attention.indexer.choose_keys`."""
        own = self._own(index, seen)
        indices, counts = choose_keys(*index, own.first, own.last, self.topk, own.pairs)
        if self.sequence_parallel:
            # Attention runs on all tokens with some of the heads, so every rank needs the choice of all queries.
            indices, counts = gather_tokens(indices, self.group), gather_tokens(counts, self.group)
        return indices, counts

    def loss(
        self,
        index: Index,
        seen: SeenKeys,
        sums: torch.Tensor,
        weights: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """0-dim fp32, equal on all TP ranks: the sum of KL(target || scores) x weight over queries.

        Args:
            index: of the tokens.
            seen: as of the layout.
            sums: probabilities of attention summed over this rank's heads, (tokens, chosen or all keys of a sequence).
            weights: fp32 (tokens,).
            chosen: the chosen keys that the columns of ``sums`` belong to; None: all keys that a query sees.
        """
        own, rows, target = self._own(index, seen), slice(None), sums.detach()
        if self.sequence_parallel:
            rows = slice(own.pairs.start, own.pairs.start + index.q.shape[0])
            # Heads of attention are cut over TP; their probabilities are summed, and each rank gets its tokens.
            target = reduce_scatter_tokens(target, self.group)
        else:
            target = reduce_from_group(target, self.group)
        # Each head's add up to 1: the sum is the number of heads, but for rounding.
        target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
        if chosen is None:
            found = _Loss.apply(*index, dense_loss_op, (own.first, own.last, target, weights[rows]), own.pairs)
        else:
            indices, counts = (x[rows] for x in chosen)
            found = _Loss.apply(*index, chosen_loss_op, (indices, counts, target, weights[rows]), None)
        found = found.float()
        return reduce_from_group(found, self.group) if self.sequence_parallel else found

    def _own(self, index: Index, seen: SeenKeys) -> SeenKeys:
        return seen.own(index.q.shape[0], self.group.rank) if self.sequence_parallel else seen


class _Loss(torch.autograd.Function):
    """A loss that computes its gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        w: torch.Tensor,
        op: Any,
        rest: tuple[torch.Tensor, ...],
        pairs: Pairs | None,
    ) -> torch.Tensor:
        # Operators take no objects.
        where = () if pairs is None else (pairs.batch, pairs.length, pairs.keys, pairs.start, pairs.aligned)
        loss, *gradients = op(q, k, w, *rest, *where)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The loss is a sum, so its gradients are scaled by the factor that it is multiplied with later.
        dq, dk, dw = (x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return dq, dk, dw, None, None, None
