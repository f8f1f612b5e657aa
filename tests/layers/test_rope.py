"""Rotary positions against rotations of complex numbers, and Llama 3.1's scaling against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.layers import RopeScaling, apply_rope, rope_frequencies, rope_table
from tests.layers.whole import draw, error

CPU = torch.device("cpu")


def rotate(x: torch.Tensor, positions: torch.Tensor, dim: int, base: float) -> torch.Tensor:
    """Channel j of the first half and of the second are one complex number, turned by position x base^(-2 j / dim)."""
    x = x.double()
    numbers = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim])  # (tokens, heads, dim / 2)
    angles = positions.double()[:, None, None] * base ** (-2 * torch.arange(dim // 2).double() / dim)
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[..., dim:]), dim=-1)


@pytest.mark.parametrize("dim", [2, 6, 16])  # of 16 channels: the others pass
@pytest.mark.parametrize("base", [10.0, 10_000.0])
def test_turns_pairs_of_channels_by_position_times_frequency(dim: int, base: float) -> None:
    x, positions = draw(7, 3, 16, seed=0), torch.tensor([0, 1, 2, 100, 0, 5, 1023])
    got = apply_rope(x, *rope_table(positions, rope_frequencies(dim, base, None, CPU)))
    assert error(got, rotate(x, positions, dim, base)) <= 1e-5
    assert torch.equal(got[..., dim:], x[..., dim:])
    assert torch.equal(got[positions == 0], x[positions == 0])


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_depend_on_the_distance_alone(query: int, key: int, shift: int) -> None:
    freqs = rope_frequencies(8, 100.0, None, CPU)
    positions = torch.tensor([query, key, query + shift, key + shift])
    q, k = draw(1, 1, 8, seed=1), draw(1, 1, 8, seed=2)
    turned = apply_rope(torch.cat((q, k, q, k)), *rope_table(positions, freqs)).flatten(1)
    score, shifted = turned[0] @ turned[1], turned[2] @ turned[3]
    assert abs(score - shifted) <= 1e-4 * (q.norm() * k.norm())  # fp32 angles up to 1000


def test_bf16_is_rounded_once_at_the_end() -> None:
    x, positions = draw(9, 2, 8, seed=3, dtype=torch.bfloat16), torch.arange(9) * 100
    table = rope_table(positions, rope_frequencies(8, 100.0, None, CPU))
    got = apply_rope(x, *table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, apply_rope(x.float(), *table).bfloat16())


SCALINGS = [RopeScaling(), RopeScaling(32.0, 1.0, 4.0, 8192), RopeScaling(4.0, 2.0, 5.0, 64)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_llama3_scaling_keeps_short_waves_and_slows_long_ones(scaling: RopeScaling) -> None:
    plain, scaled = rope_frequencies(128, 5e5, None, CPU), rope_frequencies(128, 5e5, scaling, CPU)
    turns = scaling.original_max_position * plain / (2 * math.pi)
    short, long = turns > scaling.high_freq_factor, turns < scaling.low_freq_factor
    assert min(short.sum(), long.sum(), (~(short | long)).sum()) > 0
    assert torch.equal(scaled[short], plain[short])
    assert torch.allclose(scaled[long], plain[long] / scaling.factor, rtol=1e-6)
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_llama3_scaling_is_that_of_transformers(scaling: RopeScaling) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        },
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert attention_factor == 1.0
    assert torch.allclose(rope_frequencies(128, 5e5, scaling, CPU), theirs, rtol=1e-6)
