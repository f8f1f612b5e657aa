"""Which choices of experts fit into a capacity."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.kernels.token_layout import TokenLayout
from smp.layers.moe.capacity import Capacity, DropPolicy
from smp.layers.moe.dispatch import Dispatch

EXPERTS, K = 4, 2


@pytest.mark.parametrize("policy", ["probs", "position"])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.floats(0.1, 3.0), st.integers(0, 1000))
def test_an_expert_takes_the_best_of_each_sequence(
    policy: DropPolicy, batch: int, length: int, factor: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(batch * length + 1)])
    weights = torch.randint(0, 3, experts.shape, generator=generator) / 4  # many are equal
    kept = Capacity(factor, policy).kept(experts, weights, EXPERTS, TokenLayout(batch, length, padding=1))
    limit = math.ceil(factor * (length * K) / EXPERTS)
    for row in range(batch):
        for e in range(EXPERTS):
            mine = [(row * length + t, i) for t in range(length) for i in range(K) if experts[row * length + t, i] == e]
            if policy == "probs":
                mine.sort(key=lambda choice: -weights[choice].item())
            assert [bool(kept[choice]) for choice in mine] == [n < limit for n in range(len(mine))]
    assert not kept[-1].any()  # the padding


def test_a_dropped_choice_adds_nothing_and_gets_no_gradient() -> None:
    chosen, kept = torch.tensor([[0, 1], [0, 2], [1, 0]]), torch.tensor([[True, False], [False, False], [True, True]])
    x, weights = (torch.rand(3, n, dtype=torch.float64, requires_grad=True) for n in (5, 2))
    dispatch = Dispatch.of(chosen, EXPERTS, None, kept)
    assert dispatch.counts.tolist() == [2, 1, 0, 0]
    rows = dispatch.to_experts(x)
    assert torch.equal(rows, x[[0, 2, 2]])
    y = dispatch.from_experts(rows, weights)
    assert torch.allclose(y, x * (weights * kept).sum(1, keepdim=True))
    y.sum().backward()
    assert weights.grad is not None and x.grad is not None
    assert torch.equal(weights.grad != 0, kept) and not x.grad[1].any()
    nothing = Dispatch.of(chosen, EXPERTS, None, torch.zeros_like(kept))
    assert not nothing.from_experts(nothing.to_experts(x), weights).any()
