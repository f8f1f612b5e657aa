"""See :mod:`smp.kernels.precision.fp8`: the largest number of a matrix, a matrix rounded to 8 bits, each in one pass
over it, and 8-bit numbers transposed."""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 2048, 4
"""Elements of a row that one program quantises, 16 a thread."""
LARGEST_BLOCK, LARGEST_WARPS = 16384, 8
"""Elements of which one program finds the largest, 64 a thread."""
TILE, TILE_WARPS = 128, 8
"""Rows and columns of what one program transposes, 64 bytes a thread."""


@triton.jit
def largest_kernel(x, bits, count, BLOCK: tl.constexpr):
    """The bits of magnitudes, as integers, have the order of the magnitudes; infinity is larger than every number, and
    NaN larger than infinity."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    # Atomics on integers have one result whatever their order, unlike a sum.
    magnitude = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(bits, tl.max(magnitude, axis=0))


@triton.jit
def quantise_kernel(
    x,
    inverse,
    out,
    stride,
    row_step,
    width,
    END: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if BY_COLUMN:
        # Rounded to nearest: Triton's own division is approximate, and powers of two have to stay exact.
        scale = tl.div_rn(1.0, tl.load(inverse + column, mask=inside, other=1.0))
    else:
        scale = tl.div_rn(1.0, tl.load(inverse + row * row_step))
    scaled = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32) * scale
    # By default Triton's minimum drops NaN, and an overflow would not show.
    scaled = tl.minimum(scaled, END, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.maximum(scaled, -END, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def transpose_kernel(x, out, stride, out_stride, rows, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    # Read by rows and stored by rows: both sides of a transposition are coalesced.
    tile = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0)
    # rows of the result are padded with the zeros that were not loaded
    stored = (column[:, None] < width) & (row[None, :] < out_stride)
    tl.store(out + column[:, None] * out_stride + row[None, :], tl.trans(tile), mask=stored)


def largest(x: torch.Tensor) -> torch.Tensor:
    """max |x| of a contiguous tensor, fp32 0-dim; NaN where one is not a number."""
    bits = x.new_zeros((), dtype=torch.int32)
    if x.numel():
        grid = (triton.cdiv(x.numel(), LARGEST_BLOCK),)
        largest_kernel[grid](x, bits, x.numel(), BLOCK=LARGEST_BLOCK, num_warps=LARGEST_WARPS)
    return bits.view(torch.float32)


def quantise(x: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, end: float) -> torch.Tensor:
    """``x`` (rows, width), whose rows are contiguous, divided by ``inverse``, a power of two each, cut to +- ``end``
    and rounded to ``dtype``. ``inverse`` is contiguous: 0-dim, (rows, 1) or (1, width)."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    by_column = inverse.ndim > 0 and inverse.shape[1] > 1
    row_step = int(inverse.ndim > 0 and inverse.shape[0] > 1)
    if out.numel():
        grid = (rows, triton.cdiv(width, BLOCK))
        options = {"END": end, "BY_COLUMN": by_column, "BLOCK": BLOCK, "num_warps": WARPS}
        quantise_kernel[grid](x, inverse, out, x.stride(0), row_step, width, **options)
    return out


def transpose(data: torch.Tensor, padded: int) -> torch.Tensor:
    """8-bit numbers (rows, width), whose rows are contiguous -> (width, ``padded`` >= rows), zeros after."""
    (rows, width), numbers = data.shape, data.view(torch.uint8)
    out = numbers.new_empty(width, padded)
    if out.numel():
        grid = (triton.cdiv(padded, TILE), triton.cdiv(width, TILE))
        transpose_kernel[grid](numbers, out, numbers.stride(0), padded, rows, width, TILE=TILE, num_warps=TILE_WARPS)
    return out.view(data.dtype)
