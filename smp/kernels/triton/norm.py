"""See :mod:`smp.kernels.norm`. A program takes a tile of whole rows; in the backward pass a few programs per
multiprocessor go over all tiles and add up the weights' gradients in registers, a partial sum each."""

from typing import Any

import torch
import triton
import triton.language as tl

from smp.kernels.dispatch import LONGEST_ROW
from smp.kernels.registry import interpreted

TILE = 2048
"""Elements of a tile: one long row, or several short ones (heads of qk-norm)."""
STAGES = 1
"""Tiles of a backward pass that a program loads at the same time, but for its first: with 2 the next rows are on their
way while this one is summed, without more registers than there are. Only 1 was measured (docs/kernels.md)."""
SUM_PARTS, SUM_COLUMNS, SUM_WARPS = 256, 32, 8
"""Parts, columns and warps of a tile of partial sums."""


@triton.jit
def forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    scale,
    rows,
    features,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < features)
    offsets = row[:, None] * features + column[None, :]
    # (ROWS, BLOCK): whole rows, so that mean and variance need no second kernel
    wide = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=inside)
        # What is normalized is the rounded sum, as without fusion: the same bits.
        wide = rounded.to(tl.float32)
    if CENTER:
        average = tl.sum(wide, axis=1) / features
        tl.store(mean + row, average, mask=row < rows)
        # Lanes after the row would add the square of the mean.
        wide = tl.where(inside, wide - average[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / features + EPS)
    tl.store(scale + row, inverse, mask=row < rows)
    out = wide * inverse[:, None] * tl.load(weight + column, mask=column < features, other=0.0).to(tl.float32)[None, :]
    if CENTER:
        out += tl.load(bias + column, mask=column < features, other=0.0).to(tl.float32)[None, :]
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dy,
    dtotal,
    x,
    weight,
    mean,
    scale,
    dx,
    dweight,
    dbias,
    rows,
    features,
    tiles,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    # Each program takes every n-th tile, always the same ones: the partial sums have one order.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < features)
        offsets = row[:, None] * features + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        if CENTER:
            normal = tl.where(inside, normal - tl.load(mean + row, mask=row < rows, other=0.0)[:, None], 0.0)
        normal *= inverse
        g = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        dw += tl.sum(g * normal, axis=0)
        if CENTER:
            db += tl.sum(g, axis=0)
        # read again for each row: it comes from a cache, and the registers are full
        g *= tl.load(weight + column, mask=column < features, other=0.0).to(tl.float32)[None, :]
        # dx of the module's formula, before the factor 1 / std.
        out = g - normal * (tl.sum(g * normal, axis=1) / features)[:, None]
        if CENTER:
            out -= (tl.sum(g, axis=1) / features)[:, None]
        out *= inverse
        if ADD:
            out += tl.load(dtotal + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, out.to(dx.dtype.element_ty), mask=inside)
    # No atomics: a second kernel adds up the partial sums in a fixed order.
    partial = tl.program_id(0).to(tl.int64) * features + column
    tl.store(dweight + partial, dw, mask=column < features)
    if CENTER:
        tl.store(dbias + partial, db, mask=column < features)


@triton.jit
def sum_kernel(partial, out, out_bias, parts, features, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over ``parts``, of the weights' gradient and then of the biases'. (torch's sum took 16 us of a backward
    pass of 76 on an H200.)"""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1).to(tl.int64)
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part[:, None] < parts) & (column[None, :] < features)
        offsets = (which * parts + part[:, None]) * features + column[None, :]
        total += tl.load(partial + offsets, mask=inside, other=0.0)
    # In one order for every launch: (PARTS, COLUMNS) lanes, then over the lanes.
    found = tl.sum(total, axis=0).to(out.dtype.element_ty)
    if which == 0:
        tl.store(out + column, found, mask=column < features)
    else:
        tl.store(out_bias + column, found, mask=column < features)


def tile_options(features: int) -> dict[str, Any]:
    """Shape of a tile and warps that work on it: 16 elements a thread, 8 of the longest rows.

    More threads would be fewer registers each: with these no register spills on sm_80 and sm_90, in Triton 3.6 and 3.7.

    Raises:
        ValueError: rows longer than ``LONGEST_ROW``.
    """
    if features > LONGEST_ROW:
        raise ValueError(f"a norm over {features} features: the Triton kernel takes at most {LONGEST_ROW}")
    block = triton.next_power_of_2(features)
    rows = max(1, min(16, TILE // block))
    per_warp = 256 if block == LONGEST_ROW else 512
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(4, rows * block // per_warp)}


def programs(device: torch.device, has_bias: bool) -> int:
    """Programs that share the rows of a backward pass; in the interpreter a few, so that some take two tiles.

    As many for each multiprocessor as were fastest on an H200, 8,192 rows of 4,096 (docs/kernels.md)."""
    if interpreted():
        return 3
    return (2 if has_bias else 3) * torch.cuda.get_device_properties(device).multi_processor_count


def backward_options(features: int, has_bias: bool) -> dict[str, Any]:
    """:func:`tile_options`, with twice the warps where two sums are kept in registers."""
    options = tile_options(features)
    return {**options, "num_warps": min(2 * options["num_warps"], 32)} if has_bias else options


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """See :func:`smp.kernels.norm.forward_reference`."""
    (rows, features), options = x.shape, tile_options(x.shape[1])
    y, total = x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)
    mean = x.new_empty(0 if bias is None else rows, dtype=torch.float32)
    scale = x.new_empty(rows, dtype=torch.float32)
    if rows:
        flags = {"EPS": eps, "ADD": residual is not None, "CENTER": bias is not None}
        grid = (triton.cdiv(rows, options["ROWS"]),)
        added, shift = x if residual is None else residual, weight if bias is None else bias  # not read
        forward_kernel[grid](x, added, weight, shift, y, total, mean, scale, rows, features, **flags, **options)
    return y, total, mean, scale


def backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    has_bias: bool,
    stages: int = STAGES,
) -> tuple[torch.Tensor, ...]:
    """See :func:`smp.kernels.norm.backward_reference`."""
    (rows, features), options = x.shape, backward_options(x.shape[1], has_bias)
    tiles = triton.cdiv(rows, options["ROWS"])
    # Not more programs than tiles, or partial sums would be stored by programs without rows.
    parts = min(tiles, programs(x.device, has_bias))
    dx = x.new_empty(x.shape)
    partial = x.new_empty((1 + has_bias, parts, features), dtype=torch.float32)
    dweight = weight.new_empty(features) if rows else weight.new_zeros(features)
    dbias = torch.zeros_like(dweight) if has_bias and not rows else weight.new_empty(features if has_bias else 0)
    if rows:
        flags = {"ADD": dtotal is not None, "CENTER": has_bias, "STAGES": stages}
        added = dy if dtotal is None else dtotal  # not read
        backward_kernel[(parts,)](
            dy, added, x, weight, mean, scale, dx, partial[0], partial[-1], rows, features, tiles, **flags, **options
        )
        sum_partials(partial, dweight, dbias)
    return dx, dweight, dbias


def sum_partials(partial: torch.Tensor, dweight: torch.Tensor, dbias: torch.Tensor) -> None:
    """Sums of ``partial``, fp32 (1 or 2, parts, features), into (features,), and into ``dbias`` if there are two."""
    kinds, parts, features = partial.shape
    grid = (triton.cdiv(features, SUM_COLUMNS), kinds)
    options = {"PARTS": SUM_PARTS, "COLUMNS": SUM_COLUMNS, "num_warps": SUM_WARPS}
    sum_kernel[grid](partial, dweight, dbias, parts, features, **options)
