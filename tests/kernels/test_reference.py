"""The PyTorch versions: against their definition, and their gradients against differences, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from smp.kernels import norm, rope, swiglu
from smp.kernels.cross_entropy import combine_stats, softmax_stats
from smp.kernels.experts import router
from smp.kernels.weight_gradient import accumulate_weight_gradient
from smp.layers import IGNORE_INDEX
from smp.layers.heads.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from smp.parallel.collectives import Group

ALONE = Group("", 1, 0)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return draw(*shape, seed=seed).requires_grad_()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_norms_are_their_formulas() -> None:
    x, added, weight, bias = leaf(5, 7, seed=0), leaf(5, 7, seed=1), leaf(7, seed=2), leaf(7, seed=3)

    def rms(t: torch.Tensor) -> torch.Tensor:
        return t / (t.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * weight

    def layer(t: torch.Tensor) -> torch.Tensor:
        return (t - t.mean(-1, keepdim=True)) / (t.var(-1, unbiased=False, keepdim=True) + 0.1).sqrt() * weight + bias

    close(norm._Norm.apply(x, None, weight, None, 0.1, "torch")[0], rms(x))
    close(norm._Norm.apply(x, None, weight, bias, 0.1, "torch")[0], layer(x))
    y, total = norm._Norm.apply(x, added, weight, None, 0.1, "torch")
    close(y, rms(x + added))
    close(total, x + added)
    for function in (norm.norm(x, weight, None, 0.1), norm.add_norm(x, 0 * added, weight, None, 0.1)[0]):
        close(function, rms(x))
    for function in (norm.norm(x, weight, bias, 0.1), norm.add_norm(x, 0 * added, weight, bias, 0.1)[0]):
        close(function, layer(x))


def test_what_fsdp_gathers_around_returns_no_view() -> None:
    """Of rows a norm's kernel returns rows: FSDP2 warns of a unit, as the last norm of a pipeline is, with a view."""
    x, weight = leaf(5, 7, seed=0), leaf(7, seed=2)
    y, total = norm._Norm.apply(x, x, weight, None, 0.1, "torch")
    assert y._base is None and total._base is None


def test_gradients_of_norms() -> None:
    x, added, weight, bias = leaf(2, 3, 5, seed=0), leaf(2, 3, 5, seed=1), leaf(5, seed=2), leaf(5, seed=3)
    assert gradcheck(lambda x, w: norm._Norm.apply(x, None, w, None, 0.1, "torch")[0], (x, weight))
    assert gradcheck(lambda x, w, b: norm._Norm.apply(x, None, w, b, 0.1, "torch")[0], (x, weight, bias))
    assert gradcheck(lambda x, a, w: norm._Norm.apply(x, a, w, None, 0.1, "torch"), (x, added, weight))
    assert gradcheck(lambda x, a, w, b: norm._Norm.apply(x, a, w, b, 0.1, "torch"), (x, added, weight, bias))


def test_swiglu_is_its_formula_and_has_its_gradient() -> None:
    gate, up = leaf(3, 4, seed=0), leaf(3, 4, seed=1)
    close(swiglu._Swiglu.apply(gate, up, "torch"), gate / (1 + (-gate).exp()) * up)
    assert gradcheck(lambda g, u: swiglu._Swiglu.apply(g, u, "torch"), (gate, up))
    fused = swiglu.FusedSwiglu("torch")
    again = fused.backward(draw(3, 4, seed=2), gate.detach(), up.detach(), again=True)[2]
    assert torch.equal(again, fused.forward(gate.detach(), up.detach()))


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("scores", ["softmax", "pre_softmax", "sigmoid"])
def test_the_operator_of_a_router_is_plain_pytorch_and_has_its_gradient(scores: router.Scores, k: int) -> None:
    logits, bias, compared = leaf(6, 5, seed=0), draw(5, seed=1), draw(6, 5, seed=2)
    compared[0] = float("-inf")
    compared[1] = 0.0  # ties
    for given in ({}, {"bias": bias}, {"compared": compared}):
        experts, weights = router.choose_experts(logits, k, scores, 2.5, **given)

        def fused(z: torch.Tensor, given: dict[str, torch.Tensor] = given) -> Any:
            return router._ChooseExperts.apply(z, given.get("compared"), given.get("bias"), k, scores, 2.5, "torch")

        assert torch.equal(fused(logits)[0], experts)
        close(fused(logits)[1], weights)
        assert gradcheck(lambda z, fused=fused: fused(z)[1], (logits,))
        dweights = draw(6, k, seed=3)
        close(*(torch.autograd.grad(w, logits, dweights)[0] for w in (fused(logits)[1], weights)))
    assert experts[:2].tolist() == [list(range(k))] * 2


@pytest.mark.parametrize("k", [1, 2])
def test_gradients_of_scores_near_1_keep_fp32s_precision(k: int) -> None:
    """1 - s of a score s = 0.99 has lost a hundredth of its digits, of 0.9999 all but four."""
    logits = draw(500, 4, seed=0) + 3 * torch.arange(4.0)
    experts, _ = router.choose_experts(logits, k, "sigmoid")
    dweights = draw(500, k, seed=1)
    exact = router.backward_reference(dweights.float().double(), logits.float().double(), experts, "sigmoid", 2.5)
    found = router.backward_reference(dweights.float(), logits.float(), experts, "sigmoid", 2.5)
    apart = (found.double() - exact).norm() / exact.norm()
    assert apart < 3e-7, apart


def test_swiglu_of_bf16_rounds_once() -> None:
    """To 8 bits, an error of 2^-8 at most, but for what fp32 inside adds."""
    da, gate, up = (draw(2000, 8, seed=i, dtype=torch.float32).bfloat16() for i in range(3))
    wide = [x.double() for x in (da, gate, up)]
    fused = swiglu.FusedSwiglu("torch")
    got = fused.backward(da, gate, up, again=True)
    for a, b in zip(got, fused.backward(*wide, again=True), strict=True):
        assert bool(((a - b).abs() <= 2**-8 * b.abs() + 1e-6).all())


def table(tokens: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = draw(tokens, 1, rotated // 2, seed=9)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def test_rope_turns_pairs_and_has_its_gradient() -> None:
    cos, sin = table(3, 4)
    q, k = leaf(3, 2 * 6, seed=0), leaf(3, 6, seed=1)
    turned, _ = rope.rope(q, k, cos, sin, 6)
    pairs = torch.view_as_complex(torch.stack((q.view(3, 2, 6)[..., :2], q.view(3, 2, 6)[..., 2:4]), dim=-1))
    want = torch.view_as_real(pairs * torch.complex(cos[..., :2], sin[..., :2]))
    close(turned, torch.cat((want[..., 0], want[..., 1], q.view(3, 2, 6)[..., 4:]), dim=-1))
    for in_place in (False, True):

        def turn(q: torch.Tensor, k: torch.Tensor, in_place: bool = in_place) -> Any:
            return rope._Rope.apply(q * 1, k * 1, cos, sin, 6, in_place, "torch")

        assert gradcheck(turn, (q, k))


def test_no_tokens_turn_into_no_tokens() -> None:
    cos, sin = table(0, 4)
    for q, k in ((leaf(0, 2 * 6, seed=0), leaf(0, 6, seed=1)), (leaf(0, 2, 6, seed=0), leaf(0, 1, 6, seed=1))):
        plain, fused = rope.rope(q, k, cos, sin, 6), rope._Rope.apply(q * 1, k * 1, cos, sin, 6, True, "torch")
        assert [x.shape for x in plain] == [(0, 2, 6), (0, 1, 6)] and fused[0].shape == q.shape
        torch.autograd.grad(sum(x.sum() for x in (*plain, *fused)), (q, k))


def test_rope_in_place_uses_no_memory_and_is_noticed_by_who_kept_its_input() -> None:
    cos, sin = table(3, 4)
    weight = leaf(4, 4, seed=0)
    q, k = F.linear(draw(3, 4, seed=1), weight), F.linear(draw(3, 4, seed=2), weight)
    kept = q.square()
    turned, _ = rope._Rope.apply(q, k, cos, sin, 4, True, "torch")
    assert turned.data_ptr() == q.data_ptr()
    try:
        kept.sum().backward()
    except RuntimeError as error:
        assert "inplace operation" in str(error)
    else:
        raise AssertionError("a wrong gradient went unnoticed")


def test_cross_entropy_is_its_formula_and_has_its_gradient() -> None:
    """11 columns of which the last two are padding; a label is ignored."""
    logits, labels = leaf(5, 11, seed=0), torch.tensor([3, 8, IGNORE_INDEX, 0, 8])
    shard = VocabShard.of(ALONE, 11, 9)
    got = vocab_parallel_cross_entropy(logits, labels, shard)
    close(got, F.cross_entropy(logits[:, :9], labels, reduction="none", ignore_index=IGNORE_INDEX))
    assert gradcheck(lambda z: vocab_parallel_cross_entropy(z, labels, shard), (logits,))
    none = torch.full_like(labels, IGNORE_INDEX)
    (grad,) = torch.autograd.grad(vocab_parallel_cross_entropy(logits, none, shard).sum(), logits)
    assert not grad.any()


def test_the_gradient_takes_the_place_of_the_logits_when_it_may() -> None:
    weight, labels = leaf(6, 4, seed=0), torch.tensor([3, 5, 0])
    for overwrite in (False, True):
        logits = F.linear(draw(3, 4, seed=1), weight)
        before = logits.detach().clone()
        loss = vocab_parallel_cross_entropy(logits, labels, VocabShard.of(ALONE, 6, 6), overwrite=overwrite).sum()
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert (grad.data_ptr() == logits.data_ptr()) == overwrite
        assert torch.equal(logits, before) == (not overwrite)
        again = None
        try:
            (again,) = torch.autograd.grad(loss, logits)
        except RuntimeError as error:
            assert overwrite and "inplace operation" in str(error)
        assert overwrite == (again is None)


def test_a_rank_whose_logits_are_all_minus_infinity_adds_nothing() -> None:
    logits = draw(2, 10, seed=0)
    logits[0, 5:] = -torch.inf
    stats = torch.stack(
        [softmax_stats(part, torch.tensor([1, 9]) - i, 5) for i, part in zip((0, 5), logits.split(5, 1), strict=True)]
    )
    assert stats[1, 1, 0] == -torch.inf
    close(combine_stats(stats)[:2].sum(dim=0), logits.logsumexp(dim=1))


def test_three_floats_per_token_from_each_rank_are_enough() -> None:
    logits = draw(4, 10, seed=0)
    columns = torch.tensor([0, 3, 7, 9])
    stats = torch.stack([softmax_stats(logits[:, i : i + 5], columns - i, 5) for i in (0, 5)])
    assert stats.shape == (2, 3, 4)
    peak, log_sum, target = combine_stats(stats)
    close(peak + log_sum, logits.logsumexp(dim=1))
    close(target, logits.gather(1, columns[:, None])[:, 0])


def test_weight_gradients_add_up_in_fp32() -> None:
    dy, x = draw(6, 3, seed=0), draw(6, 4, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        low_dy, low_x = dy.to(dtype), x.to(dtype)
        total = torch.full((3, 4), float("nan"))
        accumulate_weight_gradient(total, low_dy, low_x, first=True)
        accumulate_weight_gradient(total, low_dy, low_x)
        want = 2 * low_dy.double().t() @ low_x.double()
        assert (total - want).norm() / want.norm() < (1e-6 if dtype == torch.float32 else 2**-8)
