"""The C++ kernels on what nobody chose: random sizes, strides and thread counts, element by element beside fp64, empty
and tiny tensors, extreme numbers, and what they refuse instead of reading memory that is not theirs."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import ConfigError
from smp.kernels import cross_entropy, norm, rope, swiglu
from smp.kernels.attention_cores.sdpa import CPU, Scores
from smp.kernels.cpp.attention import attention
from smp.kernels.cpp.library import DTYPES, why_not
from smp.kernels.swiglu import FusedSwiglu

SINGLE = torch.finfo(torch.float32)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if why := why_not(request.param):
        pytest.skip(why)
    return request.param


@pytest.fixture(params=range(12))
def draw(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """A source of sizes; torch's numbers and threads follow from it, too."""
    before, source = torch.get_num_threads(), random.Random(request.param)
    torch.manual_seed(request.param)
    torch.set_num_threads(source.choice((1, 2, 5)))
    yield source
    torch.set_num_threads(before)


def laid_out(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The numbers of ``x`` in memory of another layout: in one piece, part of wider rows, turned, or every second."""
    way = draw.randrange(4)
    if way == 0:
        return x.contiguous()
    if way == 1:
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), torch.nan)
        wide[..., 3:-4] = x
        return wide[..., 3:-4]
    if way == 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    every = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    every[..., ::2] = x
    return every[..., ::2]


def assert_near(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | float = 1.0) -> None:
    """Element by element: one rounding to the dtype, and some of fp32 in numbers as large as ``scale``."""
    assert got.isfinite().all()
    rounding = 0.51 * torch.finfo(got.dtype).eps * want.abs()
    error, allowed = (got.double() - want).abs(), rounding + 8 * SINGLE.eps * (want.abs() + scale) + SINGLE.tiny
    assert (error <= allowed).all(), float((error / allowed).max())


def test_swiglu(dtype: torch.dtype, draw: random.Random) -> None:
    rows, width = draw.choice((0, 1, 2, 77)), draw.choice((1, 2, 15, 16, 17, 31, 300))
    gate, up, da = (10 ** draw.uniform(-3, 1.5) * torch.randn(rows, width) for _ in range(3))
    gate, up, da = (laid_out(x.to(dtype), draw) for x in (gate, up, da))
    made, exact = FusedSwiglu("cpp").forward(gate, up), swiglu.forward_reference(gate.double(), up.double())
    assert_near(made, exact, 0.0)
    wide = gate.double(), up.double(), da.double()
    dgate, dup, again = FusedSwiglu("cpp").backward(da, gate, up, again=True)
    of_gate, of_up, _ = swiglu.backward_reference(wide[2], *wide[:2], False)
    # 1 + g (1 - s) has a root: near it what is left is the rounding of its parts.
    parts = (wide[2] * wide[1] * wide[0].sigmoid()).abs() * (1 + wide[0].abs())
    assert_near(dgate, of_gate, parts)
    assert_near(dup, of_up, 0.0)
    assert torch.equal(again, made)


def test_swiglu_of_extreme_numbers(dtype: torch.dtype) -> None:
    """What is far below zero is shut, however large: the sigmoid's last bit times it would be seen."""
    gate = torch.tensor([[-3e38, -1e30, -1e5, -104.0, -89.0, -88.0, 0.0, -0.0, 88.0, 1e30, 3e38]]).to(dtype)
    one = torch.ones_like(gate)
    made = FusedSwiglu("cpp").forward(gate, one), *FusedSwiglu("cpp").backward(one, gate, one, again=True)
    exact = swiglu.forward_reference(gate.double(), one.double())
    dgate, dup, _ = swiglu.backward_reference(one.double(), gate.double(), one.double(), False)
    # exp(89) is infinite in fp32: 89 exp(-89) is 0.
    for got, want in zip(made, (exact, dgate, dup, exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=3e-37)
    strange = torch.tensor([[torch.nan, torch.inf, -torch.inf]], dtype=dtype)
    for ours, twin in zip(
        FusedSwiglu("cpp").backward(one[:, :3], strange, one[:, :3], again=True),
        FusedSwiglu("torch").backward(one[:, :3], strange, one[:, :3], again=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, twin, equal_nan=True)


def test_rope(dtype: torch.dtype, draw: random.Random) -> None:
    tokens, dim = draw.choice((0, 1, 5, 300)), draw.choice((2, 6, 32, 34, 64, 130))
    rotated = 2 * draw.randint(1, dim // 2)
    heads = draw.choice((1, 3)), 1
    q, k = (laid_out(torch.randn(tokens, n, dim).to(dtype), draw) for n in heads)
    angles = (100 * torch.rand(tokens, 1, rotated // 2)).repeat(1, 1, 2)
    table = angles.cos(), angles.sin()
    exact = rope._reference(q.double(), k.double(), *(part.double() for part in table), False)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    made = rope.rope(*leaves, *table, dim, "cpp")
    for got, want in zip(made, exact, strict=True):
        assert_near(got.detach(), want, 3.0)
    back = torch.autograd.grad(made, leaves, [part.detach() for part in made])
    of_exact = rope._reference(*(part.detach().double() for part in made), *(part.double() for part in table), True)
    for got, want in zip(back, of_exact, strict=True):
        assert_near(got, want, 3.0)


def test_cross_entropy(dtype: torch.dtype, draw: random.Random) -> None:
    rows, columns = draw.choice((0, 1, 3, 50)), draw.choice((1, 2, 16, 33, 2048, 2049, 4100))
    valid = draw.randint(0, columns)
    logits = laid_out((10 ** draw.uniform(-2, 2) * torch.randn(rows, columns)).to(dtype), draw)
    ids, weights = torch.randint(-3, columns + 3, (rows,)), torch.rand(rows) * torch.randint(0, 2, (rows,))
    if draw.random() < 0.3:
        ids.fill_(-100)  # nothing is learned here
    z = logits.double()
    exact = cross_entropy.softmax_stats_reference(z, ids, valid)
    made = cross_entropy.softmax_stats(logits, ids, valid, "cpp")
    assert torch.equal(made[0].double(), exact[0]) if valid else (made[0] < -1e38).all()
    assert torch.equal(made[2].double(), exact[2])
    torch.testing.assert_close(made[1].double(), exact[1], rtol=4 * SINGLE.eps, atol=(2 + columns**0.5) * SINGLE.eps)
    cross_entropy.logits_to_gradient_reference(z, exact, ids, valid, weights.double())
    # The rounding of a logit far from the largest is that of its exponent.
    logits = cross_entropy.logits_to_gradient(logits, exact.float(), ids, valid, weights, "cpp")
    assert not logits[:, valid:].any() and not logits[weights == 0].any()
    error = (logits.double() - z).abs()
    assert (error <= torch.finfo(dtype).eps * z.abs() + 2e-4 * z.abs().clamp(max=1e-3) + 1e-6).all()


def test_norms(dtype: torch.dtype, draw: random.Random) -> None:
    rows, width = draw.choice((0, 1, 7, 9, 700)), draw.choice((1, 2, 16, 17, 100))
    size, shift, bias, adds = (
        10 ** draw.uniform(-4, 4),
        draw.choice((0.0, 3.0)),
        draw.random() < 0.5,
        draw.random() < 0.5,
    )
    x, residual, dy, dtotal = (laid_out((size * (torch.randn(rows, width) + shift)).to(dtype), draw) for _ in range(4))
    weight, offset = torch.randn(width).to(dtype), torch.randn(width).to(dtype) if bias else None
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight) + ((offset,) if bias else ())]
    one, two, of_weight, *of_offset = leaves
    given = of_weight, of_offset[0] if bias else None, 1e-5, "cpp"
    y, total = norm.add_norm(one, two, *given) if adds else (norm.norm(one, *given), None)
    rounded = (x + residual if adds else x).double()
    assert total is None or torch.equal(total.double(), rounded)
    wide = [rounded.requires_grad_(), weight.double().requires_grad_()]
    wide += [offset.double().requires_grad_()] if offset is not None else []
    exact = norm.norm(wide[0], wide[1], wide[2] if bias else None, 1e-5)
    in_wide = float(rounded.detach().abs().amax() / size) if rows else 0.0
    assert_near(y.detach(), exact.detach(), 4.0 * (1 + in_wide) * weight.double().abs() + 1)
    outputs = (y, total) if total is not None else (y,)
    found = torch.autograd.grad(outputs, [one, *leaves[2:]], [dy, dtotal][: len(outputs)])
    wanted = torch.autograd.grad(exact, wide, dy.double())
    wanted = (wanted[0] + dtotal.double(), *wanted[1:]) if total is not None else wanted
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4 * float(want.abs().sum() / max(rows, 1) + 1)
        )


def test_norms_of_extreme_numbers(dtype: torch.dtype) -> None:
    """As the twin's: squares that overflow give zeros, those that vanish leave eps, and NaN stays in its row."""
    x = torch.full((6, 33), 1.0).to(dtype)
    x[0], x[1], x[2, 5], x[3, 5], x[4] = 1e30, 1e-30, torch.nan, torch.inf, 0.0
    weight = torch.ones(33, dtype=dtype)
    for bias in (None, weight):
        ours, twin = (norm._forward_op(x, None, weight, bias, 1e-5, backend)[0] for backend in ("cpp", "torch"))
        torch.testing.assert_close(ours, twin, equal_nan=True)


@pytest.mark.parametrize("kind", ["causal", "mask", "whole"])
def test_attention(dtype: torch.dtype, draw: random.Random, kind: str) -> None:
    batch, groups, length, dim = (
        draw.randint(0, 2),
        draw.randint(1, 2),
        draw.choice((1, 2, 63, 129)),
        draw.randint(1, 40),
    )
    heads, keys = groups * draw.randint(1, 3), length if kind == "causal" else draw.choice((1, 7, 130))
    sizes = (batch, heads, length, dim), (batch, groups, keys, dim), (batch, groups, keys, dim)
    q, k, v = (laid_out(torch.randn(size).to(dtype), draw) for size in sizes)
    mask = None
    if kind == "mask":
        mask = torch.zeros(draw.choice((1, max(batch, 1))), 1, length, keys).masked_fill(
            torch.rand(length, keys) < 0.3, -torch.inf
        )
        mask[:, :, -1] = -torch.inf  # the last query sees nothing
        mask = laid_out(mask.to(dtype), draw) if batch else mask[:1].to(dtype)
    scale = draw.choice((dim**-0.5, 0.7))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask, kind == "causal", scale)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(heads // groups, 1) for x in wide[1:]]
    scores = scale * wide[0] @ repeated[0].mT
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(length, keys).triu(1).bool(), -torch.inf)
    scores = scores if mask is None else scores + mask.double()
    exact_lse, blind = scores.logsumexp(-1), scores.isneginf().all(-1, keepdim=True)
    p = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    exact = p @ repeated[1]
    few = 30 * SINGLE.eps if dtype == torch.float32 else 0.02
    torch.testing.assert_close(lse.double(), exact_lse.detach(), rtol=few, atol=few)
    torch.testing.assert_close(out.double(), exact, rtol=few, atol=3 * few)
    dout = torch.randn_like(out)
    got, want = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(exact, wide, dout.double())
    # Scores get a difference of two sums over channels: where it is 0, what is left is the rounding of those.
    sums = (
        4
        * SINGLE.eps
        * float((dout.float().abs() @ repeated[1].detach().abs().mT.float()).amax() if out.numel() else 0)
        * scale
    )
    for gradient, expected in zip(got, want, strict=True):
        largest = max(1.0, float(expected.abs().amax())) if expected.numel() else 1.0
        atol = 3 * few * largest + sums * 4  # times a key or a query, of which few are above 4
        torch.testing.assert_close(gradient.double(), expected, rtol=few, atol=atol)


def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    """Of those that test_cpp_rows.py leaves out; in sizes that threads do not divide evenly."""
    torch.manual_seed(0)
    gate, up, da = (torch.randn(1501, 70).to(dtype) for _ in range(3))
    q, k, table = torch.randn(2, 6, 301, 20).to(dtype), torch.randn(2, 3, 301, 20).to(dtype), torch.rand(1501, 1, 10)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        out, lse = attention(*leaves, leaves[1], None, True, 0.3)
        gradients = torch.autograd.grad(out.sum(), leaves)
        found.append((out, lse, *gradients, *FusedSwiglu("cpp").backward(da, gate, up, again=True)))
        found[-1] += rope.rope(gate, up, table, table, 35, "cpp")
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def _second_derivatives() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    x, y, w = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    q, table = torch.randn(1, 2, 4, 8), torch.rand(4, 1, 8)
    return {
        "norm": (lambda x, w: norm.norm(x, w, None, 1e-5, "cpp"), (x, w)),
        "swiglu": (lambda x, y: swiglu.swiglu(x, y, "cpp"), (x, y)),
        "rope": (lambda x, y: rope.rope(x, y, table, table, 8, "cpp")[0], (x, y)),
        "attention": (lambda q, k: attention(q, k, k, None, True, 1.0)[0], (q, q.clone())),
        "sdpa": (lambda q, k: CPU["cpp"].forward(q, k, k, Scores(True, None, None))[0], (q, q.clone())),
    }


@pytest.mark.parametrize("name", ["norm", "swiglu", "rope", "attention", "sdpa"])
def test_a_second_derivative_is_an_error(name: str) -> None:
    """torch takes an operator for a constant: a gradient's own gradient was wrong, with a warning."""
    if why := why_not(torch.float32):
        pytest.skip(why)
    function, inputs = _second_derivatives()[name]
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.grad(function(*leaves).sum(), leaves)
    with pytest.raises(ConfigError, match="fused kernels .* have first derivatives only"):
        torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)


def test_what_would_be_read_past_its_end_is_refused() -> None:
    if why := why_not(torch.float32):
        pytest.skip(why)
    x, w, q = torch.randn(4, 8), torch.randn(8), torch.randn(1, 2, 4, 8)
    ids, stats, table = torch.zeros(4, dtype=torch.int64), torch.zeros(3, 4), torch.rand(4, 1, 8)
    mask = torch.zeros(1, 1, 4, 4)
    refused: list[Callable[[], Any]] = [
        lambda: cross_entropy.softmax_stats(x, ids.int(), 8, "cpp"),
        lambda: cross_entropy.softmax_stats(x, ids[:3], 8, "cpp"),
        lambda: cross_entropy.softmax_stats(x, ids, 9, "cpp"),
        lambda: cross_entropy.logits_to_gradient(x, stats[:, :3], ids, 8, w[:4], "cpp"),
        lambda: cross_entropy.logits_to_gradient(x, stats, ids, 8, w[:3], "cpp"),
        lambda: norm.norm(x, w[:7], None, 1e-5, "cpp"),
        lambda: norm.norm(x, w, w[:7], 1e-5, "cpp"),
        lambda: norm.add_norm(x, x[:1], w, None, 1e-5, "cpp"),
        lambda: swiglu.swiglu(x, x[:1], "cpp"),
        lambda: rope.rope(x, x, table[:1], table[:1], 8, "cpp"),
        lambda: rope.rope(x, x, torch.rand(4, 1, 16), torch.rand(4, 1, 16), 8, "cpp"),
        lambda: attention(q, q, q[..., :4], None, False, 1.0),
        lambda: attention(q[:, :1], q, q, None, False, 1.0),
        lambda: attention(q, q[:, :, :3], q[:, :, :3], None, True, 1.0),
        lambda: attention(q, q, q, mask.expand(1, 2, 4, 4), False, 1.0),
        lambda: attention(q, q, q, mask[..., :3], False, 1.0),
        lambda: attention(q, q, q, mask.clone().requires_grad_(), False, 1.0),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"C\+\+ takes "):
            call()


@pytest.mark.parametrize("side", ["before", "behind"])
def test_nothing_is_read_or_written_past_a_tensor(side: str) -> None:
    """The tests above in a process whose tensors lie beside pages that may not be touched."""
    if why := why_not(torch.float32):
        pytest.skip(why)
    chosen = "not nothing_is_read and not refused and not derivative"
    command = [sys.executable, "-m", "tests.kernels.guarded", side, __file__, "-k", chosen]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert run.returncode == 0, f"{run.returncode}: {run.stdout[-2000:]} {run.stderr[-2000:]}"
