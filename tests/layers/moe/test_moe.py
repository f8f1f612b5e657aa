"""Experts by themselves: what dispatch promises, whatever the routing, and the kernels under it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config import Layout
from smp.kernels.experts.grouped import add_rows_of_groups, grouped_product, grouped_products
from smp.kernels.experts.permute import (
    combine_backward,
    combine_backward_in_pieces,
    combine_rows,
    permute_rows,
    repeat_rows,
)
from smp.layers import init_weights
from smp.layers.moe import Counted, Experts, MoE, Router, Routing
from smp.layers.moe.dispatch import Dispatch
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context

HIDDEN, FFN, EXPERTS = 6, 4, 8


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, EXPERTS - 1), max_size=24))
def test_identity_experts_give_back_what_went_in(k: int, choices: list[int]) -> None:
    """Every token reaches exactly its k experts, any routing works, and no row is lost."""
    tokens = len(choices) // k
    chosen = torch.tensor(choices[: tokens * k], dtype=torch.int64).view(tokens, k)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    dispatch = Dispatch.of(chosen, EXPERTS, None)
    assert dispatch.counts.tolist() == [int((chosen == e).sum()) for e in range(EXPERTS)]
    rows = dispatch.to_experts(x)
    of_expert = torch.arange(EXPERTS).repeat_interleave(dispatch.counts)
    wanted = torch.cat([x[(chosen == e).nonzero()[:, 0]] for e in range(EXPERTS)])
    assert torch.equal(rows, wanted) and len(of_expert) == tokens * k
    weights = torch.rand(tokens, k, dtype=torch.float64)
    back = dispatch.from_experts(rows, weights)
    assert torch.allclose(back, x * weights.sum(1, keepdim=True), atol=1e-12)


def test_gradients_of_the_kernels() -> None:
    x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3), (4, 2, 3)))
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, torch.tensor([3, 0, 4, 0])), (x, w))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    inverse = order.argsort()
    tokens, rows = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 6))
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: repeat_rows(t, order, inverse, 2), (tokens,))
    assert torch.autograd.gradcheck(lambda r: permute_rows(r, order, inverse), (rows,))
    assert torch.autograd.gradcheck(lambda r, w: combine_rows(r, w, order, inverse), (rows, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_that_of_each_group(dtype: torch.dtype) -> None:
    x, w, counts = torch.randn(40, 32, dtype=dtype), torch.randn(5, 16, 32, dtype=dtype), [7, 0, 13, 20, 0]
    parts = [rows @ w[e].t() for e, rows in enumerate(x.split(counts))]
    assert torch.equal(grouped_product(x, w, torch.tensor(counts)), torch.cat(parts))


def layer(context: ParallelContext, **options: object) -> MoE:
    made = Router(HIDDEN, EXPERTS, 2, context, **options)  # type: ignore[arg-type]
    moe = MoE(made, Experts(EXPERTS, HIDDEN, FFN, context, init_std=0.5, output_std=0.5), context)
    init_weights(moe, seed=3)
    return moe


def test_rows_as_they_arrived_are_free_while_experts_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends an exchange has them, and experts get them sorted: both at once would be all rows twice."""
    arrived, free = list[weakref.ref[torch.Tensor]](), list[bool]()

    def send(dispatch: Dispatch, x: torch.Tensor, backend: str) -> Callable[[], torch.Tensor]:
        rows = repeat_rows(x, dispatch.order, dispatch.inverse, dispatch.k)
        arrived.append(weakref.ref(rows))
        return lambda: rows.clone()

    monkeypatch.setattr(Dispatch, "send", send)
    with fake_context() as context, torch.no_grad():
        moe = layer(context)
        compute = moe.experts.compute

        def computed(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            free.append(arrived[0]() is None)
            return compute(rows, counts)

        monkeypatch.setattr(moe.experts, "compute", computed)
        moe(torch.randn(5, HIDDEN))
    assert free == [True]


def test_equal_logits_go_to_the_lowest_numbers() -> None:
    with fake_context() as context:
        routing = layer(context).router(torch.zeros(3, HIDDEN))
    assert routing.experts.tolist() == [[0, 1]] * 3
    assert torch.equal(routing.weights, torch.full((3, 2), 0.5))


def test_weights_of_each_kind_of_router() -> None:
    x = torch.randn(9, HIDDEN)
    with fake_context() as context:
        for options, total in (
            ({}, 1.0),
            ({"scaling_factor": 2.5}, 2.5),
            ({"score_function": "sigmoid"}, 1.0),
            ({"pre_softmax": True}, None),
        ):
            routing = layer(context, **options).router(x)  # type: ignore[arg-type]
            sums = routing.weights.sum(-1)
            assert (sums < 1).all() if total is None else torch.allclose(sums, torch.full_like(sums, total))
            assert (routing.weights[:, 0] >= routing.weights[:, 1]).all()


def test_the_balance_is_least_where_loads_are_even() -> None:
    """1 with even loads and scores, the number of experts over k when all tokens go to the same; tokens of weight 0 do
    not count."""
    with fake_context() as context:
        router = layer(context).router
        weights = torch.full((8,), 1 / 4)
        weights[4:] = 0.0
        even = 20.0 * torch.eye(EXPERTS).view(4, 2, EXPERTS).sum(1).repeat(2, 1)
        even[4:, 0] += 100  # without weight
        for logits, expected, load in ((even, 1.0, 1.0), (even[:1].expand(8, -1), EXPERTS / 2, EXPERTS / 2)):
            routing = router(torch.zeros(8, HIDDEN))._replace(
                logits=logits, experts=logits.topk(2).indices, weights=torch.ones(8, 2)
            )
            found = router.balance(routing, Counted(weights, torch.zeros(EXPERTS, dtype=torch.int64))).measures
            assert found[0].item() == pytest.approx(expected) and found[2].item() == pytest.approx(load)


def test_the_bias_moves_towards_experts_with_few_tokens() -> None:
    with fake_context() as context:
        router = layer(context, score_function="sigmoid", bias_update_rate=0.5).router
        seen = torch.tensor([0, 1, 2, 2, 2, 3, 3, 3])
        router.update_bias(seen, torch.tensor(False))
        assert not router.expert_bias.any()
        router.update_bias(seen, torch.tensor(True))
        assert router.expert_bias.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, -0.5, -0.5, -0.5]
        routing = router(torch.zeros(1, HIDDEN))
        assert routing.experts.tolist() == [[0, 1]] and routing.weights.tolist() == [[0.5, 0.5]]


def test_experts_are_of_the_best_groups() -> None:
    """Of 4 groups the best by their two largest scores, although the largest of all lies in another."""
    with fake_context() as context:
        router = layer(context, score_function="sigmoid", num_groups=4, group_topk=1).router
        logits = torch.tensor([[5.0, -9.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
        kept = router._compared(logits)
        assert kept[0].isfinite().tolist() == [False, False, True, True, False, False, False, False]


def test_a_sequence_has_a_balance_of_its_own() -> None:
    """Two sequences, each of which sends all its tokens to two experts: even together, and not at all apart."""
    with fake_context() as context:
        logits = 20.0 * torch.eye(EXPERTS)[[0, 0, 2, 2]] + 19.0 * torch.eye(EXPERTS)[[1, 1, 3, 3]]
        found = {}
        for balancing in ("aux_loss", "seq_aux_loss"):
            router = layer(context, balancing=balancing).router
            routing = Routing(logits.topk(2).indices, torch.ones(4, 2), logits)
            seen, rows = torch.zeros(EXPERTS, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
            counted = Counted(torch.full((4,), 0.25), seen, rows, 2)
            found[balancing] = router.balance(routing, counted).measures[0].item()
        assert found["aux_loss"] == pytest.approx(EXPERTS / 4) and found["seq_aux_loss"] == pytest.approx(EXPERTS / 2)


def forced(rank: int, world: int) -> list[tuple[float, float]]:
    """Relative distances of outputs and input gradients from those of one rank, for routings that leave ranks without
    tokens; a rank may have no token at all."""
    spread, alone = build_context(Layout(dp_shard=world, ep=world), "cpu"), build_context(Layout(dp_shard=world), "cpu")
    moe, whole = layer(spread), layer(alone)
    found = []
    for experts in ([0, 1], [7, 0], [3, 3]):
        tokens = 0 if experts == [7, 0] and rank == 1 else 5 + rank
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(rank))
        results = []
        for one, ep in ((moe, spread.ep_group), (whole, None)):
            leaf = x.clone().requires_grad_()
            dispatch = Dispatch.of(torch.tensor(experts).expand(tokens, 2).contiguous(), EXPERTS, ep)
            rows = one.experts.compute(dispatch.to_experts(leaf), dispatch.counts)
            y = dispatch.from_experts(rows, torch.full((tokens, 2), 0.5))
            (y * y).sum().backward()
            assert leaf.grad is not None
            results.append((y.detach(), leaf.grad))
        (y, grad), (expected, expected_grad) = results
        found.append((_distance(y, expected), _distance(grad, expected_grad)))
    return found


def _distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def test_any_routing_works_on_spread_experts() -> None:
    for rank in run_distributed(forced, 2):
        assert max(max(pair) for pair in rank) < 1e-6


def test_what_cannot_be_spread_is_an_error() -> None:
    with fake_context(Layout(dp_shard=4, ep=4)) as context, pytest.raises(ValueError, match="expert-parallel size 4"):
        Experts(6, HIDDEN, FFN, context)
    with fake_context() as context, pytest.raises(ValueError, match="3 of 2 experts"):
        Router(HIDDEN, 2, 3, context)


def test_biases_of_experts_are_added_to_their_rows_and_get_the_sum_of_their_gradients() -> None:
    y, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3), (4, 3)))
    counts = torch.tensor([3, 0, 4, 0])
    assert torch.equal(add_rows_of_groups(y, bias, counts), y + bias[[0, 0, 0, 2, 2, 2, 2]])
    assert torch.autograd.gradcheck(lambda y, bias: add_rows_of_groups(y, bias, counts), (y, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_many_rows_do_not_notice_the_pieces_they_are_made_in(dtype: torch.dtype) -> None:
    k, tokens = 3, 700  # more than a piece, and no multiple of it
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(tokens * k, generator=generator)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    rows, grad = (torch.randn(n, 16, generator=generator).to(dtype) for n in (tokens * k, tokens))
    weights = torch.rand(tokens, k, generator=generator)
    whole = combine_backward(grad, rows, weights, order, inverse)
    pieces = combine_backward_in_pieces(grad, rows, weights, order, inverse)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    chosen = rows.double().index_select(0, inverse).view(tokens, k, -1)
    wanted = (chosen * weights[:, :, None].double()).sum(1)
    combined = combine_rows(rows, weights, order, inverse)
    assert combined.dtype == dtype
    torch.testing.assert_close(combined.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_the_gradient_of_rows_with_two_products_is_the_sum_of_both() -> None:
    counts = torch.tensor([3, 0, 4])
    x, *weights = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (3, 5, 4), (3, 5, 4))
    )
    assert torch.autograd.gradcheck(lambda x, *w: grouped_products(x, w, counts), (x, *weights))
