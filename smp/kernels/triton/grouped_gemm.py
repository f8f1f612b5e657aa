"""See :mod:`smp.kernels.experts.grouped`: as many programs as multiprocessors take tiles of all experts in turn, and
read on the device where an expert's rows begin. An expert's last tile has rows that are not its own; they are neither
read nor written, so an infinite row of another expert does not matter, and experts without rows have no tiles."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from smp.kernels.registry import interpreted

GROUP = 8
"""Tiles of rows that are computed with the same columns one after the other: what they read stays in the L2 cache."""
FEW_ROWS = 256
"""Rows of an expert, on average, up to which tiles are half as high: half of an expert's last tile is idle."""


@triton.jit
def _tile_at(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(Row, column) of a tile of a matrix of tiles, ``GROUP`` rows of them at a time, down and then to the right."""
    # The order of Triton's matmul tutorial ("grouped ordering"), for the L2 cache.
    in_group = GROUP * column_tiles
    first = tile // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def _add_product(
    total,
    a,
    b,
    row,
    column,
    rows,
    columns,
    inner,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``total`` plus the tile at ``row`` and ``column`` of a b, of an a (rows, inner) and a b (inner, columns) that lie
    in memory as they are written here, or transposed."""
    k = tl.arange(0, BLOCK_INNER)
    # 32 bits a number, which an expert's matrix must fit into, or there are not registers enough.
    left = row[:, None] * inner + k[None, :] if A_BY_ROWS else k[None, :] * rows + row[:, None]
    right = k[:, None] * columns + column[None, :] if B_BY_ROWS else column[None, :] * inner + k[:, None]
    own, other = row[:, None] < rows, column[None, :] < columns
    for start in range(0, inner, BLOCK_INNER):
        x = tl.load(a + left, mask=own & (k[None, :] < inner - start), other=0.0)
        # Zeros where the summed dimension ends, in both operands: 0 x Inf of memory after it would be NaN.
        y = tl.load(b + right, mask=other & (k[:, None] < inner - start), other=0.0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        a += BLOCK_INNER if A_BY_ROWS else BLOCK_INNER * rows
        b += BLOCK_INNER * columns if B_BY_ROWS else BLOCK_INNER
    return total


@triton.jit
def rows_kernel(
    x,
    weight,
    x_too,
    weight_too,
    counts,
    out,
    experts,
    inner,
    width,
    BOTH: tl.constexpr,
    BY_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Each expert's rows (n, inner) times its matrix: ``BY_ROWS`` (inner, width), else (width, inner). ``BOTH``: plus
    the product of a second pair."""
    number = tl.arange(0, EXPERTS)
    # All counts in registers: each program finds its expert by itself, and the host need not know them.
    count = tl.load(counts + number, mask=number < experts, other=0).to(tl.int32)
    tiles = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    ends, column_tiles = tl.cumsum(tiles, axis=0), tl.cdiv(width, BLOCK_COLUMNS)
    # Persistent programs: each takes every n-th tile of all experts, whatever the counts are.
    for tile in range(tl.program_id(0), tl.sum(tiles, axis=0) * column_tiles, tl.num_programs(0)):
        # As many experts as end before this tile.
        expert = tl.sum((ends * column_tiles <= tile).to(tl.int32), axis=0)
        # Masks over the experts, because a program cannot index a tensor in registers.
        before, at = number < expert, number == expert
        own = tile - tl.sum(tl.where(before, tiles, 0), axis=0) * column_tiles
        row_tile, column_tile = _tile_at(own, tl.sum(tl.where(at, tiles, 0), axis=0), column_tiles, GROUP)
        # int64: rows x width may be more than 2^31.
        first = (tl.sum(tl.where(before, count, 0), axis=0) + row_tile * BLOCK_ROWS).to(tl.int64)
        # Rows of the expert from this tile on; the last tile has fewer than BLOCK_ROWS.
        left = tl.sum(tl.where(at, count, 0), axis=0) - row_tile * BLOCK_ROWS
        row, column = tl.arange(0, BLOCK_ROWS), column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        matrix = expert.to(tl.int64) * inner * width
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        total = _add_product(
            total,
            x + first * inner,
            weight + matrix,
            row,
            column,
            left,
            width,
            inner,
            True,
            BY_ROWS,
            BLOCK_INNER,
            PRECISION,
            WIDEN,
        )
        if BOTH:
            total = _add_product(
                total,
                x_too + first * inner,
                weight_too + matrix,
                row,
                column,
                left,
                width,
                inner,
                True,
                BY_ROWS,
                BLOCK_INNER,
                PRECISION,
                WIDEN,
            )
        inside = (row[:, None] < left) & (column[None, :] < width)
        to = out + first * width + row[:, None] * width + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weights_kernel(
    grad,
    x,
    counts,
    out,
    experts,
    height,
    width,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """(height, width) for each expert: its rows of ``grad`` (n, height), transposed, times those of x (n, width)."""
    number = tl.arange(0, EXPERTS)
    count = tl.load(counts + number, mask=number < experts, other=0).to(tl.int32)
    row_tiles, column_tiles = tl.cdiv(height, BLOCK_ROWS), tl.cdiv(width, BLOCK_COLUMNS)
    for tile in range(tl.program_id(0), experts * row_tiles * column_tiles, tl.num_programs(0)):
        # All experts have as many tiles here, unlike in ``rows_kernel``.
        expert = tile // (row_tiles * column_tiles)
        row_tile, column_tile = _tile_at(tile % (row_tiles * column_tiles), row_tiles, column_tiles, GROUP)
        first = tl.sum(tl.where(number < expert, count, 0), axis=0).to(tl.int64)
        # The summed dimension is the expert's rows; without rows the tile stores zeros.
        rows = tl.sum(tl.where(number == expert, count, 0), axis=0)
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        total = _add_product(
            total,
            grad + first * height,
            x + first * width,
            row,
            column,
            height,
            width,
            rows,
            False,
            True,
            BLOCK_INNER,
            PRECISION,
            WIDEN,
        )
        inside = (row[:, None] < height) & (column[None, :] < width)
        to = out + (expert.to(tl.int64) * height + row[:, None]) * width + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def options(dtype: torch.dtype, rows: int, experts: int, large: bool) -> dict[str, Any]:
    """Shape of a tile, and warps and stages of what loads it, without a spilled register on sm_90 in Triton 3.6 and 3.7
    and on sm_80 in 3.7. In bf16 128 x 256 numbers are two groups of four warps with 128 registers a thread for the sum,
    and three stages of 48 KB most of a Hopper's shared memory.

    Args:
        dtype: of the operands.
        rows, experts: of rows that tiles cut by experts.
        large: whether a multiprocessor has that much shared memory, see :func:`is_large`.
    """
    if dtype == torch.bfloat16 and has_few(rows, experts):
        tile = {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 128, "BLOCK_INNER": 64, "num_warps": 4, "num_stages": 3 + large}
    elif dtype == torch.bfloat16 and large:
        tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 256, "BLOCK_INNER": 64, "num_warps": 8, "num_stages": 3}
    elif dtype == torch.bfloat16:
        tile = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_INNER": 32, "num_warps": 8, "num_stages": 4}
    else:
        # fp32: without TF32 there are no tensor cores, and a tile's sum has to fit into registers.
        tile = {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64, "BLOCK_INNER": 16, "num_warps": 4, "num_stages": 3}
    # As PyTorch's products in fp32: Triton would take TF32. (torch.get_float32_matmul_precision() fails where somebody
    # has set this attribute.)
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    # The interpreter of Triton 3.7 multiplies the bits of numbers in bf16, as if they were integers.
    return {**tile, "GROUP": GROUP, "PRECISION": "ieee" if exact else "tf32", "WIDEN": interpreted()}


def is_large(device: torch.device) -> bool:
    """Whether a multiprocessor is a data centre's Hopper or Blackwell, with 227 KB of shared memory: others have 99 KB
    (Ada, consumers' Blackwell), and an A100's 163 KB do not help, because its products keep operands in registers."""
    return interpreted() or torch.cuda.get_device_capability(device)[0] in (9, 10)


def has_few(rows: int, experts: int) -> bool:
    """Whether experts have few of the rows on average."""
    return rows <= FEW_ROWS * experts


def programs(device: torch.device, small: bool) -> int:
    """Number of programs: one per multiprocessor, two with small tiles; in the interpreter a few, so that each takes
    several tiles."""
    return 3 if interpreted() else (1 + small) * torch.cuda.get_device_properties(device).multi_processor_count


def forward(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """See :func:`smp.kernels.experts.grouped.grouped_product`."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    _rows_times([x], [weight], counts, out, by_rows=False)
    return out


def input_gradient(
    grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], counts: torch.Tensor
) -> torch.Tensor:
    """The sum over one or two pairs, in fp32 and rounded once."""
    if len(grads) > 2:
        raise ValueError(f"the Triton kernel adds up two products of experts, not {len(grads)}")
    out = grads[0].new_empty(grads[0].shape[0], weights[0].shape[2])
    _rows_times(grads, weights, counts, out, by_rows=True)
    return out


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """See :func:`smp.kernels.experts.grouped.grouped_weight_gradient`."""
    _require(grad.dtype, grad.shape[1] * x.shape[1])
    out = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    if out.numel():
        grid = (programs(x.device, x.dtype != torch.bfloat16),)
        given = grad.contiguous(), x.contiguous(), counts.contiguous(), out, *out.shape
        weights_kernel[grid](*given, EXPERTS=_lanes(counts), **options(x.dtype, 1, 0, is_large(x.device)))
    return out


def _rows_times(
    rows: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    counts: torch.Tensor,
    out: torch.Tensor,
    by_rows: bool,
) -> None:
    _require(out.dtype, weights[0][0].numel())
    if out.numel():
        # The kernel knows no strides.
        rows, weights = ([t.contiguous() for t in given] for given in (rows, weights))
        inner, width, sizes = rows[0].shape[1], out.shape[1], (out.shape[0], len(counts))
        grid = (programs(out.device, out.dtype != torch.bfloat16 or has_few(*sizes)),)
        rows_kernel[grid](
            rows[0],
            weights[0],
            rows[-1],
            weights[-1],
            counts.contiguous(),
            out,
            len(counts),
            inner,
            width,
            BOTH=len(rows) > 1,
            BY_ROWS=by_rows,
            EXPERTS=_lanes(counts),
            **options(out.dtype, *sizes, is_large(out.device)),
        )


def _lanes(counts: torch.Tensor) -> int:
    return triton.next_power_of_2(len(counts))


def _require(dtype: torch.dtype, matrix: int) -> None:
    """Raise unless the kernels take ``dtype`` and a ``matrix`` of so many elements per expert."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the Triton kernel of experts' products takes bf16 and fp32, not {dtype}")
    if matrix >= 1 << 31:
        raise ValueError(
            f"the Triton kernel of experts' products takes matrices of fewer than 2^31, not {matrix} numbers"
        )
