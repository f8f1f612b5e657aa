"""Context parallelism by a ring: keys and values go round, each rank computes its queries with those that it has (Liu
et al., arXiv 2310.01889; zig-zag as in Transformer Engine).

    cp 3        rank 0: 0 5     rank 1: 1 4     rank 2: 2 3      chunks of the sequence, queries as keys
    step 0      keys of 0       keys of 1       keys of 2        own: causal
    step 1      keys of 2       keys of 0       keys of 1        of a rank before: all queries, its first chunk;
    step 2      keys of 1       keys of 2       keys of 0        of a rank behind: last queries, both its chunks

The keys of the next step are on the way while those of this one are used. The ring ends with the last step in which a
rank has something to see, which is early where documents stay whole. In the backward pass keys go round again, and
their gradients follow them, one step behind, in fp32; half of a rank's own block is left for the time in which they
come home. Bytes sent by each rank, of h steps (cp - 1, or fewer), with
kv = 2 x tokens x groups x head_dim x bytes of its own keys and values: h kv in the forward, h (kv + kv in fp32) in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec, BlockCore, Pair
from smp.kernels.attention_cores.sinks import sinks_gradient
from smp.kernels.registry import first_derivative_only
from smp.kernels.token_layout import TokenLayout
from smp.layers.context_parallel.blocks import Call, Planner, halves_of, last_step, runs_of
from smp.layers.context_parallel.core import CutAttention
from smp.layers.context_parallel.partial import Layer, finished
from smp.layers.context_parallel.split_plan import Kind, kind_of
from smp.parallel.collectives import Group, start_shift, wait

Steps = tuple[tuple[Call, ...], ...]


@dataclass(frozen=True)
class RingAttention(CutAttention):
    """An attention core over sequences that are cut over ``group``; see
    :mod:`smp.kernels.attention_cores.attention_core`.

    Attributes:
        core: computes blocks.
    """

    core: BlockCore

    def __str__(self) -> str:
        return f"{self.core}, keys and values in a ring of {self.group.size} ranks"

    def plan(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> dict[Kind, Steps]:
        """The layout with the calls of each step, for each kind of layers."""
        assert layout.cut is not None, "whole sequences have no plan"
        group, cut = self.group, layout.cut
        planner, runs = Planner(self.core, dtype, device, layout.token_index), {}
        for rank in range(group.size):
            # Of all ranks: who sends what follows from the cut alone, and all plan alike.
            runs[rank] = runs_of(cut, rank)
        plan = {}
        for kind in dict.fromkeys(kind_of(spec, cut) for spec in specs):
            # In step s the keys of the rank s before this one are here.
            sources = [(group.rank - step) % group.size for step in range(last_step(runs, kind[0]) + 1)]
            first, *others = (planner.calls(runs[group.rank], runs[source], kind) for source in sources)
            if others and len(first) == 1:  # the backward pass computes a part while its last message is on the way
                halves = [half for run in runs[group.rank] for half in halves_of(run)]
                first = planner.calls(halves, halves, kind)
            plan[kind] = (first, *others)
        return plan

    def exchange(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> Pair:
        assert layout.cut is not None, "whole sequences do not come here"
        steps = layout.plan[kind_of(spec, layout.cut)]
        rows, count, layer = q.shape[0], layout.num_queries, Layer(self.core, spec, dropout_key)
        # Without the padding of sequence parallelism, which attention never sees.
        return finished(_Ring.apply(q[:count], k[:count], v[:count], sinks, steps, layer, self.group), q, rows)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        steps: Steps,
        layer: Layer,
        group: Group,
    ) -> Pair:
        sums = None
        # Merged step by step: at most the keys of one other rank are in memory.
        for calls, keys, values in _round(k, v, steps, group):
            sums = layer.attend(q, keys, values, calls, sums)
        out, lse = finished(sums, q, q.shape[0], sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.steps, ctx.layer, ctx.group = steps, layer, group
        # Its gradient would be wrong, see ``partial``.
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dtype, group, last = lse.dtype, ctx.group, len(ctx.steps) - 1
        # Half of the own block is computed first and half last, each while a message travels.
        early, late = _halves(ctx.steps[0])
        given, coming = (dout, q, out, lse), None
        own = tuple(torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for step, (calls, keys, values) in enumerate(_round(k, v, (early, *ctx.steps[1:]), group)):
            if step == 0:
                own = ctx.layer.backward(given, keys, values, calls, own)
                continue
            # These gradients travel on with the keys; the query's stays here.
            empty = (torch.zeros_like(x, dtype=dtype) for x in (keys, values))
            dq, *grads = ctx.layer.backward(given, keys, values, calls, (own[0], *empty))
            own, dkv = (dq, *own[1:]), torch.stack(grads)
            if coming is not None:
                dkv += wait(coming, group)  # what the ranks before found for the same keys
            coming = start_shift(dkv, group, 1 if step < last else -last)  # with the keys; at last to their owner
        # While the gradients of this rank's keys are on their way home.
        dq, dk, dv = ctx.layer.backward(given, k, v, late, own)
        if coming is not None:
            dk, dv = (x + y for x, y in zip((dk, dv), wait(coming, group), strict=True))
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _halves(calls: tuple[Call, ...]) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """About as much work in each; of two calls or more neither has none."""
    total, done, cut = sum(call.pairs for call in calls), 0, 0
    for call in calls[:-1]:
        # A call whose middle lies beyond half of the work goes to the second part; the first call never does.
        if cut and 2 * done + call.pairs > total:
            break
        done, cut = done + call.pairs, cut + 1
    return calls[: max(cut, 1)], calls[max(cut, 1) :]


def _round(
    k: torch.Tensor, v: torch.Tensor, steps: Steps, group: Group
) -> Iterator[tuple[tuple[Call, ...], torch.Tensor, torch.Tensor]]:
    """The calls, keys and values of each step; those of the next are on the way meanwhile."""
    # One message for keys and values.
    both = torch.stack((k, v))  # (2, tokens, groups, head_dim)
    for step, calls in enumerate(steps):
        coming = start_shift(both, group, 1) if step + 1 < len(steps) else both
        # The shift was started before: it runs while the caller computes.
        yield calls, both[0], both[1]
        # After the last step nothing is under way, and ``wait`` returns the tensor as it is.
        both = wait(coming, group)
