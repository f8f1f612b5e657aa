"""Rows of tokens on their way to experts and back.

    tokens (T, h) -> sorted by expert (T k, h) -> all-to-all over ep -> sorted by this rank's experts (n, h)

With E experts on p ranks, rank i has experts i E/p to (i + 1) E/p - 1. Nothing is dropped but by a capacity (see
``capacity.py``): n is what the tokens of all p ranks chose, any number from 0 to T k p. Every rank sends its T k rows
but for those that stay, (p - 1) / p of them on average, and gets as many results back; the backward pass does the same,
so a layer moves

    4 T k h (p - 1) / p elements per rank and micro-batch, and half of that again under full recompute.

With p = 1 the host need not wait for the device: n is T k, and how many rows an expert has stays there, where products
read it (:mod:`smp.kernels.experts.grouped`). With more ranks
it has to know how many rows go where, and waits for it once per layer: E integers from every rank. With experts that
are padded to a capacity it knows, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.experts.permute import combine_rows, permute_rows, repeat_rows
from smp.parallel.collectives import Group, all_to_all, start_exchange

ReadCounts = Callable[[torch.Tensor, int], Any]
"""(counts, this rank's rows) -> the counts as lists; the host waits there."""


def read_counts(counts: torch.Tensor, rows: int) -> Any:
    """Copy the device's counts to the host."""
    return counts.tolist()


@dataclass(frozen=True)
class Dispatch:
    """Sends the tokens of a rank to the experts of its expert-parallel group, and their results back.

    Attributes:
        k: experts of a token.
        counts: rows of each expert of this rank, int64 on the device.
        order, inverse: the sort of this rank's rows by expert, and the way back.
        sent, received: rows to and from each rank.
        local_order, local_inverse: the sort of received rows by expert; None: they are sorted.
        group: of expert parallelism; None: every rank has all experts.
        sent_rows: number of choices that are kept, with a capacity; ``order`` then has one more entry, a row of zeros
            for all dropped choices. None: nothing is dropped.
        padded: each expert's rows are padded with copies of one extra last token, of zeros and of weight 0.
    """

    k: int
    counts: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    sent: list[int]
    received: list[int]
    local_order: torch.Tensor | None = None
    local_inverse: torch.Tensor | None = None
    group: Group | None = None
    sent_rows: int | None = None
    padded: bool = False

    @staticmethod
    def to_slots(
        experts: torch.Tensor, num_experts: int, group: Group | None, kept: torch.Tensor, slots: int
    ) -> Dispatch:
        """The dispatch where each expert gets ``slots`` rows of this rank, as many as are kept or more; otherwise as
        :meth:`of`. Numbers of rows are known, and the host waits for nothing."""
        k, rows = experts.shape[1], num_experts * slots
        # Dropped choices go to an expert after the last one, and so to the end of the sort.
        chosen = experts.masked_fill(~kept, num_experts).flatten()
        first = chosen.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
        counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        of_row = chosen.index_select(0, first)
        # Number of each row among those of its expert.
        nth = torch.arange(len(chosen), device=chosen.device) - (counts.cumsum(0) - counts).index_select(0, of_row)
        slot = (of_row * slots + nth).clamp(max=rows)  # what is dropped: after all
        # Empty slots point after the last token's choices: at the row of zeros that ``send`` pads.
        order = torch.full((rows + 1,), len(chosen), dtype=torch.int64, device=chosen.device)
        order.scatter_(0, slot, first)[rows:].fill_(len(chosen))
        # The k choices of the padded token of zeros: all at the row after the slots.
        inverse = F.pad(torch.empty_like(slot).scatter_(0, first, slot), (0, k), value=rows)
        ranks = 1 if group is None else group.size
        own = num_experts // ranks
        received = torch.full((own,), ranks * slots, dtype=torch.int64, device=chosen.device)
        if group is None or group.size == 1:
            return Dispatch(k, received, order, inverse, [], [], sent_rows=rows, padded=True)
        each = [own * slots] * ranks
        # Rows come rank by rank; experts want theirs together.
        local = torch.arange(rows, device=chosen.device).view(ranks, own, slots).transpose(0, 1).flatten()
        return Dispatch(
            k, received, order, inverse, each, each, local, _inverse(local), group, sent_rows=rows, padded=True
        )

    @staticmethod
    def of(
        experts: torch.Tensor,
        num_experts: int,
        group: Group | None,
        kept: torch.Tensor | None = None,
        read: ReadCounts = read_counts,
    ) -> Dispatch:
        """The dispatch for the chosen experts, int64 (tokens, k). ``kept``: which choices are not dropped, bool
        (tokens, k); None: all. All ranks of ``group`` call it. ``read`` brings counts to the host."""
        chosen = (experts if kept is None else experts.masked_fill(~kept, num_experts)).flatten()
        order = chosen.argsort(stable=True)  # what is dropped comes last
        inverse = _inverse(order)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
        counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:num_experts]
        rows = None
        if kept is not None and len(chosen):
            # How many choices are kept: a size, so the host has to know it.
            rows = sum(read(counts, len(chosen)))
            # All dropped choices share one more row, of zeros, after the kept ones.
            order, inverse = torch.cat((order[:rows], order[:1])), inverse.clamp(max=rows)
        if group is None or group.size == 1:
            return Dispatch(experts.shape[1], counts, order, inverse, [], [], sent_rows=rows)
        incoming = all_to_all(counts, group)  # (experts,): for each rank, of each of this rank's experts
        # Here the host waits for the device: sizes of the exchange are Python numbers.
        table = read(torch.stack((counts, incoming)).view(2, group.size, -1), len(chosen) if rows is None else rows)
        # Rows to and from each rank: sums over the experts that it has.
        sent, received = ([sum(row) for row in rows] for rows in table)
        own = num_experts // group.size
        # Received rows come rank by rank, each rank's sorted by expert.
        kinds = torch.arange(own, device=chosen.device).repeat(group.size)
        kinds = kinds.repeat_interleave(incoming, output_size=sum(received))  # the expert of each received row
        local_order = kinds.argsort(stable=True)
        return Dispatch(
            experts.shape[1],
            incoming.view(group.size, own).sum(0),
            order,
            inverse,
            sent,
            received,
            local_order,
            _inverse(local_order),
            group,
            rows,
        )

    def to_experts(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, h) -> the rows of this rank's experts, (sum of counts, h), sorted by expert."""
        return self.send(x)()

    def send(self, x: torch.Tensor, backend: str = "torch") -> Callable[[], torch.Tensor]:
        """Begin :meth:`to_experts`, with rows moved by ``backend``, torch or triton; what is returned ends it. Rows
        travel while something else is computed in between, and gradients during its backward pass."""
        x = F.pad(x, (0, 0, 0, 1)) if self.padded else x
        # (tokens x k, h), sorted by expert
        rows = repeat_rows(x, self.order, self.inverse, self.k, backend)
        rows = rows if self.sent_rows is None else rows[: self.sent_rows]
        if self.group is None:
            return lambda: rows
        assert self.local_order is not None and self.local_inverse is not None
        order, inverse = self.local_order, self.local_inverse
        receive = start_exchange(rows, self.sent, self.received, self.group)
        return lambda: permute_rows(receive(), order, inverse, backend)

    def from_experts(self, rows: torch.Tensor, weights: torch.Tensor, backend: str = "torch") -> torch.Tensor:
        """Send the experts' results back and sum them by ``weights``, fp32 (tokens, k): -> (tokens, h)."""
        if self.group is not None:
            assert self.local_order is not None and self.local_inverse is not None
            rows = permute_rows(rows, self.local_inverse, self.local_order, backend)
            rows = start_exchange(rows, self.received, self.sent, self.group)()
        rows = rows if self.sent_rows is None else F.pad(rows, (0, 0, 0, 1))
        if self.padded:
            return combine_rows(rows, F.pad(weights, (0, 0, 0, 1)), self.order, self.inverse, backend)[:-1]
        return combine_rows(rows, weights, self.order, self.inverse, backend)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
