"""Moves of rows to experts and back: each token has k experts, so k rows, which are sorted by expert.

Row j of the sorted rows is the choice ``order[j]`` of tokens x k, and choice c lies in row ``inverse[c]``:

    repeat    y[j] = x[order[j] // k]                         dx[t] = sum_i dy[inverse[t k + i]]
    combine   y[t] = sum_i w[t, i] rows[inverse[t k + i]]     drows[j] = w[order[j]] dy[order[j] // k]
                                                              dw[c] = sum of dy[c // k] rows[inverse[c]]

In the forward and in the backward pass rows are gathered and never scattered: sums need no atomics, and their order
depends neither on the layout nor on the launch. They are computed in fp32 and rounded once.

Bytes in bf16 and per element of a token: repeat 2 + 2 k forward (read x, write rows) and as many backward; combine as
many forward, and backward 2 + 4 k (read dy and rows, write drows). In PyTorch's operations combine's forward reads and
writes an fp32 sum k times, and its backward makes fp32 rows several times; Triton's kernels are one pass each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.registry import accumulation_dtype, dispatched, first_derivative_only, register
from smp.kernels.returned import returned


def repeat_rows(
    x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int, backend: str = "torch"
) -> torch.Tensor:
    """The rows of k choices of each token, sorted: (tokens, h) -> (tokens x k, h). Gradients of a token's rows are
    summed in the order of its choices, in fp32. ``backend`` is torch or triton."""
    return _Repeat.apply(x, order, inverse, k, backend)


def permute_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, backend: str = "torch") -> torch.Tensor:
    """Row ``order[j]`` becomes row j; ``inverse`` is the way back, which gradients take."""
    return _Repeat.apply(x, order, inverse, 1, backend)


def combine_rows(
    rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, backend: str = "torch"
) -> torch.Tensor:
    """The weighted sum of each token's rows: (tokens x k, h), weights fp32 (tokens, k) -> (tokens, h). Summed in the
    order of the choices, in fp32, and rounded once."""
    return _Combine.apply(rows, weights, order, inverse, backend)


def _of_operators(x: torch.Tensor) -> bool:
    """Whether PyTorch's operators sum these rows, which a compiler fuses: without a fused kernel, on a GPU."""
    return x.is_cuda


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int, backend: str
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k, ctx.backend = k, backend
        return _gathered(x, order, k, backend)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        # A permutation: its gradient is the inverse one, and there is nothing to sum.
        if ctx.k == 1:
            return _gathered(grad, inverse, 1, ctx.backend), None, None, None, None
        # (tokens, k): where each choice's row lies
        choices = inverse.view(-1, ctx.k)
        # One choice after the other, in a fixed order: a sum over a reshaped dimension may be made in any.
        if ctx.backend != "torch" or (grad.dtype == accumulation_dtype(grad.dtype) and not _of_operators(grad)):
            return _combine_op(grad.contiguous(), None, choices, ctx.backend), None, None, None, None
        total = grad.index_select(0, choices[:, 0]).to(accumulation_dtype(grad.dtype))  # (tokens, h)
        for i in range(1, ctx.k):
            total += grad.index_select(0, choices[:, i])
        return total.to(grad.dtype), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, backend: str
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        ctx.backend = backend
        choices = inverse.view(weights.shape)
        if backend != "torch" or not _of_operators(rows):
            return _combine_op(rows.contiguous(), weights.contiguous(), choices, backend)
        total = torch.zeros(len(weights), rows.shape[1], dtype=accumulation_dtype(rows.dtype), device=rows.device)
        for i in range(weights.shape[1]):
            # In the order of the choices, as above; the weights are fp32, so nothing rounds before
            # the end.
            total += weights[:, i, None] * rows.index_select(0, choices[:, i])
        return returned(total, rows.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        if ctx.backend != "torch" or not _of_operators(grad):
            given = grad.contiguous(), rows.contiguous(), weights.contiguous(), order, inverse
            return *_combine_backward_op(*given, ctx.backend), None, None, None
        return *combine_backward(grad, rows, weights, order, inverse), None, None, None


def _gathered(x: torch.Tensor, index: torch.Tensor, k: int, backend: str) -> torch.Tensor:
    """Row ``index[j]`` // k of x for each j."""
    if backend != "torch":
        return _gather_op(x.contiguous(), index, k, backend)
    return gather_reference(x, index, k)


def gather_reference(x: torch.Tensor, index: torch.Tensor, k: int) -> torch.Tensor:
    """Row ``index[j]`` // k of x (n, h) for each j; ``index`` int64."""
    return x.index_select(0, index if k == 1 else index // k)


def combine_backward(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and weights. Each row has one token, so this is a gather."""
    wide, flat = grad.to(accumulation_dtype(grad.dtype)), weights.flatten()
    given = wide.index_select(0, order // weights.shape[1])
    # By row first, then in the order of the choices.
    dweights = (given * rows).sum(-1).index_select(0, inverse).view(weights.shape)
    return (given * flat.index_select(0, order)[:, None]).to(rows.dtype), dweights.to(weights.dtype)


_PIECE = 256
"""Rows at a time on a CPU: temporaries then stay in a core's cache, and their memory is used again."""


def combine_backward_in_pieces(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`combine_backward`, the same bits."""
    k, flat, dtype = weights.shape[1], weights.flatten(), accumulation_dtype(grad.dtype)
    drows, sums = torch.empty_like(rows), flat.new_empty(len(rows), dtype=dtype)
    pieces = (x.split(_PIECE) for x in (order, rows, drows, sums))
    for own, part, out, dots in zip(*pieces, strict=True):
        # The gradient of the token that each row belongs to.
        given = grad.index_select(0, own // k).to(dtype)
        torch.sum(given * part, -1, out=dots)
        out.copy_(given.mul_(flat.index_select(0, own)[:, None]))
    return drows, sums.index_select(0, inverse).view(weights.shape).to(weights.dtype)


def combine_reference(rows: torch.Tensor, weights: torch.Tensor | None, choices: torch.Tensor) -> torch.Tensor:
    """The sum that :func:`combine_rows` is, in one pass of a kernel that keeps sums in registers; of rows (n, h),
    ``weights`` (tokens, k), None: 1, and ``choices`` int64 (tokens, k), which row each one is."""
    if rows.dtype == (wide := accumulation_dtype(rows.dtype)):
        given = None if weights is None else weights.to(wide)
        # One pass over the rows: ``index_select`` would write a copy of all (tokens x k, h) of them
        # first.
        return F.embedding_bag(choices, rows, mode="sum", per_sample_weights=given)
    y = rows.new_empty(len(choices), rows.shape[1])
    weights = torch.ones_like(choices, dtype=wide) if weights is None else weights.to(wide)
    for own, of_own, out in zip(choices.split(_PIECE), weights.split(_PIECE), y.split(_PIECE), strict=True):
        # Widened before the sum, which is rounded once at the end.
        gathered = rows.index_select(0, own.flatten()).to(wide)
        # The gathered rows lie in the order of the choices.
        there = torch.arange(own.numel(), device=rows.device).view(own.shape)
        out.copy_(F.embedding_bag(there, gathered, mode="sum", per_sample_weights=of_own))
    return y


_gather_op = register(
    "gather_rows(Tensor x, Tensor index, int k, str backend) -> Tensor",
    dispatched("permute", "gather", gather_reference),
    lambda x, index, k, backend: x.new_empty(index.shape[0], x.shape[1]),
)
_combine_op = register(
    "combine_rows(Tensor rows, Tensor? weights, Tensor choices, str backend) -> Tensor",
    dispatched("permute", "combine", combine_reference),
    lambda rows, weights, choices, backend: rows.new_empty(choices.shape[0], rows.shape[1]),
)
_combine_backward_op = register(
    "combine_rows_backward(Tensor grad, Tensor rows, Tensor weights, Tensor order, Tensor inverse, str backend)"
    " -> (Tensor, Tensor)",
    dispatched("permute", "combine_backward", combine_backward_in_pieces),
    lambda grad, rows, weights, order, inverse, backend: (torch.empty_like(rows), torch.empty_like(weights)),
)
