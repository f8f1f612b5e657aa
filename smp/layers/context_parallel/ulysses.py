"""Context parallelism by an all-to-all over heads (DeepSpeed-Ulysses, arXiv 2309.14509).

    cp 2, 4 heads       rank 0            rank 1
    given               tokens 0 3        tokens 1 2        all heads
    computed            heads 0 1         heads 2 3         all tokens, in the order of the sequence

Any core then computes whole sequences, to the bits of one rank. Key/value heads that are fewer than the ranks are
repeated as often as needed. Bytes sent by each rank, of its own q = tokens x heads x head_dim x bytes and kv: in the
forward pass (cp - 1) / cp (2 q + kv) and the log-sum-exps, which travel with the output; without these in the backward
pass. With a core that is itself cut over ``rest``, cp ranks are groups of ``group.size``: each group has all tokens of
its members, and the groups exchange keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.config import ConfigError
from smp.kernels.attention_cores.attention_core import AttentionSpec, Pair, pad_rows
from smp.kernels.token_layout import TokenLayout
from smp.kernels.transfer import to_device
from smp.layers.context_parallel.core import CutAttention
from smp.layers.context_parallel.cost import key_copies
from smp.parallel.collectives import Group, all_to_all, start_all_gather, start_all_to_all, wait


@dataclass(frozen=True, eq=False)
class HeadsPlan:
    """The layout of a micro-batch after the all-to-all, shared by all layers.

    Attributes:
        layout: of the tokens of all ranks of the group.
        order: int64 (tokens of the group,): where each, in the order of its sequence, is among what the ranks send.
        back: its inverse.
    """

    layout: TokenLayout
    order: torch.Tensor
    back: torch.Tensor


@dataclass(frozen=True)
class UlyssesAttention(CutAttention):
    """An attention core over sequences that are cut over ``group``; see
    :mod:`smp.kernels.attention_cores.attention_core`.

    Attributes:
        core: computes all tokens of the group with some of the heads.
        group: the ranks that exchange heads for tokens, neighbours in the cut.
        rest, part: number of such groups, and which one this is; above 1 ``core`` exchanges keys between them.
    """

    rest: int = 1
    part: int = 0

    def __str__(self) -> str:
        return f"{self.core}, heads exchanged for tokens between {self.group.size} ranks"

    def plan(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> HeadsPlan:
        """The layout, with a plan that has the layout of all the group's tokens. With dropout the ranks exchange their
        token numbers."""
        assert layout.cut is not None, "whole sequences have no plan"
        group, cut = self.group, layout.cut
        # The cut that is left when a group of neighbours counts as one rank.
        merged = cut.merged(group.size)
        # Neighbours in the cut form a group, so together they have consecutive chunks of it.
        back = cut.gathered_order(group.size, self.part)
        order = to_device(back.argsort(), device)
        index = layout.token_index
        if index is not None:
            # Dropout is keyed by the token's number; this rank will compute tokens of all ranks of the group.
            index = wait(start_all_gather(index[: layout.num_queries], group), group)[order]
        alone = self.rest == 1
        # What the core computes: with ``rest`` groups it is a cut layout again, of fewer and larger parts.
        whole = TokenLayout(
            layout.batch,
            merged.local_length,
            token_index=index,
            document_ids=cut.document_ids if alone else None,
            cut=None if alone else merged,
        )
        whole = self.core.prepare(whole, specs, dtype, device)
        return HeadsPlan(whole, order, to_device(back, device))

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
        plan, size, rows, count = layout.plan, self.group.size, q.shape[0], layout.num_queries
        heads, copies = q.shape[1] // size, repeats_of_keys(q.shape[1], k.shape[1], size)
        # Dropout and ALiBi know heads by their number in the whole model.
        spec = replace(spec, first_head=spec.first_head + self.group.rank * heads)
        # Each query head has to find its key/value head on the rank that it goes to.
        k, v = (x if copies == 1 else x.repeat_interleave(copies, dim=1) for x in (k, v))
        parts = [x[:count].unflatten(1, (size, -1)) for x in (q, k, v)]  # (tokens, cp, heads / cp, head_dim)
        # All three in one exchange.
        sent = torch.cat(parts, 2).transpose(0, 1).flatten(0, 1)  # (cp x tokens, all three, head_dim)
        given = Permuted.apply(all_to_all(sent, self.group), plan.order, plan.back)
        q, k, v = given.split([part.shape[2] for part in parts], dim=1)
        # Those of the heads that this rank computes.
        sinks = None if sinks is None else sinks.unflatten(0, (size, -1))[self.group.rank]
        out, lse = self.core(q, k, v, plan.layout, spec, dropout_key, sinks)
        out, lse = _TokensBack.apply(out, lse, plan, self.group)
        padding = rows - count
        return pad_rows(out, rows), torch.nn.functional.pad(lse, (0, padding), value=-torch.inf) if padding else lse


def repeats_of_keys(heads: int, groups: int, ranks: int) -> int:
    """How often each key/value head is repeated so that ``ranks`` can share them.

    Raises:
        ConfigError: they cannot share the query heads.
    """
    if heads % ranks:
        raise ConfigError(
            f"--cp-comm-type a2a shares {heads} heads (per tensor-parallel rank) between {ranks} ranks: not divisible; "
            "p2p and all_gather take any number"
        )
    return key_copies(heads, groups, ranks)


class Permuted(torch.autograd.Function):
    """Rows in another order. (The gradient of an index would be a sum: slow, and on a GPU not deterministic.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back], None, None


class _TokensBack(torch.autograd.Function):
    """out and lse of all tokens and some heads -> of this rank's tokens and all heads."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, lse: torch.Tensor, plan: HeadsPlan, group: Group) -> Pair:
        ctx.plan, ctx.group = plan, group
        width = out.shape[2]
        numbers = lse.t().contiguous()[..., None].view(out.dtype)  # bits of fp32 as one number, or as two of 16 bits
        # The log-sum-exp travels as extra channels of the output: one exchange.
        # (tokens of all ranks, heads / cp, head_dim + 1 or 2), in the order in which the ranks hold them
        both = torch.cat((out, numbers), 2)[plan.back]
        both = wait(start_all_to_all(both, group), group)  # (cp x tokens, heads / cp, head_dim + 1 or 2)
        both = both.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)  # (tokens, heads, ...)
        lse = both[..., width:].contiguous().view(lse.dtype)[..., 0].t()
        ctx.mark_non_differentiable(lse)
        return both[..., :width].contiguous(), lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group = ctx.group
        # The same way back, without the log-sum-exp, which has no gradient.
        grad = grad.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)  # (cp x tokens, heads / cp, head_dim)
        return wait(start_all_to_all(grad, group), group)[ctx.plan.order], None, None, None
