"""Stochastic rounding to bf16, and to e4m3 with a scale for each block.

Rounding to nearest loses every change below half a step of the format: a moment that decays by 1 - 0.999 does not move
in bf16, whose steps are 0.4 to 0.8 %. Rounding up with a probability equal to the fraction that is cut off is unbiased.
A value that the format can represent is not changed, so reading and writing it back keeps its bits.
"""

from __future__ import annotations

import torch

BLOCK = 128
"""Elements of a row that share a scale."""
_E4M3_MAX, _E4M3_DIGITS, _E4M3_EXPONENT = 448.0, 3, -6
_RANDOM = 16
"""Random bits of an element; a bf16 number is an fp32 one without so many last bits."""


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, up or down at random.

    Args:
        x: fp32, any shape.
        bits: integers of that shape, at least 0 and below 2^16.
    """
    # A random number below the last kept bit, then the bits after it are cut off: the carry is the rounding up.
    cut = x.view(torch.int32) + bits.to(torch.int32)
    rounded = (cut & -(1 << _RANDOM)).view(torch.float32)
    # The bits of infinity plus something are a NaN.
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def round_to_e4m3(x: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 to e4m3, up or down at random, with a power of two as scale of each block of a row.

    Args:
        x: fp32 (rows, columns).
        bits: as of :func:`round_to_bf16`.

    Returns:
        (e4m3 (rows, columns), fp32 scales (rows, ceil(columns / 128))); ``x`` is about their product.
    """
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    # max = mantissa x 2^exponent with mantissa in [0.5, 1): 448 is 0.875 x 2^9.
    mantissa, exponent = torch.frexp(blocks.abs().amax(2))
    exponent = exponent - 9 + (mantissa > _E4M3_MAX / 2**9).int()  # the smallest with max <= 448 x 2^exponent
    # So that the scale and its inverse are normal fp32 numbers.
    scale = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(-126, 126))
    # Exact: a scale is a power of two.
    y = x / expand(scale, x.shape[1])
    _, exponent = torch.frexp(y)
    # Distance to the next e4m3 number: by the exponent, and for subnormal numbers that of the smallest.
    step = torch.ldexp(torch.ones_like(y), (exponent - 1).clamp(min=_E4M3_EXPONENT) - _E4M3_DIGITS)
    # floor(a + u) with u uniform in [0, 1) rounds up with probability a - floor(a).
    rounded = torch.floor(y / step + bits.float() / (1 << _RANDOM)) * step
    # Rounding up may pass the largest number.
    return rounded.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def smallest_e4m3(rounded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``rounded``, the e4m3 form of ``x`` >= 0, with the smallest positive number where a positive ``x`` became 0."""
    smallest = torch.full((), 2.0 ** (_E4M3_EXPONENT - _E4M3_DIGITS), device=x.device)
    wide = rounded.float()
    return torch.where((x > 0) & (wide == 0), smallest, wide).to(torch.float8_e4m3fn)


def expand(scale: torch.Tensor, columns: int) -> torch.Tensor:
    """(rows, blocks) -> (rows, columns)."""
    return scale.repeat_interleave(BLOCK, 1, output_size=scale.shape[1] * BLOCK)[:, :columns]
