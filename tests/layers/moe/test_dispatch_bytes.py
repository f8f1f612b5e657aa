"""What experts on several processes send, counted where it leaves the process, against the formula of docs/moe.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from smp.config import Layout
from smp.layers.moe import MoE, Routing
from smp.parallel import collectives
from smp.parallel.context import build_context
from tests.distributed import run_distributed
from tests.layers.moe.test_moe import EXPERTS, HIDDEN, layer

TOKENS, K = 12, 2


class Wire:
    """In place of torch's collectives: notes the bytes that each all-to-all sends to other ranks, by dtype."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ops = rank, collectives._ops
        self.sent: dict[torch.dtype, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def all_to_all_single(self, x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        rows = sum(sent) - sent[self.rank]
        self.sent[x.dtype] = self.sent.get(x.dtype, 0) + rows * x[:1].numel() * x.element_size()
        return self.ops.all_to_all_single(x, received, sent, group)


def step(moe: MoE, recompute: bool) -> None:
    """Forward and backward."""
    x = torch.randn(TOKENS, HIDDEN).requires_grad_()
    y = checkpoint(lambda t: moe(t)[0], x, use_reentrant=False) if recompute else moe(x)[0]
    y.square().sum().backward()


def sent_bytes(rank: int, world: int, even: bool, recompute: bool) -> tuple[int, int, int]:
    """Of rows, of counts, and the choices of this rank's tokens that lie elsewhere."""
    torch.manual_seed(rank)
    context = build_context(Layout(dp_shard=world, ep=world), "cpu")
    moe, own, elsewhere = layer(context), EXPERTS // world, []
    routed = moe.router.forward

    def forward(x: torch.Tensor, layout: object = None) -> Routing:
        found = routed(x)
        if even:  # one expert of each token on either rank
            found = found._replace(experts=torch.tensor([1, own + 1]).expand(TOKENS, K).contiguous())
        elsewhere.append(int((found.experts // own != rank).sum()))
        return found

    moe.router.forward = forward  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        wire = Wire(rank)
        patch.setattr(collectives, "_ops", wire)
        step(moe, recompute)
    return wire.sent[torch.float32], wire.sent[torch.int64], elsewhere[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_bytes_are_those_of_the_formula(recompute: bool) -> None:
    ep, passes = 2, 6 if recompute else 4
    elements = passes * TOKENS * K * HIDDEN * (ep - 1) // ep
    for rows, counts, _ in run_distributed(sent_bytes, ep, True, recompute):
        assert rows == 4 * elements
        assert counts == (1 + recompute) * 8 * EXPERTS * (ep - 1) // ep


def test_any_routing_sends_each_choice_that_lies_elsewhere_there_and_back() -> None:
    (rows, _, mine), (others_rows, _, others) = run_distributed(sent_bytes, 2, False, False)
    assert mine != others
    # in each pass a rank sends its own choices that lie elsewhere, and the results of the other's
    assert rows == others_rows == 4 * 2 * (mine + others) * HIDDEN
