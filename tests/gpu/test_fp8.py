"""FP8 on tensor cores: torch's scaled products against the emulation of the same 8-bit numbers, and training steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from smp.kernels.precision.fp8 import E4M3, E5M2, _aligned, inverse_scale, largest, quantise
from smp.kernels.product import Format, Scaled, gradient_dtype
from tests.training.flag_runs import TINY, run_here

pytestmark = pytest.mark.gpu
NEEDED = {"tensor": (8, 9), "row": (9, 0)}
SIZES = "--bf16 --seq-length 32 --hidden-size 64 --ffn-hidden-size 128 --num-query-groups 4 "


def without(granularity: str) -> bool:
    return torch.cuda.get_device_capability() < NEEDED[granularity]


@pytest.mark.parametrize("granularity", NEEDED)
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_tensor_cores_compute_what_is_emulated(granularity: str, fp8_format: Format) -> None:
    """The products of a layer, the last one with a number of tokens that is not aligned. Tensor cores sum in fewer bits
    than fp32; bf16 rounds the result."""
    if without(granularity):
        pytest.skip("no such product on this GPU")
    torch.manual_seed(0)
    x, w, g = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((250, 256), (128, 256), (250, 128)))
    dim, back = (None, None) if granularity == "tensor" else (1, 0)
    real, emulated = (Scaled(granularity, fp8_format, torch.bfloat16, emulate) for emulate in (False, True))  # type: ignore[arg-type]
    of_grad = gradient_dtype(fp8_format)
    xq, wq = (quantise(y, inverse_scale(largest(y, dim), E4M3), E4M3) for y in (x, w))
    gq, wb = (
        quantise(g, inverse_scale(largest(g, dim), of_grad), of_grad),
        quantise(w, inverse_scale(largest(w, back), E4M3), E4M3),
    )
    pairs = [
        (real.forward(xq, wq), emulated.forward(xq, wq)),
        (real.input_gradient(gq, wb), emulated.input_gradient(gq, wb)),
    ]
    if granularity == "tensor":
        pairs.append((real.weight_gradient(gq, xq), emulated.weight_gradient(gq, xq)))
    for got, wanted in pairs:
        assert (got.float() - wanted.float()).norm() < 5e-3 * wanted.float().norm()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (33, 2050), (1, 5), (4096, 1)])
def test_numbers_are_rounded_as_on_a_cpu(source: torch.dtype, shape: tuple[int, int]) -> None:
    """Bit for bit, with what is too large, not a number, or less than the smallest one."""
    x = (torch.randn(*shape) * torch.exp2(torch.randint(-30, 9, shape).float())).to(source)
    x.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])[: x.numel()].to(source)
    clean = x.nan_to_num(nan=1.0, posinf=300.0, neginf=-3e4)
    assert all(torch.equal(largest(y.cuda()).cpu(), largest(y)) for y in (x, clean, x.abs().clamp(max=2)))
    for dtype, dim in itertools.product((E4M3, E5M2), (None, 0, 1)):
        inverse = inverse_scale(largest(clean, dim) / 2, dtype)  # so that some are too large
        here, there = (quantise(y, inverse.to(y.device), dtype).data for y in (x, x.cuda()))
        finite = bits(here) == bits(there.cpu())
        assert (finite | (here.float().isnan() & there.cpu().float().isnan())).all()
        turned, wanted = _aligned(there.t()).cpu(), _aligned(here.t())
        assert torch.equal(bits(turned), bits(_aligned(there.cpu().t())))
        assert turned.shape == wanted.shape and turned.is_contiguous()


def bits(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.uint8)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
def test_a_run_trains_as_emulated(tmp_path: Path, recipe: str) -> None:
    if without("row" if recipe == "rowwise" else "tensor"):
        pytest.skip("no such product on this GPU")
    flags = f"{SIZES} --fp8-format hybrid --fp8-recipe {recipe} "
    real, emulated = (
        run_here(tmp_path / name, flags + name, base=TINY) for name in ("--no-fp8-emulate", "--fp8-emulate")
    )
    assert real.code == emulated.code == 0, real.err
    assert real.losses == pytest.approx(emulated.losses, rel=2e-2)
