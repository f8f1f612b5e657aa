"""Products of rows that belong to experts, for layers in which each token has experts of its own.

Rows x (n, in) are sorted by expert, ``counts`` rows of each, and every expert has a matrix, W (experts, out, in):

    y[e] = x[e] W[e]^T      dx[e] = g[e] W[e]      dW[e] = g[e]^T x[e]

An expert without rows costs nothing in the forward pass, and its dW is zero. Rows are neither padded nor stacked: each
product takes 2 n in out FLOPs, as many as one dense product of n rows. Counts are int64 numbers on the device. With the
backend triton each of the three is one kernel, which reads them there. With torch, on Hopper and Blackwell in bf16,
with widths that are multiples of 8, so it is (``torch._grouped_mm``); elsewhere they are loops over experts, for which
the host has to know the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels import matmul
from smp.kernels.matmul import add_weight_gradient, gradient_by_onednn, linear, linear_by_onednn
from smp.kernels.registry import define, dispatched, first_derivative_only, on_any_device

Later = Callable[[Callable[[], torch.Tensor]], None]
"""Takes the computation of a weight's gradient over from the backward pass, to run it once, later."""


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, backend: str = "torch"
) -> torch.Tensor:
    """(n, in) rows sorted by expert and weights (experts, out, in) -> (n, out).

    ``counts``, int64 (experts,): rows of each, n in all; rows beyond would stay without a value. ``backend`` is torch
    or triton.
    """
    return grouped_products(x, [weight], counts, backend=backend)[0]


def grouped_products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: torch.Tensor,
    later: Sequence[Later] = (),
    backend: str = "torch",
) -> tuple[torch.Tensor, ...]:
    """:func:`grouped_product` of the same rows with several weights. The backward pass sums the gradients of x itself.

    ``later``, one for each weight: takes over the computation of its gradient (zero-bubble schedules); empty: the
    backward pass computes all of them.
    """
    outputs: tuple[torch.Tensor, ...] = _Products.apply(x, counts, tuple(later), backend, *weights)
    return outputs


def grouped_input_gradient(grad: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(n, out) rows sorted by expert and weights (experts, out, in) -> (n, in), for who writes a backward pass."""
    return _input_gradient_op([grad], [weight], counts, "torch")


def grouped_weight_gradient(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(n, out) and (n, in) rows sorted by expert -> (experts, out, in)."""
    return _weight_gradient_op(grad, x, counts, "torch")


def add_rows_of_groups(
    y: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor, backend: str = "torch"
) -> torch.Tensor:
    """(n, out) sorted by expert plus the row of each one's expert, (experts, out). Its gradient is a grouped product
    with ones: summed in fp32 in one order, without atomics (of gradients in TF32, where fp32 products are)."""
    return _AddRows.apply(y, bias, counts, backend)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """x, counts, later, backend, weights."""
        x, counts, ctx.later, ctx.backend, *weights = inputs
        ctx.save_for_backward(x, counts, *weights)
        return tuple(_forward_op(x, weight, counts, ctx.backend) for weight in weights)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, counts, *weights = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        # All pairs in one operator, which adds them up.
        dx = _input_gradient_op(grads, weights, counts, ctx.backend) if ctx.needs_input_grad[0] else None
        computations = [partial(_weight_gradient_op, grad, x, counts, ctx.backend) for grad in grads]
        return dx, None, None, None, *gradients_now(computations, ctx.needs_input_grad[4:], ctx.later)


def gradients_now(
    computations: Sequence[Callable[[], torch.Tensor]], wanted: Sequence[bool], later: Sequence[Later]
) -> list[torch.Tensor | None]:
    """Weight gradients that a backward pass returns: those of the ``wanted`` weights, or None for each when
    ``later`` takes them over."""
    if not later:
        return [compute() if needed else None for compute, needed in zip(computations, wanted, strict=True)]
    for compute, needed, take in zip(computations, wanted, later, strict=True):
        if needed:
            take(compute)
    return [None] * len(computations)


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor, backend: str) -> torch.Tensor:
        ctx.save_for_backward(counts)
        ctx.backend = backend
        # (experts,) -> (n,): the expert of each row
        own = torch.arange(len(bias), device=y.device)
        # ``output_size`` is given: without it the host would wait for the sum of the counts.
        return y + bias.index_select(0, own.repeat_interleave(counts.to(y.device), output_size=len(y)))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        (counts,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None, None, None
        ones = grad.new_ones(len(grad), 8)  # as many as the grouped kernel loads at a time
        return grad, _weight_gradient_op(grad.contiguous(), ones, counts, ctx.backend)[..., 0], None, None


def counts_where_read(counts: torch.Tensor, x: torch.Tensor, widths: Sequence[int], backend: str) -> torch.Tensor:
    """``counts`` where the products of ``x`` with matrices of these ``widths`` read them: on the device, or for a GPU
    without such a kernel on the host, which waits for them here once and not in every product."""
    loops = x.is_cuda and backend == "torch" and not has_kernel(x.device, x.dtype, widths, len(counts))
    return counts.cpu() if loops else counts


_MOST_EXPERTS = 1023
"""``torch._grouped_mm`` takes fewer than 1,024 groups on a GPU and raises an error for more."""


def has_kernel(device: torch.device, dtype: torch.dtype, widths: Sequence[int], experts: int) -> bool:
    """Whether torch's kernel takes so many ``experts`` with matrices of these ``widths`` there: 16 bytes at a time, and
    on Hopper and Blackwell. (On other GPUs it is a loop as here, for which the host waits.)"""
    fits = dtype == torch.bfloat16 and all(width % 8 == 0 for width in widths) and experts <= _MOST_EXPERTS
    return device.type == "cuda" and fits and torch.cuda.get_device_capability(device)[0] in (9, 10)


def describe_products(device: torch.device, dtype: torch.dtype, widths: Sequence[int], experts: int) -> list[str]:
    """A line for the start of a run on a GPU with torch's products of a rank's ``experts``; on a CPU there is nothing
    to choose."""
    if device.type != "cuda":
        return []
    if has_kernel(device, dtype, widths, experts):
        return ["experts: torch's grouped product"]
    sizes = " and ".join(map(str, widths))
    return [
        "experts: a product for each, for whose numbers of rows the host waits once per layer and pass (the grouped "
        f"one takes bf16 on Hopper and Blackwell, multiples of 8, and at most {_MOST_EXPERTS} experts: widths are "
        f"{sizes}, experts of a rank {experts})"
    ]


def _ends(x: torch.Tensor, widths: tuple[int, ...], counts: torch.Tensor) -> torch.Tensor | None:
    """int32 (experts,), where the rows of each end, for torch's kernel; None: it is not for these tensors."""
    taken = counts.is_cuda and x.shape[0] > 0 and has_kernel(x.device, x.dtype, widths, len(counts))
    return counts.cumsum(0, dtype=torch.int32) if taken else None


def _forward(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if (ends := _ends(x, weight.shape[1:], counts)) is not None:
        return torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    y, start = x.new_empty(x.shape[0], weight.shape[1]), 0
    # Experts without rows are left out: a product of nothing still costs a launch.
    for expert, count in occupied(x, counts):
        _times(x, start, count, weight[expert].t(), y)
        start += count
    return y


def _input_gradient(
    grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], counts: torch.Tensor
) -> torch.Tensor:
    """The sum over the pairs."""
    grad = grads[0]
    # torch's kernel for all pairs, or the loop for all: their sum is made in one place.
    if all(_ends(g, w.shape[1:], counts) is not None for g, w in zip(grads, weights, strict=True)):
        ends = counts.cumsum(0, dtype=torch.int32)
        dx, *others = (torch._grouped_mm(g, w, offs=ends) for g, w in zip(grads, weights, strict=True))
        for other in others:
            dx += other
        return dx
    dx, start = grad.new_empty(grad.shape[0], weights[0].shape[2]), 0
    for expert, count in occupied(grad, counts):
        # The second product is added to the rows of the first, expert by expert.
        for i, (g, weight) in enumerate(zip(grads, weights, strict=True)):
            _times(g, start, count, weight[expert], dx, add=i > 0)
        start += count
    return dx


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if (ends := _ends(grad, (grad.shape[1], x.shape[1]), counts)) is not None:
        # (experts, out, in): of each expert the product over its rows
        dw = torch._grouped_mm(grad.t(), x.contiguous(), offs=ends)
        if torch.cuda.get_device_capability(x.device)[0] != 9:
            dw.masked_fill_((counts == 0)[:, None, None], 0)  # on Blackwell they come unwritten, pytorch#172439
        return dw
    # No rows on this rank, such as of an expert-parallel rank that no token chose.
    if not x.shape[0]:
        return x.new_zeros(counts.shape[0], grad.shape[1], x.shape[1])
    dw, start = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1]), 0
    # All experts here: one without rows has a gradient of zeros, which a product of nothing writes.
    for expert, count in enumerate(counts.tolist()):
        _transposed_times(grad, x, start, count, dw[expert])
        start += count
    return dw


def _rounded_rows(count: int) -> int:
    """``count`` or somewhat more: one of 16 numbers between a power of two and the next.

    oneDNN makes code for each number of rows that it meets, which takes as long as several products, and keeps the last
    1,024 that it made. Experts have other numbers of rows in each step: in a model of 64 experts a third of a step was
    the making of code."""
    step = 1 << max(count.bit_length() - 5, 0)
    return -(-count // step) * step


def _is_half_on_cpu(x: torch.Tensor) -> bool:
    """Whether ``torch.mm`` takes oneDNN for it."""
    half = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
    return half and bool(torch.backends.mkldnn.enabled)


def _padded_rows(x: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """``count`` rows of x, and zeros after its last one."""
    there = min(count, len(x) - start)
    rows = x.narrow(0, start, there)
    return rows if there == count else F.pad(rows, (0, 0, 0, count - there))


def _times(x: torch.Tensor, start: int, count: int, matrix: torch.Tensor, y: torch.Tensor, add: bool = False) -> None:
    """Write to these rows of y, or add, the product of those of x. A few rows after them may lose what they hold: they
    are those of experts that come later."""
    # In half precision oneDNN makes the product anyway, so its number of rows is rounded in any case.
    rounded, half = _rounded_rows(count), _is_half_on_cpu(x)
    onednn = (
        not half
        and matmul.COPIES_PAY
        and linear_by_onednn(x.narrow(0, start, min(rounded, len(x) - start)), matrix.t())
    )
    rows = _padded_rows(x, start, rounded if onednn or half else count)
    if onednn or start + len(rows) > len(x):
        # Into memory of its own: oneDNN takes no output buffer, and padded rows may reach beyond y.
        product, own = linear(rows, matrix.t())[:count], y.narrow(0, start, count)
        if add:
            own.add_(product)
        else:
            own.copy_(product)
    elif add:
        y.narrow(0, start, len(rows)).addmm_(rows, matrix)
    else:
        torch.mm(rows, matrix, out=y.narrow(0, start, len(rows)))


def _transposed_times(a: torch.Tensor, b: torch.Tensor, start: int, count: int, out: torch.Tensor) -> None:
    """Write a^T b of these rows to ``out``, zeros without rows."""
    own, other = a.narrow(0, start, count), b.narrow(0, start, count)
    onednn = not _is_half_on_cpu(a) and gradient_by_onednn(own, other)
    if onednn or _is_half_on_cpu(a):
        # Zeros after both: rows of the next expert may be infinite, and 0 x Inf is NaN.
        own, other = (_padded_rows(rows, 0, _rounded_rows(count)) for rows in (own, other))
    if onednn:
        add_weight_gradient(out, own, other, first=True)
    else:
        torch.mm(own.t(), other, out=out)


def occupied(rows: torch.Tensor, counts: torch.Tensor) -> list[tuple[int, int]]:
    """(expert, number of its rows), of those that have any."""
    known = counts.tolist() if rows.shape[0] else []
    return [(expert, count) for expert, count in enumerate(known) if count]


def _as_one_expert(grad: torch.Tensor, x: torch.Tensor, counts: torch.Tensor, _backend: Any) -> torch.Tensor:
    """The weight gradient as if all rows were the first expert's: as much work and memory as :func:`_weight_gradient`,
    whatever the counts."""
    dw = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])
    _transposed_times(grad, x, 0, len(x), dw[0])
    return dw


def _input_gradient_as_of_one_expert(
    grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], _counts: Any, _backend: Any
) -> torch.Tensor:
    dx = grads[0].new_empty(grads[0].shape[0], weights[0].shape[2])
    for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        _times(grad, 0, grad.shape[0], weight[0], dx, add=i > 0)
    return dx


def _of_one(x: torch.Tensor, weight: torch.Tensor, _counts: Any, _backend: Any) -> torch.Tensor:
    return linear(x, weight[0]) if matmul.COPIES_PAY else F.linear(x, weight[0])


def _dispatched(name: str, launcher: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    return on_any_device(name, dispatched("grouped_gemm", launcher, reference))


_forward_op: Any = define(
    "grouped_product(Tensor x, Tensor weight, Tensor counts, str backend) -> Tensor",
    lambda x, weight, counts, backend: x.new_empty(x.shape[0], weight.shape[1]),
    body=_of_one,
    CompositeExplicitAutograd=_dispatched("grouped_product", "forward", _forward),
)
_input_gradient_op: Any = define(
    "grouped_input_gradient(Tensor[] grads, Tensor[] weights, Tensor counts, str backend) -> Tensor",
    lambda grads, weights, counts, backend: grads[0].new_empty(grads[0].shape[0], weights[0].shape[2]),
    body=_input_gradient_as_of_one_expert,
    CompositeExplicitAutograd=_dispatched("grouped_input_gradient", "input_gradient", _input_gradient),
)
_weight_gradient_op: Any = define(
    "grouped_weight_gradient(Tensor grad, Tensor x, Tensor counts, str backend) -> Tensor",
    lambda grad, x, counts, backend: x.new_empty(counts.shape[0], grad.shape[1], x.shape[1]),
    body=_as_one_expert,
    CompositeExplicitAutograd=_dispatched("grouped_weight_gradient", "weight_gradient", _weight_gradient),
)
OPERATORS = (_forward_op, _input_gradient_op, _weight_gradient_op)
"""Arguments: rows (or a list of them), weights or other rows, counts, backend."""
