"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-rotation order of Hugging Face and
Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths are slowed by ``factor``, short ones kept, a ramp in between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    amplitude: ClassVar[float] = 1.0

    def kept(self, freqs: torch.Tensor, base: float) -> torch.Tensor:
        """How much of each frequency is kept, 1: left alone, 0: divided by the factor."""
        turns = self.original_max_position * freqs / (2 * math.pi)  # rotations within the original context
        low, high = self.low_freq_factor, self.high_freq_factor
        if low == high:  # no ramp: a step
            return (turns > low).to(freqs.dtype)
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): every wavelength is slowed by ``factor``."""

    factor: float
    amplitude: ClassVar[float] = 1.0

    def kept(self, freqs: torch.Tensor, base: float) -> torch.Tensor:
        """0: every frequency is divided by the factor."""
        return torch.zeros_like(freqs)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): the ramp is linear in the number of the channel, and queries and keys
    grow, which makes attention sharper.

    Attributes:
        factor: long wavelengths are slowed by it.
        original_max_position: context length before the scaling.
        beta_fast, beta_slow: turns within the original context above which a wavelength is kept, and below which it is
            slowed fully.
        truncate: the ramp begins and ends at whole channels.
        amplitude: what rotated queries and keys are multiplied by, see :func:`yarn_amplitude`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    def kept(self, freqs: torch.Tensor, base: float) -> torch.Tensor:
        """How much of each frequency is kept, 1: left alone, 0: divided by the factor."""
        pairs = len(freqs)
        # Fast channels come first: many turns within the original context.
        low, high = (self._channel(turns, pairs, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # As transformers clamps them: to the last channel, not to the last pair.
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        channels = torch.arange(pairs, dtype=torch.float32, device=freqs.device)
        # As in the authors' code: a ramp without a width would divide by 0.
        return 1 - ((channels - low) / (high - low or 0.001)).clamp(0.0, 1.0)

    def _channel(self, turns: float, pairs: int, base: float) -> float:
        """The (fractional) number of the channel pair that turns so often within the original context."""
        return pairs * math.log(self.original_max_position / (turns * 2 * math.pi)) / math.log(base)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753), as Phi-3 has it: every wavelength has two factors of its own, one
    for sequences up to the original context length and one for longer ones. All tokens of a sequence have the same.

    Attributes:
        short, long: the factors, one for each pair of channels.
        original_max_position: context length before the scaling.
        amplitude: what rotated queries and keys are multiplied by, see :func:`longrope_amplitude`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    amplitude: float = 1.0

    def frequencies(self, freqs: torch.Tensor, sequence_lengths: torch.Tensor) -> torch.Tensor:
        """Frequencies of each token, (tokens, dim / 2).

        Args:
            freqs: what :func:`rope_frequencies` gives, (2, dim / 2).
            sequence_lengths: (tokens,), tokens of the sequence that each belongs to.
        """
        # A row for each token: packed samples of different lengths lie side by side.
        return freqs[(sequence_lengths > self.original_max_position).long()]


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK scaling (bloc97 and emozilla, 2023): a sequence longer than the original context has a larger base,
    the larger the longer it is. All tokens of a sequence have the same; shorter ones are as without scaling.

    Attributes:
        factor: how fast the base grows.
        original_max_position: context length before the scaling.
    """

    factor: float
    original_max_position: int
    amplitude: ClassVar[float] = 1.0

    def frequencies(self, freqs: torch.Tensor, base: float, sequence_lengths: torch.Tensor) -> torch.Tensor:
        """Frequencies of each token, (tokens, dim / 2).

        Args:
            freqs: what :func:`rope_frequencies` gives, (dim / 2,).
            base: theta.
            sequence_lengths: (tokens,), tokens of the sequence that each belongs to.
        """
        dim, original = 2 * len(freqs), self.original_max_position
        lengths = sequence_lengths.clamp(min=original)
        # In the order of transformers, so that all bits are its.
        growth = (self.factor * lengths / original - (self.factor - 1)) ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=freqs.device) / dim
        grown = 1.0 / (base * growth.to(torch.float32))[:, None] ** exponents
        return torch.where((sequence_lengths > original)[:, None], grown, freqs)


def longrope_amplitude(factor: float, original_max_position: int) -> float:
    """LongRoPE's factor of cos and sin for a context that grows by ``factor``: sqrt(1 + ln(factor) / ln(original))."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def yarn_amplitude(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's factor of cos and sin: 0.1 ln(factor) + 1, or DeepSeek's quotient of two such numbers."""

    if not mscale or not mscale_all_dim:
        return yarn_growth(factor)
    return yarn_growth(factor, mscale) / yarn_growth(factor, mscale_all_dim)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


Scaling = RopeScaling | LinearScaling | YarnScaling | LongRopeScaling | DynamicScaling


def rope_frequencies(dim: int, base: float, scaling: Scaling | None, device: torch.device) -> torch.Tensor:
    """Angular frequencies, fp32 (dim / 2,); with LongRoPE (2, dim / 2), of short and of long sequences; with dynamic
    scaling those of short ones. Computed when needed: a buffer would be lost by meta-device init."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    if isinstance(scaling, LongRopeScaling):
        return 1.0 / (torch.tensor((scaling.short, scaling.long), device=device) * base**exponents)
    freqs = 1.0 / base**exponents
    if scaling is None or isinstance(scaling, DynamicScaling):
        return freqs
    # A wavelength is kept, or slowed by the factor, or between the two.
    keep = scaling.kept(freqs, base)
    return freqs * (keep + (1 - keep) / scaling.factor)


def rope_table(
    positions: torch.Tensor, freqs: torch.Tensor, amplitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for integer ``positions`` (tokens,), each fp32 (tokens, 1, dim): one head axis to broadcast over.
    ``freqs`` are (dim / 2,), or (tokens, dim / 2). Both are multiplied by ``amplitude``, and so is what they rotate."""
    # In fp32: bf16 cannot tell integers above 256 apart.
    angles = positions.to(torch.float32)[:, None] * freqs  # (tokens, dim / 2)
    # Both halves of a head turn by the same angles.
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude)


def temperature(positions: torch.Tensor, floor_scale: int, attn_scale: float) -> torch.Tensor:
    """Temperature of queries at integer ``positions`` (tokens,), because attention flattens over long texts
    (Llama 4, after arXiv 2501.19399): fp32 (tokens, 1, 1), 1 for the first ``floor_scale`` - 1 tokens."""
    steps = ((positions.to(torch.float32) + 1) / floor_scale).floor()
    return (steps.log1p() * attn_scale + 1)[:, None, None]
