"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-rotation order of Hugging Face and
Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from smp.kernels.rope import rotate


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths are slowed by ``factor``, short ones kept, a ramp in between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rope_frequencies(dim: int, base: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    """Angular frequencies, fp32 (dim / 2,). Computed when needed: a buffer would be lost by meta-device init."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    freqs = 1.0 / base**exponents
    if scaling is None:
        return freqs
    turns = scaling.original_max_position * freqs / (2 * math.pi)  # rotations within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return freqs * (keep + (1 - keep) / scaling.factor)


def rope_table(positions: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for integer ``positions`` (tokens,), each fp32 (tokens, 1, dim): one head axis to broadcast over."""
    angles = positions.to(torch.float32)[:, None] * freqs  # (tokens, dim / 2)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``dim`` channels of every head, x (tokens, heads, head_dim); arithmetic in fp32, dtype kept."""
    return rotate(x, cos, sin)
