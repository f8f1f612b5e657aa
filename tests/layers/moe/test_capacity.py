"""Which choices of experts fit into a capacity."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from smp.config import Layout
from smp.kernels.token_layout import TokenLayout
from smp.layers.moe import Experts, MoE, Router
from smp.layers.moe.capacity import Capacity, DropPolicy, _fitting, _rounded
from smp.layers.moe.dispatch import Dispatch
from tests.fake_group import fake_context

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


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.floats(0.1, 3.0), st.integers(0, 1000))
def test_padded_experts_compute_the_same(batch: int, length: int, factor: float, seed: int) -> None:
    generator, tokens = torch.Generator().manual_seed(seed), batch * length + 1
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:K] for _ in range(tokens)])
    drawn = [torch.rand(tokens, n, generator=generator, dtype=torch.float64) for n in (5, K)]
    capacity, layout = Capacity(factor, pad=True), TokenLayout(batch, length, padding=1)
    kept, slots = capacity.kept(experts, drawn[1], EXPERTS, layout), capacity.slots(K, EXPERTS, layout)
    assert slots is not None
    found = []
    for dispatch in (
        Dispatch.of(experts, EXPERTS, None, kept),
        Dispatch.to_slots(experts, EXPERTS, None, kept, slots),
    ):
        x, weights = (y.clone().requires_grad_() for y in drawn)
        rows = dispatch.to_experts(x)
        assert len(rows) == dispatch.counts.sum()
        y = dispatch.from_experts(rows.square() + 1, weights)  # a row of nothing gives something, which nobody takes
        found.append([y, *torch.autograd.grad(y.square().sum(), (x, weights))])
    assert dispatch.counts.tolist() == [slots] * EXPERTS
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_with_padding_no_host_waits_for_numbers_of_rows() -> None:
    """Fake tensors have no numbers to read."""
    with fake_context(Layout(dp_shard=2, ep=2)) as context, FakeTensorMode():
        router, experts = Router(6, EXPERTS, K, context), Experts(EXPERTS, 6, 4, context)
        x = torch.zeros(10, 6, requires_grad=True)
        for pad in (True, False):
            layer = MoE(router, experts, context, capacity=Capacity(1.0, pad=pad))
            run = partial(layer, x, layout=TokenLayout(2, 5))
            if not pad:
                with pytest.raises(DataDependentOutputException):
                    run()
                continue
            y, _ = run()
            y.sum().backward()
            assert y.shape == x.shape and x.grad is not None


def test_weights_that_differ_by_rounding_are_equal_and_the_first_counts() -> None:
    worth = torch.tensor([[0.3, 0.3, 0.29]])
    worth[0, 1] = torch.nextafter(worth[0, 1], torch.tensor(1.0))
    assert _rounded(worth)[0, 0] == _rounded(worth)[0, 1] > _rounded(worth)[0, 2]
    kept = _fitting(torch.zeros(1, 3, dtype=torch.int64), _rounded(worth), 1, 2)
    assert kept.tolist() == [[True, False, False]]
