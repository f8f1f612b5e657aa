"""Token needs of layers with a recurrence: where documents begin, at which states are reset, and, where sequences are
cut over context-parallel ranks, the plan of exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.token_layout import TokenLayout
from smp.kernels.transfer import to_device
from smp.layers.context_parallel.heads import WholePlan, whole_plan
from smp.layers.context_parallel.states import StatesPlan, states_plan
from smp.parallel.collectives import Group


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin among the tokens that a recurrence processes; tensors are (rows, length), the rows of the
    micro-batch or, with a ``plan``, those that it makes.

    Attributes:
        begins: bool, True at the first token of each document; None: every row is one document.
        positions: int64, number of earlier tokens of the same document; None: every row is one document.
        valid: bool, not padding after a prompt; None: all are.
        plan: of cut sequences; None: they are whole.
    """

    begins: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    plan: StatesPlan | WholePlan | None = None


@dataclass(frozen=True)
class DocumentsNeed:
    """See :class:`Documents`.

    Attributes:
        conv: tokens that the layer's convolution sees.
        cp: its ranks share the tokens of sequences that are cut.
        exchange: how context-parallel ranks share a sequence: they exchange states, or heads for tokens.
    """

    conv: int
    cp: Group | None = None
    exchange: Literal["states", "heads"] = "states"

    @property
    def key(self) -> str:
        # Without ``cp``, which is the same for all layers of a model.
        return f"documents, {self.conv} tokens, {self.exchange}"

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> Documents:
        assert layout.position_ids is not None, "a model gives them"
        device, shape = layout.position_ids.device, (layout.batch, layout.length)
        lengths = None
        if layout.cache is not None:
            lengths = sequence_lengths()[: layout.num_queries].view(shape)
        if layout.cut is not None:
            # In generation a row is one text, so all its tokens have the same length.
            return self._of_cut(layout.cut, device, None if lengths is None else lengths[:, :1])
        # Texts that are being written: one document a row, which may begin in the middle (a piece of a prompt).
        if lengths is not None:
            positions = layout.position_ids[: layout.num_queries].view(shape)
            # Padding after a short prompt must not write to its state.
            return Documents(positions=positions, valid=positions < lengths)
        if layout.document_ids is None:
            return Documents()
        return of_documents(to_device(layout.document_ids, device))

    def _of_cut(self, cut: SequenceCut, device: torch.device, lengths: torch.Tensor | None) -> Documents:
        """:class:`Documents` of sequences that are cut over ranks. With ``lengths`` (batch, 1), in generation,
        every rank processes whole prompts."""
        assert self.cp is not None, "who cuts sequences gives layers the ranks"
        if self.exchange == "states" and lengths is None:
            begins, positions, states = states_plan(cut, self.cp.rank, self.conv, device)
            return Documents(begins, positions, plan=states)
        found = Documents() if cut.document_ids is None else of_documents(to_device(cut.document_ids, device))
        # By heads, or for prompts: every rank goes through whole sequences.
        plan = whole_plan(cut, self.cp, device)
        if lengths is None:
            return Documents(found.begins, found.positions, plan=plan)
        positions = torch.arange(cut.length, device=device).expand(cut.batch, cut.length)
        return Documents(positions=positions, valid=positions < lengths, plan=plan)


def of_documents(ids: torch.Tensor) -> Documents:
    """Where documents begin, from each token's number of its document, (rows, length); a document lies in one piece."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    # Column of the latest beginning at or before each token.
    first = torch.where(begins, column, 0).cummax(1).values
    return Documents(begins, column - first)
