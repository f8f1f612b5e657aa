"""Stochastic rounding: right on average, between neighbours, and nothing moves that needs no rounding."""

from __future__ import annotations

import pytest
import torch

from smp.kernels.dropout import keyed_bits
from smp.kernels.precision.low_precision import BLOCK, expand, round_to_bf16, round_to_e4m3, smallest_e4m3

DRAWS = 4096


def bits(rows: int, columns: int, key: int = 1) -> torch.Tensor:
    return keyed_bits(torch.tensor(key), torch.arange(rows), columns) & 0xFFFF


def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 128, generator=generator) * torch.logspace(-6, 3, 128)


def test_bf16_is_right_on_average_and_between_neighbours() -> None:
    x = values().expand(DRAWS, -1).contiguous()
    rounded = round_to_bf16(x, bits(*x.shape)).double()
    step = 2.0 ** (torch.frexp(x[:1])[1].double() - 8)
    assert ((rounded - x).abs() < step).all()
    assert ((rounded.mean(0) - x[0]).abs() / step < 5 * 0.5 / DRAWS**0.5).all()
    nearest = x.to(torch.bfloat16).double()
    assert ((nearest.mean(0) - x[0]).abs() / step > 5 * 0.5 / DRAWS**0.5).any(), "the control: to nearest is not"


def test_e4m3_is_right_on_average_and_between_neighbours() -> None:
    x = values().expand(DRAWS, -1).contiguous()
    rounded, scale = round_to_e4m3(x, bits(*x.shape))
    wide = rounded.double() * expand(scale, 128)
    assert (x.abs().max() / 448 <= scale).all() and (scale < x.abs().max() / 224).all()
    _, exponent = torch.frexp(x / scale)
    step = scale.double() * 2.0 ** ((exponent - 1).clamp(min=-6) - 3)
    assert ((wide - x).abs() <= step * (1 + 1e-6)).all()
    assert ((wide.mean(0) - x[0]).abs() / step[0] < 5 * 0.5 / DRAWS**0.5).all()


def test_what_is_read_and_written_back_keeps_its_value() -> None:
    x, random = torch.cat([values()] * 3, 1), bits(1, 384)  # three blocks
    once = round_to_bf16(x, random)
    assert torch.equal(round_to_bf16(once.float(), bits(1, 384, key=2)), once)
    rounded, scale = round_to_e4m3(x, random)
    wide = rounded.float() * expand(scale, 384)
    again, new_scale = round_to_e4m3(wide, bits(1, 384, key=2))
    assert torch.equal(again.float() * expand(new_scale, 384), wide)
    root = wide.abs()
    squared = root.square()
    assert torch.equal(squared.sqrt(), root), "a second moment is its root's square, exactly"


def test_zeros_infinities_and_short_rows() -> None:
    x = torch.tensor([[0.0, float("inf"), float("nan"), -float("inf")]])
    assert torch.equal(round_to_bf16(x, bits(1, 4)).isfinite(), x.isfinite())
    rounded, scale = round_to_e4m3(torch.zeros(2, BLOCK + 3), bits(2, BLOCK + 3))
    assert scale.shape == (2, 2) and not rounded.float().any()


def test_a_second_moment_does_not_become_zero() -> None:
    x = torch.tensor([[1.0, 1e-7, 0.0]])
    rounded, _ = round_to_e4m3(x, torch.zeros(1, 3, dtype=torch.int64))
    kept = smallest_e4m3(rounded, x).float()
    assert rounded.float()[0, 1] == 0 and kept[0, 1] == 2**-9 and kept[0, 2] == 0 and kept[0, 0] > 0


def test_small_changes_arrive() -> None:
    """What rounding to nearest loses: a moment that decays by 0.1 % a step."""
    x = torch.full((64, BLOCK), 1.0)
    stochastic, nearest = x.to(torch.bfloat16), x.to(torch.bfloat16)
    for step in range(500):
        stochastic = round_to_bf16(stochastic.float() * 0.999, bits(64, BLOCK, key=step))
        nearest = (nearest.float() * 0.999).to(torch.bfloat16)
    assert stochastic.float().mean() == pytest.approx(0.999**500, rel=2e-3)
    assert nearest.float().mean() == 1.0
