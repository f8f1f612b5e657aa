"""Experts' products in FP8: each expert's rows against fp64 on the dequantised numbers, whatever the counts; emulated,
and by torch's scaled product, of which torch has a CPU kernel from 2.12 on."""

from __future__ import annotations

import pytest
import torch

from smp.kernels.experts import grouped_scaled
from smp.kernels.precision.fp8 import E4M3, E5M2, Quantised, dequantise, inverse_scale, largest, quantise
from smp.kernels.product import Scaled

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
EXPERTS, IN, OUT = 4, 48, 32
COUNTS = ([5, 0, 19, 3], [0, 0, 40, 0], [0, 0, 0, 0])


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def by(dim: int | None, x: torch.Tensor, dtype: torch.dtype) -> Quantised:
    return quantise(x, inverse_scale(largest(x, dim), dtype), dtype)


def assert_near(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``found`` is a b but for its rounding to bf16 and the order of a sum in fp32."""
    bound = 2.0**-8 * (a @ b).abs() + a.shape[1] * 2.0**-23 * (a.abs() @ b.abs())
    assert ((found.double() - a @ b).abs() <= bound).all()


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_each_expert_multiplies_its_rows(granularity: str, counts: list[int], emulate: bool) -> None:
    if not emulate and TORCH < (2, 12):
        pytest.skip("torch has no such product on a CPU")
    n, number, product = sum(counts), torch.tensor(counts), Scaled(granularity, "hybrid", torch.bfloat16, emulate).name
    x, grad, weight = draw(n, IN, seed=0), draw(n, OUT, seed=1), draw(EXPERTS, OUT, IN, seed=2)
    weight[1] *= 40  # an expert's own scale is another one
    rows, columns = (-1, -2) if granularity == "row" else (None, None)
    qx, qg = by(rows, x, E4M3), by(rows, grad, E5M2)
    forward, backward = by(rows, weight, E4M3), by(columns, weight, E4M3)
    y = grouped_scaled.forward(qx, forward, number, product)
    dx = grouped_scaled.input_gradient(qg, backward, number, product)
    of_grad, of_x = (qg, qx) if granularity == "tensor" else (grad.bfloat16(), x.bfloat16())
    dw = grouped_scaled.weight_gradient(of_grad, of_x, number, product)
    assert y.dtype == dx.dtype == dw.dtype == torch.bfloat16
    assert (y.shape, dx.shape, dw.shape) == ((n, OUT), (n, IN), (EXPERTS, OUT, IN))
    wide = [dequantise(q, torch.float64) for q in (qx, qg, forward, backward)]
    plain = [of.double() if isinstance(of, torch.Tensor) else dequantise(of, torch.float64) for of in (of_grad, of_x)]
    for expert, (a, b) in enumerate(zip([0, *number.cumsum(0)], number.cumsum(0), strict=False)):
        assert_near(y[a:b], wide[0][a:b], wide[2][expert].t())
        assert_near(dx[a:b], wide[1][a:b], wide[3][expert])
        assert_near(dw[expert], plain[0][a:b].t(), plain[1][a:b])
    assert not dw[number == 0].any()


def test_an_expert_has_scales_of_its_own_by_rows_only() -> None:
    weight = draw(EXPERTS, OUT, IN, seed=2)
    weight[1] *= 1000
    assert by(None, weight, E4M3).inverse.ndim == 0
    by_rows = by(-1, weight, E4M3).inverse
    assert by_rows.shape == (EXPERTS, OUT, 1) and by_rows[1].min() > by_rows[0].max()


def test_a_quantised_operand_and_a_tensor_do_not_mix() -> None:
    x, weight = draw(3, IN, seed=0), draw(EXPERTS, OUT, IN, seed=2)
    with pytest.raises(TypeError, match="two quantised operands, or two tensors"):
        grouped_scaled.forward(by(None, x, E4M3), weight, torch.tensor([3, 0, 0, 0]), "dense")
