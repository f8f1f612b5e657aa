"""8-bit floating point: rounding under power-of-two scales, and matrix products of what was rounded.

A tensor is stored as 8-bit numbers q and scales s, x ~ q s, with one s for all of it, for each row, or for each block:

    s = 2^k, the smallest with max|x| / s <= the largest number of the format      q = round(x / s)

e4m3 has 3 bits of mantissa and ends at 448, e5m2 has 2 and ends at 57,344. A scale that is a power of two costs a
floating-point format no precision, at most one of its 15 (e5m2: 31) binades at the lower end; quantising and
dequantising are then exact except for the one rounding, and a maximum that another order of a sum moves in its last bit
almost never moves a scale.

Products run on tensor cores (``torch._scaled_mm``, Hopper and later), or are emulated anywhere: the same 8-bit numbers,
multiplied as fp32 and summed in fp32.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from smp.kernels.registry import accumulation_dtype, define

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""The largest finite number of each format."""
BLOCK = 128
"""Numbers that share a scale in blockwise scaling: of a row, or in both directions."""
MX_BLOCK = 32
"""Numbers that share a scale in the OCP microscaling formats, always along the dimension that a product sums."""
ALIGNED = 16
"""Tensor cores take multiples of this many 8-bit numbers."""
_SMALLEST = 2.0**-100


class Quantised(NamedTuple):
    """A matrix as 8-bit numbers, ``data`` (rows, width) times ``inverse``: fp32, 0-dim, or (rows, 1), (1, width), or
    with one number for each block. Also several matrices, (experts, rows, width), with scales 0-dim or of each."""

    data: torch.Tensor
    inverse: torch.Tensor


Operand = torch.Tensor | Quantised
"""An operand of a product: a plain tensor or a quantised one."""


def largest(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """max |x|, fp32: 0-dim, or along ``dim``, which stays with size 1. NaN counts as infinity, which survives a maximum
    over ranks."""
    if x.device.type == "meta":  # for shapes alone, where experts' rows have no number yet
        kept = () if dim is None else [1 if i == dim % x.ndim else size for i, size in enumerate(x.shape)]
        return x.new_empty(kept, dtype=torch.float32)
    if dim is None and not x.numel():  # an expert-parallel rank may have no row
        return x.new_zeros((), dtype=torch.float32)
    if dim is None and x.dtype != torch.float64 and x.is_contiguous() and has_kernels(x.device):
        from smp.kernels.triton import fp8

        with torch.cuda.device(x.device):
            found = fp8.largest(x.detach())
    else:
        found = torch.linalg.vector_norm(x.detach(), math.inf, dim=dim, keepdim=dim is not None).float()
    return found.nan_to_num(nan=math.inf, posinf=math.inf)


def largest_of_blocks(x: torch.Tensor, *, size: int = BLOCK, square: bool = False) -> torch.Tensor:
    """max |x| of each 1 x size block, fp32 (rows, width / size), or of each size x size block,
    (rows / size, width / size).

    Raises:
        ValueError: the size does not divide a dimension.
    """
    if x.shape[1] % size or (square and x.shape[0] % size):
        raise ValueError(f"blockwise scaling of {tuple(x.shape)}: a dimension is not a multiple of {size}")
    # (rows, width / size)
    blocks = x.detach().abs().unflatten(1, (-1, size)).amax(2)
    blocks = blocks.unflatten(0, (-1, size)).amax(1) if square else blocks
    return blocks.float().nan_to_num(nan=math.inf, posinf=math.inf)


def inverse_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale s of the module docstring for each maximum, fp32; 1 for a maximum of 0, NaN for an infinite one, so
    that an overflow appears in every later result."""
    return smallest_scale(amax, LARGEST[dtype])


def smallest_scale(amax: torch.Tensor, end: float) -> torch.Tensor:
    """:func:`inverse_scale` of a format whose largest number is ``end``."""
    # 2^floor(log2(ratio)) is the exponent of the fp32 number alone; 254 - e is that of its inverse.
    ratio = end / amax.clamp(min=_SMALLEST)
    exponent = ratio.view(torch.int32).bitwise_right_shift(23)  # of fp32, with its bias of 127
    inverse = (254 - exponent).bitwise_left_shift(23).view(torch.float32)
    inverse = torch.where(amax == 0, 1.0, inverse)
    # An overflow must show in the loss: under a finite scale it would become the largest number.
    return torch.where(amax.isfinite(), inverse, math.nan)


def quantise(x: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> Quantised:
    """Round a matrix (rows, width), or several (experts, rows, width), to ``dtype`` under scales from
    :func:`inverse_scale`.

    What is too large becomes the largest number (casts of torch before 2.12 would make it NaN).
    """
    # The Triton kernel knows one scale, or those of rows or of columns.
    end, blocks = LARGEST[dtype], any(_of_blocks(n, size) for n, size in zip(inverse.shape, x.shape, strict=False))
    fits = x.dtype != torch.float64 and x.stride(-1) == 1  # the kernel would round fp64 twice
    if fits and not blocks and (x.ndim == 2 or not inverse.ndim) and has_kernels(x.device):
        from smp.kernels.triton import fp8

        with torch.cuda.device(x.device):
            data = fp8.quantise(x.detach().flatten(0, -2), inverse.contiguous(), dtype, end)
        return Quantised(data.view(x.shape), inverse)
    scale = expanded(inverse.reciprocal(), x.shape).to(x.dtype)  # a power of two: exact in bf16 too
    return Quantised((x.detach() * scale).clamp_(-end, end).to(dtype), inverse)


def dequantise(q: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that ``q`` stands for, (rows, width)."""
    # Exact: 8-bit numbers have at most 4 significant bits, and a scale is a power of two (of NVFP4
    # one times an e4m3 number).
    return q.data.to(dtype) * expanded(q.inverse, q.data.shape).to(dtype)


def transposed(q: Quantised) -> Quantised:
    """(rows, width) -> (width, rows)."""
    return Quantised(q.data.t(), q.inverse.t() if q.inverse.ndim else q.inverse)


def scaled_product(
    a: Quantised, b: Quantised, dtype: torch.dtype, *, emulate: bool, fast: bool = False
) -> torch.Tensor:
    """a b^T, (m, k) and (n, k) -> (m, n) of ``dtype``.

    Args:
        a, b: both with one scale, or both with one for each row; emulated also with blocks.
        emulate: multiply the dequantised numbers in fp32 (fp64 for fp64).
        fast: let tensor cores sum in fewer bits ("fast accumulation"), as forward passes do.
    """
    if torch.compiler.is_compiling():
        return _scaled_product_op(*a, *b, dtype, emulate, fast)
    if emulate:
        wide = accumulation_dtype(dtype)
        return (dequantise(a, wide) @ dequantise(b, wide).t()).to(dtype)
    # cuBLAS takes the first operand by rows and the second by columns, both with the summed dimension last.
    left, right = _aligned(a.data), _aligned(b.data)
    by_rows = a.inverse.ndim > 0
    scales = (a.inverse, b.inverse.t()) if by_rows else (a.inverse, b.inverse)
    scale_a, scale_b = (_at_16_bytes(scale.contiguous()) for scale in scales)  # (m, 1) and (1, n)
    return torch._scaled_mm(left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """(rows, k) in the order of its rows, with zeros up to an aligned k: of a weight's gradient k is the tokens."""
    missing = -data.shape[1] % ALIGNED
    if data.stride(0) == 1 and data.shape[0] > 1 and has_kernels(data.device):
        from smp.kernels.triton import fp8

        with torch.cuda.device(data.device):
            return fp8.transpose(data.t(), data.shape[1] + missing)
    if not missing:
        return data.contiguous()
    # As bytes: torch pads no 8-bit floats, and a byte of 0 is the number 0.
    return F.pad(data.contiguous().view(torch.uint8), (0, missing)).view(data.dtype)


def _at_16_bytes(scale: torch.Tensor) -> torch.Tensor:
    """cuBLAS takes no scale from elsewhere, such as the second one of several."""
    return scale.clone() if scale.storage_offset() % 4 else scale


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels, which give the bits of the formulas, run on ``device``: they need 8-bit formats."""
    if device.type != "cuda":
        return False
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 9)


def expanded(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scales of blocks repeated over their blocks; others broadcast as they are."""
    for dim in range(scales.ndim):
        if _of_blocks(scales.shape[dim], shape[dim]):
            scales = scales.repeat_interleave(shape[dim] // scales.shape[dim], dim)
    return scales


def _of_blocks(scales: int, size: int) -> bool:
    """Whether there is more than one scale, and fewer than numbers. Sizes that are equal may be no number yet, in a
    graph of experts' rows: so that is asked first."""
    return scales != size and 1 < scales < size


_scaled_product_op = define(
    "scaled_product(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, ScalarType dtype, bool emulate, bool fast)"
    " -> Tensor",
    lambda a, _as, b, _bs, dtype, _emulate, _fast: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    CompositeExplicitAutograd=lambda a, a_scales, b, b_scales, dtype, emulate, fast: scaled_product(
        Quantised(a, a_scales), Quantised(b, b_scales), dtype, emulate=emulate, fast=fast
    ),
)
