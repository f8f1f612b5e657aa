"""A bound on the tokens of an expert: the choices of a sequence that do not fit are dropped.

Of a sequence of S tokens with k experts each, every one of E experts takes at most

    ceil(factor S k / E)

choices: those with the largest weights (to 16 bits, of equal ones the first), or those of the first tokens. A dropped
choice adds nothing to its token; the weights of its other experts are unchanged. With ``pad`` every expert computes as
many rows as it may take, padded with zeros: numbers of rows then follow from the layout, and the host need not read
them from the device.

Megatron counts over the tokens that a rank computes at a time. Here the capacity is per sequence, so the dropped
choices do not depend on micro-batches and layouts. Where sequences are cut, ranks exchange their choices and weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from smp.kernels.token_layout import TokenLayout
from smp.kernels.transfer import to_device
from smp.parallel.collectives import Group, start_all_gather, wait

DropPolicy = Literal["probs", "position"]


@dataclass(frozen=True)
class Capacity:
    """How many choices of a sequence an expert takes, and which.

    Attributes:
        factor: 1: as many as at an even load.
        policy: ``probs``: those with the largest weights, of equal ones the first; ``position``: the first.
        group: the context-parallel ranks that hold parts of the same sequences; None: sequences are whole.
        pad: each expert computes as many rows as it may take.
    """

    factor: float
    policy: DropPolicy = "probs"
    group: Group | None = None
    pad: bool = False

    def limit(self, length: int, k: int, num_experts: int) -> int:
        """Choices that an expert takes of a sequence of ``length`` tokens with k experts each."""
        return math.ceil(self.factor * (length * k) / num_experts)

    def slots(self, k: int, num_experts: int, layout: TokenLayout) -> int | None:
        """Rows of each expert for the tokens of this rank if they are padded. Of a part of a sequence all may be on
        this rank, but each token chooses an expert once."""
        length = layout.length if layout.cut is None else layout.cut.length
        return layout.batch * min(self.limit(length, k, num_experts), layout.length) if self.pad else None

    @torch.no_grad()
    def kept(self, experts: torch.Tensor, weights: torch.Tensor, num_experts: int, layout: TokenLayout) -> torch.Tensor:
        """Which choices are not dropped, bool (tokens, k), of experts int64 and weights fp32 (tokens, k). All ranks of
        ``group`` call it. Rows that only pad are dropped."""
        count, k = layout.num_queries, experts.shape[1]
        chosen, worth, back = experts[:count], weights[:count], None
        if self.group is not None and layout.cut is not None:
            # Every rank decides for whole sequences, alike, and keeps the rows of its own tokens.
            order_of_all = to_device(layout.cut.gathered_order(self.group.size), experts.device)
            order = order_of_all.argsort()
            chosen, worth = (wait(start_all_gather(x, self.group), self.group)[order] for x in (chosen, worth))
            back = order_of_all[self.group.rank * count :][:count]
        chosen, worth = (x.reshape(layout.batch, -1) for x in (chosen, worth))  # (batch, S x k)
        limit = self.limit(chosen.shape[1] // k, k, num_experts)
        fitting = _fitting(chosen, _rounded(worth) if self.policy == "probs" else None, limit, num_experts).view(-1, k)
        # (tokens, k), this rank's tokens in its order
        fitting = fitting if back is None else fitting[back]
        return torch.cat((fitting, fitting.new_zeros(len(experts) - count, k)))


def _rounded(weights: torch.Tensor) -> torch.Tensor:
    """Positive weights to 16 bits of their mantissa. Tokens that see the same (first ones of a chunk, equal windows)
    have equal weights but for rounding, which differs between layouts. Rounded to fewer bits they are almost always
    equal (not where a weight lies within that rounding of the border of two values), and the first counts."""
    return (weights.float().view(torch.int32) + (1 << 6)) >> 7


def _fitting(experts: torch.Tensor, worth: torch.Tensor | None, limit: int, num_experts: int) -> torch.Tensor:
    """bool (rows, n): which choices are among the first ``limit`` of their expert in a row, by falling ``worth`` if it
    is given."""
    if worth is None:
        order = experts.argsort(dim=1, stable=True)
    else:
        # Two stable sorts: by worth, then by expert, so that each expert's choices lie together, best first.
        first = worth.argsort(dim=1, descending=True, stable=True)
        order = first.gather(1, experts.gather(1, first).argsort(dim=1, stable=True))
    counts = torch.zeros(len(experts), num_experts, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(1, experts, torch.ones_like(experts))
    starts = (counts.cumsum(1) - counts).gather(1, experts.gather(1, order))  # where each one's expert begins
    # Rank of each choice among those of its expert in the sequence.
    numbers = torch.arange(experts.shape[1], device=experts.device) - starts
    return torch.zeros_like(experts, dtype=torch.bool).scatter_(1, order, numbers < limit)
