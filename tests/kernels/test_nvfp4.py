"""Rounding to NVFP4: against the nearest of its numbers, written out, and products against fp64 on what was rounded."""

from __future__ import annotations

import math

import pytest
import torch

from smp.kernels.precision.fp8 import E4M3, dequantise, largest, transposed
from smp.kernels.precision.nvfp4 import NV_BLOCK, quantise_to_e2m1, tensor_scale
from smp.kernels.product import DENSE, PRODUCTS, Scaled
from tests.kernels.test_fp8 import bound, draw

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Of the numbers of e2m1, and of two that are equally near the one at an even place, whose mantissa is even."""
    distance = (x.abs()[..., None] - NUMBERS).abs()
    least = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    chosen = torch.where(least.sum(-1, keepdim=True) > 1, least & even, least).int().argmax(-1)
    return NUMBERS[chosen].copysign(x)


def test_rounding_is_to_the_nearest_of_16_numbers() -> None:
    """A block whose largest number is 6 has the scale 1 under a tensor scale of 1: all ties are met."""
    steps = torch.arange(-48, 49) / 8.0
    rows = torch.cat([torch.full((97, 1), 6.0), steps[:, None].expand(97, 15)], 1)
    q = quantise_to_e2m1(rows, torch.tensor(1.0))
    assert q.inverse.unique().tolist() == [1.0] and q.data.dtype == E4M3
    assert torch.equal(q.data.float(), nearest(rows))
    assert q.data.float().abs().unique().tolist() == NUMBERS.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("square", [False, True])
def test_scales_of_blocks_are_e4m3_under_one_of_the_tensor(dtype: torch.dtype, square: bool) -> None:
    x = draw(64, 96, seed=0).to(dtype)
    tensor = tensor_scale(largest(x))
    assert tensor.log2() == tensor.log2().round() and 1344 < 30 / tensor <= 2688
    q = quantise_to_e2m1(x, tensor, square=square)
    assert q.inverse.shape == ((4, 6) if square else (64, 6))
    scales = q.inverse / tensor
    assert torch.equal(scales, scales.to(E4M3).float())
    wide = q.inverse.repeat_interleave(NV_BLOCK, 1)
    wide = wide.repeat_interleave(NV_BLOCK, 0) if square else wide
    assert torch.equal(q.data.float(), nearest((x.double() / wide).float()).clamp(-6, 6))
    back = dequantise(q, torch.float64)
    assert ((back - x.double()).abs() <= wide).all(), "half of the widest step, 2; a scale is within 1/16 of what fits"


def test_zeros_stay_and_what_is_not_finite_shows() -> None:
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 20] = 1e4, 1e-6  # too small a block beside the other one: zeros
    q = quantise_to_e2m1(x, tensor_scale(largest(x)))
    back = dequantise(q)
    assert back[0, 0] == pytest.approx(1e4, rel=1 / 16) and back.count_nonzero() == 1
    assert not dequantise(quantise_to_e2m1(torch.zeros(1, 16), tensor_scale(torch.tensor(0.0)))).any()
    x[0, 0] = math.inf
    assert dequantise(quantise_to_e2m1(x, tensor_scale(largest(x)))).isnan().any()
    with pytest.raises(ValueError, match="not a multiple of 16"):
        quantise_to_e2m1(torch.ones(4, 24), torch.tensor(1.0))


def test_the_three_products_of_a_layer() -> None:
    """Within their accumulation bound of fp64 on the 4-bit numbers; the weight's gradient is not in them."""
    product = Scaled("nv", "e2m1", torch.float32, True)
    assert PRODUCTS[product.name] == product
    x, w, g = (draw(*shape, seed=seed).clamp(-4, 4) for seed, shape in enumerate([(64, 96), (48, 96), (64, 48)]))
    g *= 1e-6
    (xq, gq), wq = (
        [quantise_to_e2m1(y, tensor_scale(largest(y))) for y in (x, g)],
        quantise_to_e2m1(w, tensor_scale(largest(w)), square=True),
    )
    y, dx = product.forward(xq, wq), product.input_gradient(gq, wq)
    wide = torch.float64
    for got, left, right in (
        (y, dequantise(xq, wide), dequantise(wq, wide)),
        (dx, dequantise(gq, wide), dequantise(transposed(wq), wide)),
    ):
        assert ((got - left @ right.t()).abs() <= bound(left, right)).all()
    assert torch.equal(product.weight_gradient(g, x), DENSE.weight_gradient(g, x))
    for got, want in ((y, x @ w.t()), (dx, g @ w)):
        assert (got - want).norm() < 0.17 * want.norm(), "two operands, each within a tenth"
