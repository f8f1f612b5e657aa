"""Rows of tokens on their way to experts and back.

    tokens (T, h) -> sorted by expert (T k, h) -> all-to-all over ep -> sorted by this rank's experts (n, h)

With E experts on p ranks, rank i has experts i E/p to (i + 1) E/p - 1. Nothing is dropped: n is what the tokens of all
p ranks chose, any number from 0 to T k p. Every rank sends its T k rows but for those that stay, (p - 1) / p of them on
average, and gets as many results back; the backward pass does the same, so a layer moves

    4 T k h (p - 1) / p elements per rank and micro-batch, and half of that again under full recompute.

With p = 1 the host need not wait for the device: n is T k, and how many rows an expert has stays there, where products
read it (:mod:`smp.kernels.grouped`). With more ranks
it has to know how many rows go where, and waits for it once per layer: E integers from every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp.kernels.grouped import combine_rows, permute_rows, repeat_rows
from smp.parallel.collectives import Group, all_to_all, exchange_rows


@dataclass(frozen=True)
class Dispatch:
    """One way of the tokens of a rank to the experts of an expert-parallel group.

    Attributes:
        k: experts of a token.
        counts: rows of each expert of this rank, int64 on the device.
        order, inverse: the sort of this rank's rows by expert, and the way back.
        sent, received: rows to and from each rank.
        local_order, local_inverse: the sort of received rows by expert; None: they are.
        group: of expert parallelism; None: every rank has all experts.
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

    @staticmethod
    def of(experts: torch.Tensor, num_experts: int, group: Group | None) -> Dispatch:
        """Of the chosen experts, int64 (tokens, k). All ranks of ``group`` call it."""
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        inverse = _inverse(order)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if group is None or group.size == 1:
            return Dispatch(experts.shape[1], counts, order, inverse, [], [])
        incoming = all_to_all(counts, group)  # (experts,): for each rank, of each of this rank's experts
        table = torch.stack((counts, incoming)).view(2, group.size, -1).tolist()  # the host waits here
        sent, received = ([sum(row) for row in rows] for rows in table)
        own = num_experts // group.size
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
        )

    def to_experts(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, h) -> the rows of this rank's experts, (sum of counts, h), sorted by expert."""
        rows = repeat_rows(x, self.order, self.inverse, self.k)
        if self.group is None:
            return rows
        assert self.local_order is not None and self.local_inverse is not None
        rows = exchange_rows(rows, self.sent, self.received, self.group)
        return permute_rows(rows, self.local_order, self.local_inverse)

    def from_experts(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What experts made of these rows, back and summed by ``weights``, fp32 (tokens, k) -> (tokens, h)."""
        if self.group is not None:
            assert self.local_order is not None and self.local_inverse is not None
            rows = permute_rows(rows, self.local_inverse, self.local_order)
            rows = exchange_rows(rows, self.received, self.sent, self.group)
        return combine_rows(rows, weights, self.order, self.inverse)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
