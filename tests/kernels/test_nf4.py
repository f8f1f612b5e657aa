"""Weights in 4 bits: against the published code book in float64, bitsandbytes where it is there, and cut in parts."""

from __future__ import annotations

import pytest
import torch

from smp.kernels.precision import nf4
from smp.kernels.precision.nf4 import blocks_of, pack, quantize, widen, width

NF4 = torch.tensor(nf4._CODES, dtype=torch.float64)


def matrix(rows: int = 48, columns: int = 320) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 0, rows)[:, None]
    weight[1, :64] = 0.0  # a block of zeros
    weight[2, 5] = 40.0  # an outlier
    return weight


def packed(weight: torch.Tensor, *, double: bool) -> torch.Tensor:
    halves, scales = quantize(weight)
    return pack(halves, scales, scales if double else None, (0, 0))


def test_the_code_book_is_made_of_quantiles() -> None:
    """Appendix E of the paper: eight quantiles of N(0, 1) below 0 and nine above, both with 0, divided by the last."""
    offset = 0.9677083
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    wanted = torch.cat([above, torch.zeros(1, dtype=torch.float64), below]).sort().values
    assert torch.allclose(wanted / wanted.max(), NF4, atol=1e-6)


def test_each_element_is_the_nearest_code() -> None:
    weight = matrix()
    wide = widen(packed(weight, double=False), torch.float32, double=False)
    blocks = weight.double().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    choices = (largest[:, :, None] * NF4 - blocks[:, :, None]).abs()
    found = (wide.double().view(-1, 64) - blocks).abs()
    assert (found <= choices.amin(2) * (1 + 1e-5) + 1e-7 * largest).all()
    assert not wide[1, :64].any() and not wide.isnan().any()


def test_double_quantization_costs_little() -> None:
    weight = matrix()
    single, double = (widen(packed(weight, double=kind), torch.float32, double=kind) for kind in (False, True))
    assert not torch.equal(single, double)
    assert (single - double).norm() < 0.02 * single.norm()


@pytest.mark.parametrize("double", [False, True])
def test_parts_have_the_bits_of_the_whole(double: bool) -> None:
    """Cut by rows and by columns, also where the scales of a row begin within a nested block."""
    weight = matrix(96, 640)
    halves, scales = quantize(weight)
    whole = widen(pack(halves, scales, scales if double else None, (0, 0)), torch.float32, double=double)
    for rows in (1, 7, 96):
        for columns in (64, 320, 640):
            for row in range(0, 96, rows):
                for column in range(0, 640, columns):
                    part = weight[row : row + rows, column : column + columns]
                    own, here = quantize(part)
                    first = row, column // 64
                    bits = pack(own, here, scales if double else None, first)
                    assert bits.shape == (len(part), width(columns, double=double))
                    found = widen(bits, torch.float32, double=double)
                    assert torch.equal(found, whole[row : row + rows, column : column + columns])
    empty = pack(*quantize(weight[:0]), scales if double else None, (96, 0))
    assert widen(empty, torch.float32, double=double).shape == (0, 640)


def test_rows_say_how_long_they_are() -> None:
    for double in (False, True):
        for k in [*range(1, 600), 831, 832, 4096]:
            assert blocks_of(width(64 * k, double=double), double=double) == k
    with pytest.raises(ValueError, match="rows of 100 elements"):
        width(100, double=True)
    assert width(16384, double=True) * 16 / 16384 == 8 * (32 * 256 + 256 + 8 + 8) / 16384  # bits of an element


def test_products_are_those_of_the_widened_weight() -> None:
    weight, x, grad = matrix(), torch.randn(5, 320), torch.randn(5, 48)
    product = nf4.Nf4(double=True)
    bits = packed(weight, double=True)
    wide = widen(bits, torch.float32, double=True)
    assert torch.equal(product.forward(x, bits), torch.nn.functional.linear(x, wide))
    assert torch.equal(product.input_gradient(grad, bits), grad @ wide)
    with pytest.raises(ValueError, match="not trained"):
        product.weight_gradient(grad, x)


def test_bitsandbytes_has_the_same_bits() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = matrix()
    halves, scales = quantize(weight)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert torch.equal(halves.view(-1), theirs.view(-1))
    assert torch.equal(torch.tensor(nf4._dynamic_codes()), state.state2.code)
    assert torch.allclose(state.offset, scales.mean(), rtol=1e-6)
    plain, single = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(
        functional.dequantize_4bit(plain, single), widen(packed(weight, double=False), torch.float32, double=False)
    )
    wide = widen(packed(weight, double=True), torch.float32, double=True)
    # its CPU kernel takes a table for the 8-bit scales, which is off by one here and there
    assert (functional.dequantize_4bit(theirs, state) - wide).norm() < 2e-3 * wide.norm()
