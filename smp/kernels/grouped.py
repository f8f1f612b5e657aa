"""Products and moves of rows that belong to experts, for layers in which each token has experts of its own.

Rows x (n, in) are sorted by expert, ``counts`` rows of each, and every expert has a matrix, W (experts, out, in):

    y[e] = x[e] W[e]^T      dx[e] = g[e] W[e]      dW[e] = g[e]^T x[e]

An expert without rows costs nothing forward, and its dW is zero. Nothing is padded and nothing is stacked: 2 n in out
FLOPs each, as one product of n rows. Counts are int64 numbers on the device. On Hopper and Blackwell in bf16, with
widths that are multiples of 8, each of the three is one kernel (``torch._grouped_mm``), which reads them there;
elsewhere they are loops over experts, for which the host has to know the counts.

A token t has k experts, so k rows. Row j of the sorted rows is the choice ``order[j]`` of tokens x k, and choice c lies
in row ``inverse[c]``. Both ways, forward and backward, rows are gathered and never scattered: sums have one order,
which knows no atomics and no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smp.kernels.registry import accumulation_dtype, define


def grouped_product(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(n, in) rows sorted by expert and weights (experts, out, in) -> (n, out).

    ``counts``, int64 (experts,): rows of each, n in all; rows beyond would stay without a value.
    """
    return _Product.apply(x, weight, counts)


def grouped_input_gradient(grad: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(n, out) rows sorted by expert and weights (experts, out, in) -> (n, in), for who writes a backward pass."""
    return _input_gradient_op(grad, weight, counts)


def grouped_weight_gradient(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(n, out) and (n, in) rows sorted by expert -> (experts, out, in)."""
    return _weight_gradient_op(grad, x, counts)


def add_rows_of_groups(y: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(n, out) sorted by expert plus the row of each one's expert, (experts, out). Its gradient is a grouped product
    with ones: summed in fp32 in one order, without atomics (of gradients in TF32, where fp32 products are)."""
    return _AddRows.apply(y, bias, counts)


def repeat_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
    """The rows of k choices of each token, sorted: (tokens, h) -> (tokens x k, h). Gradients of a token's rows are
    summed in the order of its choices, in fp32."""
    return _Repeat.apply(x, order, inverse, k)


def permute_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Row ``order[j]`` becomes row j; ``inverse`` is the way back, which gradients take."""
    return _Repeat.apply(x, order, inverse, 1)


def combine_rows(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's rows: (tokens x k, h), weights fp32 (tokens, k) -> (tokens, h). Summed in the
    order of the choices, in fp32, and rounded once."""
    return _Combine.apply(rows, weights, order, inverse)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _forward_op(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _input_gradient_op(grad, weight, counts) if ctx.needs_input_grad[0] else None
        dw = _weight_gradient_op(grad, x, counts) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        own = torch.arange(len(bias), device=y.device)
        # Said, because the device would have to tell the host otherwise.
        return y + bias.index_select(0, own.repeat_interleave(counts.to(y.device), output_size=len(y)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (counts,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        ones = grad.new_ones(len(grad), 8)  # as many as the grouped kernel loads at a time
        return grad, _weight_gradient_op(grad.contiguous(), ones, counts)[..., 0], None


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        # Choice c is of token c // k.
        return x.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        if ctx.k == 1:
            return grad.index_select(0, inverse), None, None, None
        choices = inverse.view(-1, ctx.k)
        # One choice after the other, in a fixed order: a sum over a reshaped dimension may be made in any.
        total = grad.index_select(0, choices[:, 0]).to(accumulation_dtype(grad.dtype))  # (tokens, h)
        for i in range(1, ctx.k):
            total += grad.index_select(0, choices[:, i])
        return total.to(grad.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        choices = inverse.view(weights.shape)
        total = torch.zeros(len(weights), rows.shape[1], dtype=accumulation_dtype(rows.dtype), device=rows.device)
        for i in range(weights.shape[1]):
            # Likewise; the weights are fp32, so nothing rounds before the end.
            total += weights[:, i, None] * rows.index_select(0, choices[:, i])
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        k = weights.shape[1]
        choices, wide = inverse.view(weights.shape), grad.to(accumulation_dtype(grad.dtype))
        # Each row has one token, so this is a gather.
        drows = (wide.index_select(0, order // k) * weights.flatten().index_select(0, order)[:, None]).to(rows.dtype)
        dweights = [(wide * rows.index_select(0, choices[:, i])).sum(-1) for i in range(k)]
        return drows, torch.stack(dweights, dim=1).to(weights.dtype), None, None


def counts_where_read(counts: torch.Tensor, x: torch.Tensor, *widths: int) -> torch.Tensor:
    """``counts`` where the products of ``x`` with matrices of these ``widths`` read them: on the device, or for a GPU
    without such a kernel on the host, which waits for them here once and not in every product."""
    return counts.cpu() if x.is_cuda and not has_kernel(x.device, x.dtype, widths) else counts


def has_kernel(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Whether torch's kernel takes matrices of these ``widths`` there: 16 bytes at a time, and on Hopper and Blackwell.
    (On other GPUs it is a loop as here, for which the host waits.)"""
    fits = dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths)
    return device.type == "cuda" and fits and torch.cuda.get_device_capability(device)[0] in (9, 10)


def describe_products(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> list[str]:
    """A line for the start of a run on a GPU; on a CPU there is nothing to choose."""
    if device.type != "cuda":
        return []
    if has_kernel(device, dtype, widths):
        return ["experts: torch's grouped product"]
    sizes = " and ".join(map(str, widths))
    return [
        "experts: a product for each, for whose numbers of rows the host waits once per layer and pass (the grouped "
        f"one takes bf16 on Hopper and Blackwell, and multiples of 8: widths are {sizes})"
    ]


def _ends(x: torch.Tensor, widths: tuple[int, ...], counts: torch.Tensor) -> torch.Tensor | None:
    """int32 (experts,), where the rows of each end, for torch's kernel; None: it is not for these tensors."""
    taken = counts.is_cuda and x.shape[0] > 0 and has_kernel(x.device, x.dtype, widths)
    return counts.cumsum(0, dtype=torch.int32) if taken else None


def _forward(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if (ends := _ends(x, weight.shape[1:], counts)) is not None:
        return torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    y, start = x.new_empty(x.shape[0], weight.shape[1]), 0
    # Experts without rows are left out: a product of nothing still costs a launch.
    for expert, count in occupied(x, counts):
        torch.mm(x.narrow(0, start, count), weight[expert].t(), out=y.narrow(0, start, count))
        start += count
    return y


def _input_gradient(grad: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if (ends := _ends(grad, weight.shape[1:], counts)) is not None:
        return torch._grouped_mm(grad, weight, offs=ends)
    dx, start = grad.new_empty(grad.shape[0], weight.shape[2]), 0
    for expert, count in occupied(grad, counts):
        torch.mm(grad.narrow(0, start, count), weight[expert], out=dx.narrow(0, start, count))
        start += count
    return dx


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if (ends := _ends(grad, (grad.shape[1], x.shape[1]), counts)) is not None:
        dw = torch._grouped_mm(grad.t(), x.contiguous(), offs=ends)
        if torch.cuda.get_device_capability(x.device)[0] != 9:
            dw.masked_fill_((counts == 0)[:, None, None], 0)  # on Blackwell they come unwritten, pytorch#172439
        return dw
    if not x.shape[0]:
        return x.new_zeros(counts.shape[0], grad.shape[1], x.shape[1])
    dw, start = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1]), 0
    # All experts here: one without rows has a gradient of zeros, which a product of nothing writes.
    for expert, count in enumerate(counts.tolist()):
        torch.mm(grad.narrow(0, start, count).t(), x.narrow(0, start, count), out=dw[expert])  # zero without rows
        start += count
    return dw


def occupied(rows: torch.Tensor, counts: torch.Tensor) -> list[tuple[int, int]]:
    """(expert, number of its rows), of those that have any."""
    known = counts.tolist() if rows.shape[0] else []
    return [(expert, count) for expert, count in enumerate(known) if count]


def _as_one_expert(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As much work and memory as :func:`_weight_gradient`, whatever the counts."""
    dw = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])
    torch.mm(grad.t(), x, out=dw[0])
    return dw


_forward_op = define(
    "grouped_product(Tensor x, Tensor weight, Tensor counts) -> Tensor",
    lambda x, weight, counts: x.new_empty(x.shape[0], weight.shape[1]),
    body=lambda x, weight, counts: x @ weight[0].t(),
    CompositeExplicitAutograd=_forward,
)
_input_gradient_op = define(
    "grouped_input_gradient(Tensor grad, Tensor weight, Tensor counts) -> Tensor",
    lambda grad, weight, counts: grad.new_empty(grad.shape[0], weight.shape[2]),
    body=lambda grad, weight, counts: grad @ weight[0],
    CompositeExplicitAutograd=_input_gradient,
)
_weight_gradient_op = define(
    "grouped_weight_gradient(Tensor grad, Tensor x, Tensor counts) -> Tensor",
    lambda grad, x, counts: x.new_empty(counts.shape[0], grad.shape[1], x.shape[1]),
    body=_as_one_expert,
    CompositeExplicitAutograd=_weight_gradient,
)
