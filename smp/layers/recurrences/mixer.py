"""Base of mixers with a linear recurrence: a short causal convolution of queries, keys and values, a state for each
head of values, and both of them on sequences that are cut over ranks, packed, or being generated.

A subclass has the projections, the rule of its states and what follows it. Names are attention's, also where a paper
has its own: Mamba's x, B and C are values, keys and queries of its states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from smp.kernels import Kernels
from smp.kernels.recurrences.causal_conv import causal_conv
from smp.kernels.recurrences.chunks import Inputs, Pair
from smp.kernels.token_layout import TokenLayout
from smp.layers.context_parallel.states import StatesPlan
from smp.layers.linear import RowParallelLinear
from smp.layers.parameter import REPLICATE, SHARD_ROWS, Constant, Initializer, Normal, local, tp_parameter
from smp.layers.recurrences.documents import Documents, DocumentsNeed
from smp.layers.token_needs import TokenNeed, prepared
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext

CONVOLVED = ("query", "key", "value")
Ended = Callable[[], torch.Tensor]
"""What waits for messages and gives a result."""
StatesBefore = Callable[[torch.Tensor, torch.Tensor], Ended]
"""Begins an exchange: (what each piece of a cut sequence adds to the state before it, what it multiplies it with) ->
the states before."""
_SHARES = range(8, 1, -1)
"""Parts of the heads of a cut sequence, the first that divides them: states of one travel while the next is computed,
so that only the last one's may be waited for."""


class Tokens(NamedTuple):
    """Projections of a mixer's input, (batch, length, ...) each.

    Attributes:
        mixed: queries, keys and values side by side before the convolution.
        g: log of what a state keeps, for each head, or for each channel of its keys.
        rate: how much is written, for each head.
    """

    mixed: torch.Tensor
    g: torch.Tensor
    rate: torch.Tensor


class RecurrentMixer(nn.Module, ABC):
    """Base of mixers with a recurrence.

    Args:
        context: of the layer.
        key_heads, value_heads: global. Key heads are split over the TP ranks; a single one is every rank's.
        key_dim, value_dim: channels of a head: a state has key_dim x value_dim numbers for each head of values.
        conv: tokens that the convolution sees, with the token itself.
        conv_bias: it has one.
        kernels: which exchange context-parallel ranks have.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for heads that do not fit together, or do not split over the ranks.
    """

    output: RowParallelLinear
    conv_multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors of queries, keys and values before the convolution."""

    def __init__(
        self,
        context: ParallelContext,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv: int,
        conv_bias: bool,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        ranks = context.tp.size()
        # A single key head (Mamba-2 with one group) cannot be cut: every rank computes it.
        replicated = key_heads == 1 < ranks
        if (key_heads % ranks and not replicated) or value_heads % key_heads or value_heads % ranks:
            raise ValueError(f"{value_heads} heads on {key_heads} of keys do not split over {ranks} ranks")
        self.sequence_parallel = context.sequence_parallel
        self.cp = None if context.cp is None else Group.of(context.cp)
        self.needs: tuple[TokenNeed, ...] = (DocumentsNeed(conv, self.cp, kernels.recurrence_exchange),)
        self.key_dim, self.value_dim, self.conv, self.conv_bias = key_dim, value_dim, conv, conv_bias
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.keys_of_all = context.tp_group if replicated else None
        own_keys = keys if replicated else keys // ranks
        self.widths = own_keys, own_keys, values // ranks
        self.initializers: dict[str, Initializer] = {}
        uniform = Normal((3 * conv) ** -0.5)  # of the width that torch's convolutions begin with
        for name, width in zip(CONVOLVED, (keys, keys, values), strict=True):
            placement = REPLICATE if replicated and name != "value" else SHARD_ROWS
            setattr(self, f"{name}_conv", tp_parameter((width, conv), placement, context.tp))
            self.initializers[f"{name}_conv"] = uniform
            if conv_bias:
                setattr(self, f"{name}_conv_bias", tp_parameter((width,), placement, context.tp))
                self.initializers[f"{name}_conv_bias"] = Constant(0.0)

    def forward(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden); ``key`` has no use: nothing is dropped here."""
        tokens, gate = self._projected(x, layout)
        out = self._mixed(tokens, layout.cache, prepared(layout, self.needs[0].key)).flatten(0, 1)
        out = out if layout.padding == 0 else F.pad(out, (0, 0, 0, 0, 0, layout.padding))
        return self.output(self._gated(out, gate), token_index=layout.token_index)

    @abstractmethod
    def _projected(self, x: torch.Tensor, layout: TokenLayout) -> tuple[Tokens, torch.Tensor]:
        """(the recurrence's inputs, the gate (tokens, heads/p x value_dim))."""

    @abstractmethod
    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """(tokens, heads/p, value_dim) -> what the output projection reads."""

    @abstractmethod
    def _read(self, x: Inputs, state: torch.Tensor | None) -> Pair:
        """The rule: outputs and the state after the last token."""

    @abstractmethod
    def _of_pieces(self, x: Inputs, states_before: StatesBefore) -> Ended:
        """Outputs of pieces of sequences, whose states before follow from what all pieces make of theirs."""

    def _skipped(self, out: torch.Tensor, v: torch.Tensor, heads: Group | None) -> torch.Tensor:
        """Outputs with what values add to them past the states; ranks of ``heads`` share what this one has."""
        return out

    def _normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as the rule takes them."""
        return q, k

    def _rows(self, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """(batch, length, ...), without the rows after the last sequence, which are of no document."""
        return x[: layout.num_queries].unflatten(0, (layout.batch, layout.length))

    def _mixed(self, tokens: Tokens, cache: Any, documents: Documents) -> torch.Tensor:
        """(batch, length, heads/p, value_dim)."""
        plan = documents.plan
        if isinstance(plan, StatesPlan):
            return self._by_states(tokens, documents, plan)
        if plan is None:
            return self._whole(tokens, cache, documents)
        if cache is not None:
            # All ranks keep the state of a text, so each goes through its prompt.
            whole = Tokens(*(plan.gathered(x) for x in tokens))
            return plan.own(self._whole(whole, cache, documents))
        # Queries, keys and values each: a rank gets its share of the heads of all three.
        mixed = torch.cat(plan.to_heads(tokens.mixed.split(self.widths, dim=-1)), 2)
        whole = Tokens(mixed, *plan.to_heads([tokens.g, tokens.rate]))
        return plan.to_tokens(self._whole(whole, None, documents, plan.cp))

    def _whole(self, tokens: Tokens, cache: Any, documents: Documents, heads: Group | None = None) -> torch.Tensor:
        """Outputs of whole sequences; the ranks of ``heads`` share the heads of each."""
        before, state = None, None
        if cache is not None and documents.valid is not None:
            # Padding after a prompt writes nothing, and forgets nothing.
            # A log decay of 0 keeps the state, a rate of 0 writes nothing.
            g, rate = (y.masked_fill(~documents.valid[..., None], 0.0) for y in tokens[1:])
            tokens = Tokens(tokens.mixed, g, rate)
            # The last conv - 1 tokens before these, and the state after them.
            before, state = cache.states(self._states(tokens))
        q, k, v = self._convolved(tokens.mixed, before, documents.positions, heads)
        out, last = self._read(Inputs(q, k, v, tokens.g, tokens.rate, documents.begins), state)
        if cache is not None and documents.valid is not None:
            assert before is not None
            cache.keep(_last_tokens(tokens.mixed, before, documents.valid), last)
        return self._skipped(out, v, heads)

    def _by_states(self, tokens: Tokens, documents: Documents, plan: StatesPlan) -> torch.Tensor:
        """See :mod:`smp.layers.context_parallel.states`."""
        assert self.cp is not None
        rows = Tokens(*(plan.to_rows(x) for x in tokens))
        # The convolution needs the last tokens of the piece before, which may be another rank's.
        q, k, v = self._convolved(rows.mixed, plan.tokens_before(rows.mixed, self.cp), documents.positions)
        v = v.to(rows.g.dtype)  # what is multiplied with a state later is not rounded before
        start = partial(plan.start_states_before, cp=self.cp)
        inputs = Inputs(q, k, v, rows.g, rows.rate, documents.begins)
        begun = [self._of_pieces(part, start) for part in _by_heads(inputs)]
        out = self._skipped(torch.cat([ended() for ended in begun], 2), v, None)
        return plan.to_tokens(out.to(rows.mixed.dtype), tokens.mixed.shape[0])

    def _convolved(
        self,
        mixed: torch.Tensor,
        before: torch.Tensor | None,
        positions: torch.Tensor | None,
        heads: Group | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, (rows, length, heads, channels)."""
        weights = self._of_convolution("conv", mixed.dtype, heads)
        weights = [times(*both) for both in zip(weights, self.conv_multipliers, strict=True)]
        bias = torch.cat(self._of_convolution("conv_bias", mixed.dtype, heads)) if self.conv_bias else None
        convolved = causal_conv(mixed, torch.cat(weights), before, positions, bias)
        # (rows, length, channels of this rank) each
        q, k, v = convolved.split([weight.shape[0] for weight in weights], dim=-1)
        q, k = self._normed(*(y.unflatten(2, (-1, self.key_dim)) for y in (q, k)))
        return q, k, v.unflatten(2, (-1, self.value_dim))

    def _of_convolution(self, part: str, dtype: torch.dtype, heads: Group | None) -> list[torch.Tensor]:
        # Convolutions of a key head that all ranks have are used on the same tokens by different
        # heads of values: their gradients are summed over TP.
        shared = self.keys_of_all, self.keys_of_all, None
        found = [
            local(getattr(self, f"{name}_{part}"), dtype, summed_over=group)
            for name, group in zip(CONVOLVED, shared, strict=True)
        ]
        return found if heads is None else [of_rank(x, heads) for x in found]

    def _states(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Empty tensors with the shapes and dtypes of the states that generation keeps for a text."""
        last = tokens.mixed.new_empty((1, self.conv - 1, tokens.mixed.shape[2]), device="meta")
        state = tokens.rate.new_empty((1, tokens.rate.shape[2], self.key_dim, self.value_dim), device="meta")
        return last, state


def _by_heads(x: Inputs) -> list[Inputs]:
    """The same by parts of the heads. Compiled code waits for messages at once, and a GPU issues operations of a part
    for longer than its links carry the states: there they are one."""
    keys, heads = x.q.shape[2], x.v.shape[2]
    shares = () if torch.compiler.is_compiling() or x.v.device.type != "cpu" else _SHARES
    count = next((n for n in shares if heads % n == 0 and (keys % n == 0 or n % keys == 0)), 1)
    of_keys = min(count, keys)  # parts of the same keys follow each other
    queries, all_keys = x.q.chunk(of_keys, 2), x.k.chunk(of_keys, 2)
    parts = zip(*(y.chunk(count, 2) for y in (x.v, x.g, x.rate)), strict=True)
    return [
        Inputs(queries[n * of_keys // count], all_keys[n * of_keys // count], v, g, rate, x.begins)
        for n, (v, g, rate) in enumerate(parts)
    ]


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x`` times ``factor``; ``x`` itself where the factor is 1."""
    return x if factor == 1.0 else x * factor


def of_rank(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's share of the rows of ``x``."""
    return x.unflatten(0, (group.size, -1))[group.rank]


def _last_tokens(x: torch.Tensor, before: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The tokens that the convolution of the next one sees, (batch, conv - 1, channels), of ``x`` with those before it,
    where only ``valid`` ones count, which come first."""
    # ``before`` comes first, so token n of ``x`` is column conv - 1 + n: the last conv - 1 valid columns.
    count = valid.sum(1)[:, None] + torch.arange(before.shape[1], device=x.device)
    return torch.cat((before, x), 1).gather(1, count[..., None].expand(-1, -1, x.shape[2]))
