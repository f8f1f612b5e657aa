"""NVFP4: rounding to 4 bits under two scales (NVIDIA 2025, arXiv 2509.25149), in the arithmetic of other precisions.

A number is e2m1, one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign. 16 neighbours, or 16 x 16 of a weight, share a scale
in e4m3, and a tensor has one more, without which those would leave e4m3's range:

    t = 2^k, the smallest with max|x| / t <= 6 * 448        of the tensor
    s = e4m3(max|block| / (6 t))                            of a block, rounded to the nearest
    q = e2m1(x / (s t)), to the nearest, at most 6          x ~ q s t

t is a power of two here, as all scales of this package; NVIDIA's is max|x| / (6 * 448) itself. That costs at most one
of e4m3's binades at the lower end, and q s t is exact in fp32. Numbers are stored as e4m3, which
represents every e2m1 value, in one byte each.
"""

from __future__ import annotations

import math

import torch

from smp.kernels.precision.fp8 import E4M3, LARGEST, Quantised, expanded, largest_of_blocks, smallest_scale
from smp.kernels.registry import accumulation_dtype

NV_BLOCK = 16
"""Numbers that share a scale: along the dimension that a product sums, or in both of a weight."""
_END = 6.0


def tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    """The t of this file's header for each maximum, fp32."""
    return smallest_scale(amax, _END * LARGEST[E4M3])


def quantise_to_e2m1(x: torch.Tensor, tensor: torch.Tensor, *, square: bool = False) -> Quantised:
    """Round a matrix (rows, width) under its ``tensor`` scale (0-dim), and one for each 16 numbers of a row, or with
    ``square`` for each 16 x 16. An infinite tensor becomes NaN.

    Raises:
        ValueError: 16 does not divide a dimension.
    """
    amax = largest_of_blocks(x, size=NV_BLOCK, square=square)
    # Rounded to e4m3, as the hardware keeps them, then with the tensor's scale in one fp32 number.
    scales = (amax / (_END * tensor)).clamp(max=LARGEST[E4M3]).to(E4M3).float() * tensor
    divisors = torch.where(scales == 0, math.inf, scales)  # of zeros, and of what is too small for e4m3
    wide = x.detach().to(accumulation_dtype(x.dtype))
    return Quantised(_nearest(wide / expanded(divisors, x.shape).to(wide.dtype)).to(E4M3), scales)


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of e2m1, of two equally near ones that with an even mantissa."""
    size = x.abs()
    # e2m1: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6.
    step = torch.where(size <= 2, 0.5, torch.where(size <= 4, 1.0, 2.0)).to(x.dtype)
    return ((x / step).round() * step).clamp(-_END, _END)
