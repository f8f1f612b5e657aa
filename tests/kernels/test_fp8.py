"""Rounding to 8 bits and products of what was rounded: against fp64 on the dequantised numbers, and against torch's own
scaled product, of which torch has a CPU kernel for one scale and for scales of rows from 2.12 on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from smp.kernels.precision.fp8 import (
    E4M3,
    E5M2,
    LARGEST,
    Quantised,
    dequantise,
    inverse_scale,
    largest,
    largest_of_blocks,
    quantise,
    scaled_product,
    transposed,
)
from smp.kernels.product import DENSE, PRODUCTS, Format, Scaled

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
TOKENS, IN, OUT = 256, 384, 128
"""Multiples of 128, so that there are blocks."""


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers with an outlier."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[3, 5] = 30.0
    return x


def by(kind: str, x: torch.Tensor, dtype: torch.dtype) -> Quantised:
    if kind == "mx columns":
        return transposed(by("mx", x.t(), dtype))
    amax = {
        "tensor": lambda: largest(x),
        "row": lambda: largest(x, 1),
        "column": lambda: largest(x, 0),
        "block": lambda: largest_of_blocks(x),
        "square": lambda: largest_of_blocks(x, square=True),
        "mx": lambda: largest_of_blocks(x, size=32),
    }[kind]()
    return quantise(x, inverse_scale(amax, dtype), dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_smallest_powers_of_two_that_fit(dtype: torch.dtype) -> None:
    end = LARGEST[dtype]
    amax = torch.tensor([end, end * 1.0001, end / 2, 1.0, 3e38, 1e-20, 7e-3])
    scale = inverse_scale(amax, dtype)
    assert torch.equal(scale.log2(), scale.log2().round())
    assert (amax / scale <= end).all() and (amax / scale > end / 2).all()
    odd = inverse_scale(torch.tensor([0.0, math.inf]), dtype)
    assert odd[0] == 1 and odd[1].isnan(), "an infinite number shows in all that follows"
    assert largest(torch.tensor([[1.0, math.nan]])) == math.inf


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_to_the_nearest(dtype: torch.dtype) -> None:
    """Within half a unit in the last place; too large numbers become the largest, not NaN; zeros stay."""
    x, bits = draw(64, 64, seed=0), 3 if dtype == E4M3 else 2
    normal = x.abs() > x.abs().max() * 2.0**-10
    for source in (x, x.bfloat16(), x.double()):
        back = dequantise(by("tensor", source, dtype)).double()
        assert ((back - source.double()).abs() <= 2.0 ** -(bits + 1) * source.double().abs())[normal].all()
    clipped = quantise(torch.tensor([[1e9, -1e9]]), torch.tensor(1.0), dtype)
    assert dequantise(clipped).tolist() == [[LARGEST[dtype], -LARGEST[dtype]]]
    assert not dequantise(by("tensor", torch.zeros(2, 2), dtype)).any()


def test_blocks_have_scales_of_their_own() -> None:
    x = torch.ones(256, 256)
    x[130, 140] = 1000.0
    inverse = by("block", x, E4M3).inverse
    assert inverse.shape == (256, 2) and (inverse != inverse[0, 0]).nonzero().tolist() == [[130, 1]]
    assert by("square", x, E4M3).inverse.flatten().unique(return_counts=True)[1].tolist() == [3, 1]
    with pytest.raises(ValueError, match="not a multiple of 128"):
        largest_of_blocks(torch.ones(128, 130))
    # finer scales keep small numbers beside an outlier of another block
    y = torch.full((128, 256), 1e-3)
    y[0, 0] = 1e5
    assert dequantise(by("tensor", y, E4M3))[5, 200] == 0 and dequantise(by("block", y, E4M3))[5, 200] > 9e-4


def bound(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of a sum of products in fp32, for each element: k eps sum |a| |b|."""
    return left.shape[1] * torch.finfo(torch.float32).eps * (left.abs() @ right.abs().t())


@pytest.mark.parametrize(
    ("kinds", "dtypes"),
    list(
        itertools.product(
            [("tensor", "tensor"), ("row", "row"), ("block", "square"), ("block", "block"), ("mx", "mx")],
            [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)],
        )
    ),
)
def test_products_are_those_of_the_dequantised_numbers(
    kinds: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    a, b = by(kinds[0], draw(TOKENS, IN, seed=0), dtypes[0]), by(kinds[1], draw(OUT, IN, seed=1), dtypes[1])
    left, right = dequantise(a, torch.float64), dequantise(b, torch.float64)
    wanted = left @ right.t()
    got = scaled_product(a, b, torch.float32, emulate=True)
    assert ((got - wanted).abs() <= bound(left, right)).all()
    assert torch.equal(scaled_product(a, b, torch.float64, emulate=True), wanted)
    rounded = scaled_product(a, b, torch.bfloat16, emulate=True)
    assert torch.equal(rounded, got.bfloat16())


@pytest.mark.skipif(TORCH < (2, 12), reason="torch has no such product on a CPU")
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_torch_computes_the_same_as_the_emulation(kind: str) -> None:
    """Also with a number of tokens that is not aligned, as a sum over tokens has."""
    for dtype in (E4M3, E5M2):
        a, b = by(kind, draw(48, 100, seed=0), dtype), by(kind, draw(32, 100, seed=1), E4M3)
        got = scaled_product(a, b, torch.float32, emulate=False)
        wanted = scaled_product(a, b, torch.float32, emulate=True)
        assert ((got - wanted).abs() <= bound(dequantise(a), dequantise(b))).all()


@pytest.mark.parametrize(
    ("granularity", "fp8_format"), list(itertools.product(("tensor", "row", "block", "mx"), ("hybrid", "e4m3")))
)
def test_the_three_products_of_a_layer(granularity: str, fp8_format: Format) -> None:
    """Each within its accumulation bound of fp64 on what it is given, and near the products without FP8."""
    product = Scaled(granularity, fp8_format, torch.float32, True)  # type: ignore[arg-type]
    assert PRODUCTS[product.name] == product and not product.differentiable
    x, w, g = draw(TOKENS, IN, seed=0), draw(OUT, IN, seed=1), draw(TOKENS, OUT, seed=2) * 1e-6
    of_grad = E5M2 if fp8_format == "hybrid" else E4M3
    kinds = {
        "tensor": ("tensor",) * 4,
        "row": ("row", "row", "column", "row"),
        "block": ("block", "square", "square", "block"),
        "mx": ("mx", "mx", "mx columns", "mx"),
    }
    names = kinds[granularity]
    xq, wq, wq_back, gq = by(names[0], x, E4M3), by(names[1], w, E4M3), by(names[2], w, E4M3), by(names[3], g, of_grad)
    y, dx = product.forward(xq, wq), product.input_gradient(gq, wq_back)
    dw = product.weight_gradient(gq, xq) if granularity == "tensor" else product.weight_gradient(g, x)
    wide = torch.float64
    for got, left, right in (
        (y, dequantise(xq, wide), dequantise(wq, wide)),
        (dx, dequantise(gq, wide), dequantise(transposed(wq_back), wide)),
    ):
        assert ((got - left @ right.t()).abs() <= bound(left, right)).all()
    if granularity == "tensor":
        left, right = dequantise(transposed(gq), wide), dequantise(transposed(xq), wide)
        assert ((dw - left @ right.t()).abs() <= bound(left, right)).all()
    if granularity == "row":
        assert torch.equal(dw, DENSE.weight_gradient(g, x)), "not in FP8"
    for got, want in ((y, x @ w.t()), (dx, g @ w), (dw, g.t() @ x)):
        assert (got - want).norm() < 0.09 * want.norm()


def test_rows_of_a_number_that_a_compiler_does_not_know_are_rounded() -> None:
    """Those of experts on several ranks, with a scale each: nothing asks how many they are."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        rows = mode.shape_env.create_unbacked_symint() + mode.shape_env.create_unbacked_symint()
        q = quantise(torch.empty(rows, 32), torch.empty(rows, 1), E4M3)
        assert q.data.ndim == dequantise(q).ndim == 2 and q.data.shape[1] == 32
