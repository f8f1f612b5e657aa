"""Whole sequences for layers with a recurrence, where sequences are cut over ranks: by an all-to-all, after which a
rank has some of the heads, or by an all-gather of all heads, for prompts, whose states every rank keeps.

Bytes sent by each rank, of its tokens x all channels that go there and back: (cp - 1) / cp of them each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.transfer import to_device
from smp.layers.context_parallel.ulysses import Permuted
from smp.parallel.collectives import Group, all_to_all, gather_rows


@dataclass(frozen=True, eq=False)
class WholePlan:
    """The order of all ranks' tokens in their sequences.

    Attributes:
        cp: the ranks.
        batch: number of sequences.
        order: int64 (tokens of all ranks,): where each, in the order of its sequence, is among what the ranks send.
        back: its inverse.
    """

    cp: Group
    batch: int
    order: torch.Tensor
    back: torch.Tensor

    def to_heads(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole sequences of (batch, length / cp, channels) tensors, with this rank's share of the channels of each:
        (batch, length, channels / cp). All in one exchange."""
        size = self.cp.size
        shares = [part.flatten(0, 1).unflatten(1, (size, -1)) for part in parts]  # (tokens, cp, channels / cp)
        sent = torch.cat(shares, 2).transpose(0, 1).flatten(0, 1)  # (cp x tokens, channels / cp of all)
        # (tokens of all ranks, channels / cp of all), rank by rank -> in the order of the sequences
        whole = Permuted.apply(all_to_all(sent, self.cp), self.order, self.back)
        widths = [share.shape[2] for share in shares]
        return [x.unflatten(0, (self.batch, -1)) for x in whole.split(widths, dim=1)]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The way back, (batch, length, heads / cp, channels) -> (batch, length / cp, heads, channels)."""
        # (tokens of all ranks, heads / cp, channels), in the order in which the ranks hold them
        sent = Permuted.apply(x.flatten(0, 1), self.back, self.order)
        given = all_to_all(sent, self.cp).unflatten(0, (self.cp.size, -1))  # (cp, tokens, heads / cp, channels)
        return given.transpose(0, 1).flatten(1, 2).unflatten(0, (self.batch, -1))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length / cp, ...) -> (batch, length, ...), all of it on every rank."""
        return gather_rows(x.flatten(0, 1), self.cp)[self.order].unflatten(0, (self.batch, -1))

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of what all ranks have computed."""
        rows = self.back.shape[0] // self.cp.size
        mine = self.back.narrow(0, self.cp.rank * rows, rows)
        return x.flatten(0, 1)[mine].unflatten(0, (self.batch, -1))


def whole_plan(cut: SequenceCut, cp: Group, device: torch.device) -> WholePlan:
    """The plan of a cut over ``cp``."""
    back = cut.gathered_order(cp.size)
    return WholePlan(cp, cut.batch, to_device(back.argsort(), device), to_device(back, device))
