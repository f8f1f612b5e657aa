"""Context parallelism by all-gather: every rank collects all keys and values and computes its queries (Llama 3, arXiv
2407.21783, 3.3.2).

                    rank 0      rank 1      rank 2
    queries         0     5     1     4     2     3      chunks of the sequence
    keys            0 1 2 3 4 5 on each

A few key/value heads at a time, of which the next ones are on their way while the current ones are used, so memory for
keys does not grow with their number. Keys are gathered again in the backward pass; their gradients are summed over
ranks in fp32 and scattered. Bytes sent by each rank, kv = 2 x tokens x groups x head_dim x bytes of its own keys and
values: (cp - 1) kv in the forward, (cp - 1) (kv + kv in fp32) in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec, BlockCore, Pair
from smp.kernels.attention_cores.sinks import sinks_gradient
from smp.kernels.registry import first_derivative_only
from smp.kernels.token_layout import TokenLayout
from smp.kernels.transfer import to_device
from smp.layers.context_parallel.auto import heads_at_once
from smp.layers.context_parallel.blocks import Call, Planner, runs_of
from smp.layers.context_parallel.core import CutAttention
from smp.layers.context_parallel.partial import Layer, finished
from smp.layers.context_parallel.split_plan import Kind, kind_of
from smp.parallel.collectives import Group, start_all_gather, start_reduce_scatter, wait


@dataclass(frozen=True)
class AllGatherAttention(CutAttention):
    """An attention core over sequences that are cut over ``group``; see
    :mod:`smp.kernels.attention_cores.attention_core`.

    Attributes:
        core: computes blocks.
    """

    core: BlockCore

    def __str__(self) -> str:
        return f"{self.core}, keys and values gathered from {self.group.size} ranks"

    def plan(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> dict[Kind, tuple[Call, ...]]:
        """The layout with the calls of each pattern of layers."""
        assert layout.cut is not None, "whole sequences have no plan"
        cut = layout.cut
        planner = Planner(self.core, dtype, device, layout.token_index)
        queries, keys = runs_of(cut, self.group.rank), runs_of(cut, None)
        # Where each token of the sequences lies among what the ranks send, one after the other.
        order = to_device(cut.gathered_order(cut.cp).argsort(), device)
        plan = {}
        for kind in dict.fromkeys(kind_of(spec, cut) for spec in specs):
            calls = planner.calls(queries, keys, kind)
            # Calls number keys in the order of the sequences; gathered keys lie rank by rank.
            placed = (replace(call, keys=order if call.keys is None else order[call.keys]) for call in calls)
            plan[kind] = tuple(placed)
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
        calls = layout.plan[kind_of(spec, layout.cut)]
        rows, count = q.shape[0], layout.num_queries
        layer = Layer(self.core, spec, dropout_key)
        # Without the padding of sequence parallelism, which attention never sees.
        out, lse = _Gathered.apply(q[:count], k[:count], v[:count], sinks, calls, layer, self.group)
        return finished((out, lse), q, rows)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        calls: tuple[Call, ...],
        layer: Layer,
        group: Group,
    ) -> Pair:
        outs, log_sums = [], []
        # Some heads at a time; results lie side by side in the order of the heads.
        for part, keys, values in _gathered(q, k, v, layer, group):
            heads, one = part
            sums = one.attend(q[:, heads], keys, values, calls)
            out, lse = finished(sums, q[:, heads], q.shape[0], None if sinks is None else sinks[heads])
            outs.append(out)
            log_sums.append(lse)
        # (tokens, heads, head_dim) and (heads, tokens)
        out, lse = torch.cat(outs, 1), torch.cat(log_sums, 0)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.calls, ctx.layer, ctx.group = calls, layer, group
        # Nothing may differentiate the log-sum-exp; the gradient would be wrong, see ``partial``.
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dtype, group = lse.dtype, ctx.group
        grads, started = [], []
        for part, keys, values in _gathered(q, k, v, ctx.layer, group):
            heads, one = part
            given = dout[:, heads], q[:, heads], out[:, heads], lse[heads]
            # Zeros in fp32 to add to: a rank sees only some of the keys.
            empty = tuple(torch.zeros_like(x, dtype=dtype) for x in (q[:, heads], keys, values))
            dq, dk, dv = one.backward(given, keys, values, ctx.calls, empty)
            grads.append(dq.to(q.dtype))
            # Each rank has a part of the gradient of all keys. The sum goes on while the next heads are computed; it is
            # in fp32, so that it does not round once per rank.
            started.append(start_reduce_scatter(torch.stack((dk, dv), 1), group))  # (cp x tokens, 2, groups, head_dim)
        dkv = torch.cat([wait(x, group) for x in started], 2).to(k.dtype)
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks)
        return torch.cat(grads, 1), dkv[:, 0], dkv[:, 1], dsinks, None, None, None


def _gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, group: Group
) -> Iterator[tuple[tuple[slice, Layer], torch.Tensor, torch.Tensor]]:
    """Some query heads after the other: which, the layer of these alone, and all ranks' keys and values."""
    groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
    bytes_of_one = 2 * group.size * k.shape[0] * k.shape[2] * k.element_size()
    # Every rank computes the same number, so all post the same gathers.
    size = heads_at_once(groups, bytes_of_one)
    parts = [slice(i, min(i + size, groups)) for i in range(0, groups, size)]

    def start(part: slice) -> torch.Tensor:
        # Keys and values in one message.
        return start_all_gather(torch.stack((k[:, part], v[:, part]), 1), group)  # (cp x tokens, 2, groups, head_dim)

    coming = start(parts[0])
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        both = wait(coming, group)
        # Started before the caller computes with what is here.
        if following is not None:
            coming = start(following)
        heads = slice(part.start * repeats, part.stop * repeats)
        # Dropout and ALiBi know heads by their number in the whole model.
        spec = replace(layer.spec, first_head=layer.spec.first_head + heads.start)
        yield (heads, replace(layer, spec=spec)), both[:, 0], both[:, 1]
