"""Rotary positions against rotations of complex numbers, and scalings against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.config import ModelConfig
from smp.config.layers import rope_scaling
from smp.layers import LinearScaling, RopeScaling, YarnScaling, apply_rope, rope_frequencies, rope_table
from smp.models.rope_scaling import scaling_of
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


THEIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        (
            {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            },
            {
                "rope_scaling_factor": scaling.factor,
                "rope_low_freq_factor": scaling.low_freq_factor,
                "rope_high_freq_factor": scaling.high_freq_factor,
                "rope_original_max_position": scaling.original_max_position,
            },
        )
        for scaling in SCALINGS
    ),
    ({"rope_type": "linear", "factor": 4.0}, {"rope_scaling_factor": 4.0}),
    ({"rope_type": "yarn", "factor": 4.0}, {"rope_scaling_factor": 4.0, "rope_original_max_position": 32768}),
    (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
        {
            "rope_scaling_factor": 40.0,
            "rope_original_max_position": 4096,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
            "yarn_mscale": 0.7,
            "yarn_mscale_all_dim": 0.9,
        },
    ),
    (
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, "attention_factor": 1.25},
        {
            "rope_scaling_factor": 32.0,
            "rope_original_max_position": 4096,
            "yarn_truncate": False,
            "yarn_attention_factor": 1.25,
        },
    ),
    ({"rope_type": "yarn", "factor": 1.0}, {"rope_scaling_factor": 1.0, "rope_original_max_position": 512}),
]
"""What transformers is told of a scaling, and the same in our settings."""


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize(("theirs", "ours"), THEIRS, ids=[str(theirs) for theirs, _ in THEIRS])
def test_scalings_are_those_of_transformers(theirs: dict[str, Any], ours: dict[str, Any], base: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, original = theirs["rope_type"], ours.get("rope_original_max_position")
    beside = {} if original is None else {"original_max_position_embeddings": original}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, **theirs, **beside},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    scaling = scaling_of(rope_scaling(ModelConfig(use_rope_scaling=True, rope_scaling_type=kind, **ours)))
    assert scaling is not None
    assert scaling.amplitude == pytest.approx(factor, rel=1e-12)
    assert torch.allclose(rope_frequencies(128, base, scaling, CPU), frequencies, rtol=2e-6)


def test_yarn_slows_a_ramp_of_channels_and_multiplies_queries_and_keys() -> None:
    scaling = YarnScaling(4.0, 4096, amplitude=1.5)
    plain, scaled = rope_frequencies(64, 1e4, None, CPU), rope_frequencies(64, 1e4, scaling, CPU)
    kept = scaling.kept(plain, 1e4)
    assert kept[0] == 1 and kept[-1] == 0 and 0 < kept[16] < 1
    assert torch.equal(scaled[kept == 1], plain[kept == 1])
    assert torch.allclose(scaled[kept == 0], plain[kept == 0] / 4)
    x, positions = draw(5, 2, 64, seed=4), torch.arange(5)
    got = apply_rope(x, *rope_table(positions, scaled, scaling.amplitude))
    assert torch.allclose(got, 1.5 * apply_rope(x, *rope_table(positions, scaled)), rtol=1e-6, atol=1e-6)


def test_linear_scaling_divides_positions() -> None:
    table = rope_table(torch.arange(0, 40, 4), rope_frequencies(16, 1e4, LinearScaling(4.0), CPU))
    want = rope_table(torch.arange(10), rope_frequencies(16, 1e4, None, CPU))
    assert all(torch.allclose(got, expected, atol=1e-6) for got, expected in zip(table, want, strict=True))
