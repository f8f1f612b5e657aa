"""See :mod:`smp.kernels.experts.permute`: a program computes a block of a row, or a whole row for the gradients of
weights, and adds in the order of a token's choices. The size of the blocks is a constant of this file."""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4


@triton.jit
def gather_kernel(x, index, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # Choice c belongs to token c // K.
    source = tl.load(index + row) // K
    tl.store(out + row * width + column, tl.load(x + source * width + column, mask=inside), mask=inside)


@triton.jit
def combine_kernel(rows, weights, choices, out, width, WEIGHTED: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    # In the order of the choices, in fp32: one result for every launch.
    for i in tl.static_range(K):
        row = tl.load(choices + token * K + i)
        value = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + i).to(tl.float32)
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_backward_kernel(grad, rows, weights, order, drows, products, width, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # One program has the whole row, for the dot product of dy and the row is over all of it.
    choice = tl.load(order + row)
    weight = tl.load(weights + choice).to(tl.float32)
    token = choice // K
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(grad + token * width + column, mask=inside, other=0.0).to(tl.float32)
        total += g * tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(drows + row * width + column, (g * weight).to(drows.dtype.element_ty), mask=inside)
    # The gradient of this choice's weight, by the sorted row.
    tl.store(products + row, tl.sum(total, axis=0))


def gather(x: torch.Tensor, index: torch.Tensor, k: int) -> torch.Tensor:
    """See :func:`smp.kernels.experts.permute.gather_reference`."""
    out = x.new_empty(len(index), x.shape[1])
    if out.numel():
        gather_kernel[_grid(out)](x, index, out, x.shape[1], K=k, BLOCK=BLOCK, num_warps=WARPS)
    return out


def combine(rows: torch.Tensor, weights: torch.Tensor | None, choices: torch.Tensor) -> torch.Tensor:
    """See :func:`smp.kernels.experts.permute.combine_reference`."""
    out = rows.new_empty(len(choices), rows.shape[1])
    if out.numel():
        combine_kernel[_grid(out)](
            rows,
            # Any pointer: it is not read unless WEIGHTED.
            rows if weights is None else weights,
            choices,
            out,
            rows.shape[1],
            WEIGHTED=weights is not None,
            K=choices.shape[1],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def combine_backward(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`smp.kernels.experts.permute.combine_backward`."""
    drows = torch.empty_like(rows)
    products = rows.new_empty(len(rows), dtype=torch.float32)
    if drows.numel():
        combine_backward_kernel[(len(rows),)](
            grad,
            rows,
            weights,
            order,
            drows,
            products,
            rows.shape[1],
            K=weights.shape[1],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    # By choice: one that is dropped has the row of zeros, and no number in the order.
    return drows, products.index_select(0, inverse).view(weights.shape).to(weights.dtype)


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return out.shape[0], triton.cdiv(out.shape[1], BLOCK)
