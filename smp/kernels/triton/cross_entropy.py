"""See :mod:`smp.kernels.cross_entropy`. One program reads a row; one per block of it writes the gradient."""

import torch
import triton
import triton.language as tl

FORWARD_BLOCK, FORWARD_WARPS = 4096, 8
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 8


@triton.jit
def add_block(peak, sums, z):
    # The sums so far are relative to the old peak.
    higher = tl.maximum(peak, tl.max(z, axis=0))
    return higher, sums * tl.exp(peak - higher) + tl.exp(z - higher)


@triton.jit
def stats_kernel(logits, columns, peaks, log_sums, targets, stride, valid, BLOCK: tl.constexpr):
    """Online softmax (Milakov & Gimelshein 2018): the sum is rescaled whenever a block brings a larger maximum, so each
    logit is read and exponentiated once. The sum is kept per lane and added up at the end."""
    # int64: row x stride may be more than 2^31.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    peak = tl.full((), -3.4e38, tl.float32)  # finite: a block of minus infinities must not make inf - inf
    # A sum per lane: lanes are added up once, at the end.
    sums = tl.zeros((BLOCK,), tl.float32)
    whole = valid // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):  # without a mask, so that loads are 16 bytes wide for any vocabulary
        z = tl.load(start + first + tl.arange(0, BLOCK)).to(tl.float32)
        peak, sums = add_block(peak, sums, z)
    if whole < valid:
        column = whole + tl.arange(0, BLOCK)
        z = tl.load(start + column, mask=column < valid, other=float("-inf")).to(tl.float32)
        peak, sums = add_block(peak, sums, z)
    target = tl.load(columns + row)
    here = (target >= 0) & (target < valid)
    tl.store(peaks + row, peak)
    tl.store(log_sums + row, tl.log(tl.sum(sums, axis=0)))
    # Not read where the target is another rank's.
    tl.store(targets + row, tl.load(start + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(logits, peaks, log_sums, columns, weights, stride, width, valid, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = logits + row * stride + column
    weight = tl.load(weights + row)
    z = tl.load(offsets, mask=column < width, other=0.0).to(tl.float32)
    # Two subtractions: peak + log_sum in one number would round the small one away.
    gradient = tl.exp((z - tl.load(peaks + row)) - tl.load(log_sums + row)) * weight
    # The target's column loses the weight in the same pass.
    gradient = tl.where(column == tl.load(columns + row), gradient - weight, gradient)
    gradient = tl.where(column < valid, gradient, 0.0)
    tl.store(offsets, gradient.to(logits.dtype.element_ty), mask=column < width)


def _width(logits: torch.Tensor) -> int:
    if logits.stride(1) != 1:
        raise ValueError("the columns of the logits must be contiguous")
    return logits.shape[1]


def softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> torch.Tensor:
    """See :func:`smp.kernels.cross_entropy.softmax_stats`."""
    rows, width = logits.shape[0], _width(logits)
    stats = logits.new_empty((3, rows), dtype=torch.float32)
    block = min(FORWARD_BLOCK, triton.next_power_of_2(max(width, 1)))
    if rows:
        stats_kernel[(rows,)](
            logits,
            columns.contiguous(),
            *stats,
            logits.stride(0),
            valid,
            BLOCK=block,
            num_warps=FORWARD_WARPS,
        )
    return stats


def logits_to_gradient(
    logits: torch.Tensor, stats: torch.Tensor, columns: torch.Tensor, valid: int, weights: torch.Tensor
) -> None:
    """See :func:`smp.kernels.cross_entropy.logits_to_gradient`."""
    rows, width = logits.shape[0], _width(logits)
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(max(width, 1)))
    if rows and width:
        gradient_kernel[(rows, triton.cdiv(width, block))](
            logits,
            *stats[:2].contiguous(),
            columns.contiguous(),
            weights.contiguous(),
            logits.stride(0),
            width,
            valid,
            BLOCK=block,
            num_warps=GRADIENT_WARPS,
        )
