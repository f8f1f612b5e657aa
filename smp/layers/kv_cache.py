"""Keys and values of many texts that are written at once, each in a row of its own (a slot).

A slot's columns are its tokens in order, so slots are filled to different lengths. Attention masks by position: a token
sees the keys up to its own position, which leaves out what a longer text has left in the slot.

Under context parallelism each rank holds some tokens of every text: those of the prompt that the cut gave it, then of
the written ones every cp-th. ``positions`` says which. Every rank computes a new token's attention to its own keys, and
the results are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec, Pair, merge, pad_rows
from smp.kernels.attention_cores.fused_attention import DEFAULT_ATTENTION, widened
from smp.kernels.attention_cores.sdpa import Scores, operator_for
from smp.kernels.attention_cores.sinks import with_sinks
from smp.kernels.token_layout import TokenLayout
from smp.parallel.collectives import Group, start_all_gather, wait

NOWHERE = 1 << 40
"""Position of a column that holds no token of its text: after all of them, so none sees it."""
ROUNDED = 64
"""Slots grow by multiples of so many tokens."""


class KVCache:
    """Keys, values and recurrent states of the layers of one rank.

    Args:
        slots: number of texts at once.
        device: of the model.
        cp: its ranks share the tokens of every text; None: each rank has all.
    """

    def __init__(self, slots: int, device: torch.device, cp: Group | None = None) -> None:
        self.slots, self.cp, self.capacity = slots, cp, 0
        self.layers: dict[int, list[torch.Tensor]] = {}  # each (slots, heads, capacity, channels)
        self.states: dict[int, list[torch.Tensor]] = {}  # of recurrences, (slots, ...), whatever the lengths
        self.derived: dict[int, torch.Tensor] = {}  # what a layer makes of its weights, which do not change meanwhile
        self.positions = torch.full((slots, 0), NOWHERE, device=device)

    def reserve(self, columns: int) -> None:
        """Grow the slots to at least ``columns`` columns."""
        if columns <= self.capacity:
            return
        # Half as much again: texts that grow token by token are copied a few times only.
        self.capacity = -(-max(columns, self.capacity * 3 // 2) // ROUNDED) * ROUNDED
        self.layers = {layer: [self._grown(x) for x in kept] for layer, kept in self.layers.items()}
        grown = self.positions.new_full((self.slots, self.capacity), NOWHERE)
        grown[:, : self.positions.shape[1]] = self.positions
        self.positions = grown

    def _grown(self, kept: torch.Tensor) -> torch.Tensor:
        # Zeros and not empty memory: masked values are multiplied by 0, and 0 x NaN is NaN.
        grown = kept.new_zeros(self.slots, kept.shape[1], self.capacity, kept.shape[3])
        grown[:, :, : kept.shape[2]] = kept
        return grown

    def copy(self, source: int, target: int, columns: int) -> None:
        """Copy the first ``columns`` of slot ``source``, and its recurrent states, to slot ``target``."""
        for kept in self.layers.values():
            for x in kept:
                x[target, :, :columns] = x[source, :, :columns]
        # A recurrent state has no columns: all of it is what the text has been so far.
        for states in self.states.values():
            for x in states:
                x[target] = x[source]
        # Read under context parallelism only.
        self.positions[target] = self.positions[source]

    def tensors(self, layer: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The cache's tensors, (slots, heads, capacity, channels), of a layer that keeps tensors ``like`` these,
        (tokens, heads, channels)."""
        if layer not in self.layers:
            # Made here, where the dtype and the heads of this rank are known; of zeros, as in
            # :meth:`_grown`.
            self.layers[layer] = [x.new_zeros(self.slots, x.shape[1], self.capacity, x.shape[2]) for x in like]
        return self.layers[layer]


@dataclass(eq=False)
class CacheView:
    """How one forward pass reads and writes the cache.

    Attributes:
        cache: of this rank.
        start: slot of the first row of the micro-batch; the others follow.
        columns: int64 (batch, length), where the tokens' keys are written to.
        keys: columns that the tokens see; 0: only each other, as in training, because they are the first of their text.
        last: int64 (rows,), numbers of the tokens among batch x length whose logits are wanted; None: of none. With cut
            sequences -1 stands for a token on another rank.
        layer: whose attention is computed now.
    """

    cache: KVCache
    start: int
    columns: torch.Tensor
    keys: int
    last: torch.Tensor | None
    layer: int = -1
    indices: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether this rank holds all keys of its texts, so that a token at least sees itself."""
        return self.cache.cp is None

    def laid_out(self, layout: TokenLayout, positions: torch.Tensor) -> TokenLayout:
        """The layout of the micro-batch, whose tokens stand at ``positions`` (batch, length) in their texts."""
        if not self.keys:
            return replace(layout, cache=self)
        rows = slice(self.start, self.start + layout.batch)
        # Without context parallelism column n holds token n of its text.
        known = torch.arange(self.keys, device=positions.device)[None]
        if not self.whole:
            known = self.cache.positions[rows, : self.keys]
        return replace(layout, cache=self, query_positions=positions, key_positions=known, key_length=self.keys)

    def append(self, *new: torch.Tensor) -> list[torch.Tensor]:
        """Write this layer's ``new`` tensors, (batch x length [+ padding], heads, channels); all that the tokens see,
        each (batch, heads, keys, channels)."""
        kept, batch = self.cache.tensors(self.layer, new), len(self.columns)
        for known, x in zip(kept, new, strict=True):
            # Rows after are padding of sequence parallelism, which has no place in the cache.
            rows = x[: self.columns.numel()].reshape(-1, x.shape[2])
            known.view(-1, x.shape[2]).index_copy_(0, self._lines(x.shape[1]), rows)
        return [x[self.start : self.start + batch, :, : self.keys] for x in kept]

    def states(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """States of this layer's recurrence for these texts, (batch, ...) each, shaped as ``like`` (1, ...); zeros for
        those that begin now."""
        known = self.cache.states.get(self.layer)
        if known is None:
            slots, device = self.cache.slots, self.columns.device
            known = [torch.zeros((slots, *x.shape[1:]), dtype=x.dtype, device=device) for x in like]
            self.cache.states[self.layer] = known
        rows = [x[self.start : self.start + len(self.columns)] for x in known]
        # ``keys`` 0: the texts begin here, and a former text's state is still in the slot.
        return rows if self.keys else [torch.zeros_like(x) for x in rows]

    def keep(self, *states: torch.Tensor) -> None:
        """Store the states after these tokens, instead of those that :meth:`states` returned."""
        for known, x in zip(self.cache.states[self.layer], states, strict=True):
            known[self.start : self.start + len(self.columns)] = x

    def _lines(self, heads: int) -> torch.Tensor:
        """int64 (batch x length x heads,): rows of a tensor of the cache with so many heads; once for all layers."""
        if heads not in self.indices:
            slots = torch.arange(self.start, self.start + len(self.columns), device=self.columns.device)
            # A cache tensor seen as (slots x heads x capacity, channels): one index for all heads of a token.
            lines = slots[:, None] * heads + torch.arange(heads, device=slots.device)  # (batch, heads)
            self.indices[heads] = (lines[:, None] * self.cache.capacity + self.columns[..., None]).flatten()
        return self.indices[heads]

    def attention(
        self,
        core: AttentionCore,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        """Attention as a core computes it, with keys and values kept: by ``core`` itself for tokens that see only each
        other."""
        keys, values = self.append(k, v)
        if not self.keys:
            return core(q, k, v, layout, spec, None, sinks)
        return self.attend(q, keys, values, layout, spec, sinks)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        """Attention of q (tokens, heads, head_dim) to kept keys and values, all of them."""
        # Over this rank's keys only; without context parallelism these are all.
        out, lse = _attend(q, k, v, layout, spec)
        cp = self.cache.cp
        if cp is not None:
            out, lse = _merged(out, lse, cp)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, spec: AttentionSpec) -> Pair:
    # Prompts: one call of the usual kernel with a mask.
    if layout.length > 1 or spec.changes_scores:
        return DEFAULT_ATTENTION(q, k, v, layout, spec)
    # One token of each text: the query heads of a key/value head become queries of it, so that there is one product for
    # all of them, and no key is repeated. Nothing is copied.
    (batch, groups, _, width), rows = k.shape, q.shape[0]
    operator = operator_for("flash" if q.device.type == "cpu" else "efficient", q.device)
    # Slots are filled to different lengths, so there is always a mask of positions.
    mask = layout.mask(spec.pattern(layout), q.dtype, q.device)
    assert mask is not None
    # (batch, groups, heads / groups, head_dim)
    queries, scale = q[:batch].unflatten(1, (groups, -1)), width**-0.5 if spec.scale is None else spec.scale
    queries, k, v = (widened(x, operator.multiple) for x in (queries, k, v))
    scores = Scores(False, mask.expand(-1, -1, queries.shape[2], -1), scale)
    out, lse = operator.forward(queries, k, v, scores)
    out, lse = out[..., :width].reshape(batch, -1, width), lse.reshape(batch, -1).t()  # (heads, batch)
    # Under context parallelism this rank may hold no key that a token sees: then it adds nothing.
    if not layout.sees_itself:
        blind = mask.isneginf().all(dim=-1).view(-1)  # (batch or 1,)
        out, lse = out.masked_fill(blind[:, None, None], 0.0), lse.masked_fill(blind, -torch.inf)
    return (out, lse) if rows == batch else (pad_rows(out, rows), F.pad(lse, (0, rows - batch), value=-torch.inf))


def _merged(out: torch.Tensor, lse: torch.Tensor, cp: Group) -> Pair:
    """Attention to the keys of all ranks, merged in the order of the ranks: the same bits on each."""
    outs = wait(start_all_gather(out.float()[None], cp), cp)
    # (cp, heads, tokens)
    sums = wait(start_all_gather(lse[None], cp), cp)
    whole, total = outs[0], sums[0]
    for part, its in zip(outs[1:], sums[1:], strict=True):
        whole, total = merge(whole, total, part, its)
    return whole.to(out.dtype), total
