"""Recurrences over sequences that are cut: every rank's pieces, one after the other in one process, are the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from smp.kernels.recurrences.causal_conv import causal_conv
from smp.kernels.recurrences.chunks import Inputs
from smp.kernels.recurrences.delta_rule import step_by_step
from smp.kernels.sequence_cut import SequenceCut, cut_sequences
from smp.layers.context_parallel import states
from smp.layers.context_parallel.states import StatesPlan, states_plan
from smp.layers.recurrences.documents import of_documents
from smp.parallel.collectives import Group

BATCH, HEADS, KEY, VALUE, CONV = 2, 2, 3, 4, 4
CPU = torch.device("cpu")


class Ranks:
    """Stands for the all-gather: of a first round it remembers what ranks send, which the second one gives to all."""

    def __init__(self, cp: int) -> None:
        self.cp, self.sent = cp, list[list[torch.Tensor]]()

    def __call__(self, x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
        """The same calls in the same order on every rank."""
        if len(self.sent) == self.calls:
            self.sent.append([])
        if len(self.sent[self.calls]) < self.cp:
            self.sent[self.calls].append(x)
        found = self.sent[self.calls]
        self.calls += 1
        whole = torch.cat([*found, *(torch.zeros_like(x) for _ in range(self.cp - len(found)))])
        return lambda: whole

    calls = 0


def drawn(length: int) -> list[torch.Tensor]:
    """Tokens before the convolution, queries, keys, g and rates of whole sequences."""
    made = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, length, *shape, generator=made, dtype=torch.float64)

    return [
        normal(HEADS * VALUE),
        normal(HEADS, KEY),
        normal(HEADS, KEY),
        -normal(HEADS).abs(),
        normal(HEADS).sigmoid(),
    ]


def conv_weight() -> torch.Tensor:
    return torch.randn(HEADS * VALUE, CONV, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def whole(tensors: list[torch.Tensor], documents: torch.Tensor | None) -> torch.Tensor:
    mixed, q, k, g, beta = tensors
    begins = places = None
    if documents is not None:
        found = of_documents(documents)
        begins, places = found.begins, found.positions
    v = causal_conv(mixed, conv_weight(), None, places).unflatten(2, (HEADS, VALUE))
    return step_by_step(Inputs(q, k, v, g, beta, begins))[0]


def of_rank(
    tensors: list[torch.Tensor], found: tuple[torch.Tensor, torch.Tensor, StatesPlan], cp: Group
) -> torch.Tensor:
    """As :class:`smp.layers.GatedDeltaNet` does it."""
    begins, places, plan = found
    mixed, q, k, g, beta = (plan.to_rows(x) for x in tensors)
    v = causal_conv(mixed, conv_weight(), plan.tokens_before(mixed, cp), places).unflatten(2, (HEADS, VALUE))
    first = torch.cat((torch.zeros(KEY, VALUE), torch.eye(KEY)), 1).double().expand(len(v), HEADS, -1, -1)
    both, maps = step_by_step(Inputs(q, k, torch.nn.functional.pad(v, (0, KEY)), g, beta, begins), first)
    out, factor = both.split((VALUE, KEY), dim=3)
    before = plan.start_states_before(*maps.split((VALUE, KEY), dim=3), cp)()
    return plan.to_tokens(out + torch.einsum("rlhk,rhkv->rlhv", factor, before), BATCH)


def check(cut: SequenceCut, documents: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, cp, gather = drawn(cut.length), cut.cp, Ranks(cut.cp)
    monkeypatch.setattr(states, "start_gather", gather)
    want, rows = whole(tensors, documents), torch.arange(BATCH)[:, None]
    plans = [states_plan(cut, rank, CONV, CPU) for rank in range(cp)]
    assert len({(plan.rows, plan.length) for *_, plan in plans}) == 1, "an all-gather takes equal parts"
    for last in (False, False, True):  # tails first, then maps, which depend on them
        if not last:
            gather.sent = gather.sent[:1] if gather.sent else []
        for rank, found in enumerate(plans):
            gather.calls, index = 0, cut.index(rank)
            got = of_rank([x[rows, index] for x in tensors], found, Group("cp", cp, rank))
            if last:
                assert (got - want[rows, index]).norm() <= 1e-12 * want.norm(), rank


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_zig_zag_pieces_are_the_whole(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = cut_sequences(BATCH, 24, cp)
    check(cut, None, monkeypatch)
    assert states_plan(cut, 0, CONV, CPU)[2].rows == BATCH * 2  # the last piece of one rank and the first are two


@pytest.mark.parametrize("seed", range(6))
def test_documents_of_any_lengths_are_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also shorter than what the convolution sees, in pieces of a token."""
    cp, made = 2 + seed % 3, torch.Generator().manual_seed(seed)
    ends = torch.rand(BATCH, 24, generator=made) < (0.05, 0.2, 0.6)[seed % 3]
    documents = ends.long().cumsum(1)
    check(cut_sequences(BATCH, 24, cp, documents), documents, monkeypatch)
