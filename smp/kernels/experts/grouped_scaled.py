"""Products of rows with their experts' matrices, of operands that are quantised to FP8; see
``smp.kernels.experts.grouped``, which computes those of plain tensors.

One scaled product for each expert that has rows: the host has to know how many. (``torch._scaled_grouped_mm`` is one
kernel, for scales of rows only.) An expert's rows are any number, and a weight's gradient is a sum over them: on tensor
cores they are filled up with zeros to a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smp.kernels.experts.grouped import grouped_input_gradient, grouped_product, grouped_weight_gradient, occupied
from smp.kernels.precision.fp8 import Operand, Quantised
from smp.kernels.product import PRODUCTS, Scaled
from smp.kernels.registry import define


def forward(x: Operand, weight: Operand, counts: torch.Tensor, product: str) -> torch.Tensor:
    """Rows (n, in) sorted by expert and matrices (experts, out, in) -> (n, out).

    Args:
        x: with one scale, or one for each row.
        weight: with one scale, or those of rows, (experts, out, 1).
        counts: int64 (experts,), rows of each; n in all.
        product: the name of a :class:`Scaled` one.
    """
    if isinstance(x, Quantised) and isinstance(weight, Quantised):
        return _forward_op(*x, *weight, counts, product)
    return grouped_product(*_plain(x, weight), counts)


def input_gradient(grad: Operand, weight: Operand, counts: torch.Tensor, product: str) -> torch.Tensor:
    """Gradients (n, out) and matrices (experts, out, in), scales of whose columns are (experts, 1, in) -> (n, in)."""
    if isinstance(grad, Quantised) and isinstance(weight, Quantised):
        return _input_gradient_op(*grad, *weight, counts, product)
    return grouped_input_gradient(*_plain(grad, weight), counts)


def weight_gradient(grad: Operand, x: Operand, counts: torch.Tensor, product: str) -> torch.Tensor:
    """(n, out) and (n, in), both with one scale -> (experts, out, in). Of an expert without rows it is zero."""
    if isinstance(grad, Quantised) and isinstance(x, Quantised):
        return _weight_gradient_op(*grad, *x, counts, product)
    return grouped_weight_gradient(*_plain(grad, x), counts)


def _plain(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a, b
    raise TypeError("a product takes two quantised operands, or two tensors")


def _scaled(product: str) -> Scaled:
    found = PRODUCTS[product]
    assert isinstance(found, Scaled), "of FP8"
    return found


def _rows(q: Quantised, start: int, count: int) -> Quantised:
    """A part of the rows, with their scales."""
    # One scale for a tensor is 0-dim, and that of all its rows.
    return Quantised(q.data.narrow(0, start, count), q.inverse.narrow(0, start, count) if q.inverse.ndim else q.inverse)


def _matrix(q: Quantised, expert: int) -> Quantised:
    """The matrix of one expert, with its scales."""
    return Quantised(q.data[expert], q.inverse[expert] if q.inverse.ndim else q.inverse)


def _forward(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, counts: torch.Tensor, product: str
) -> torch.Tensor:
    run, rows, weight, start = _scaled(product), Quantised(x, x_scales), Quantised(w, w_scales), 0
    # Every row belongs to an expert, so all of it is written.
    y = x.new_empty(x.shape[0], w.shape[1], dtype=run.dtype)
    for expert, count in occupied(x, counts):
        y[start : start + count] = run.forward(_rows(rows, start, count), _matrix(weight, expert))
        start += count
    return y


def _input_gradient(
    g: torch.Tensor, g_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, counts: torch.Tensor, product: str
) -> torch.Tensor:
    run, grad, weight, start = _scaled(product), Quantised(g, g_scales), Quantised(w, w_scales), 0
    dx = g.new_empty(g.shape[0], w.shape[2], dtype=run.dtype)
    for expert, count in occupied(g, counts):
        dx[start : start + count] = run.input_gradient(_rows(grad, start, count), _matrix(weight, expert))
        start += count
    return dx


def _weight_gradient(
    g: torch.Tensor, g_scales: torch.Tensor, x: torch.Tensor, x_scales: torch.Tensor, counts: torch.Tensor, product: str
) -> torch.Tensor:
    run, grad, rows, start = _scaled(product), Quantised(g, g_scales), Quantised(x, x_scales), 0
    # Zeros: an expert without rows is left out of the loop.
    dw = g.new_zeros(counts.shape[0], g.shape[1], x.shape[1], dtype=run.dtype)
    for expert, count in occupied(g, counts):
        # A sum over the expert's own rows: no other expert's scale is in it.
        dw[expert] = run.weight_gradient(_rows(grad, start, count), _rows(rows, start, count))
        start += count
    return dw


def _forward_of_one(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, _counts: Any, product: str
) -> torch.Tensor:
    """The product as if all rows were the first expert's: as much work and memory as :func:`_forward`, whatever the
    counts. The two below are its gradients."""
    return _scaled(product).forward(Quantised(x, x_scales), _matrix(Quantised(w, w_scales), 0))


def _input_gradient_of_one(
    g: torch.Tensor, g_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, _counts: Any, product: str
) -> torch.Tensor:
    return _scaled(product).input_gradient(Quantised(g, g_scales), _matrix(Quantised(w, w_scales), 0))


def _weight_gradient_of_one(
    g: torch.Tensor, g_scales: torch.Tensor, x: torch.Tensor, x_scales: torch.Tensor, counts: torch.Tensor, product: str
) -> torch.Tensor:
    dw = g.new_empty(counts.shape[0], g.shape[1], x.shape[1], dtype=_scaled(product).dtype)
    dw[0] = _scaled(product).weight_gradient(Quantised(g, g_scales), Quantised(x, x_scales))
    return dw


def _schema(name: str, operands: Sequence[str]) -> str:
    tensors = ", ".join(f"Tensor {operand}, Tensor {operand}_scales" for operand in operands)
    return f"{name}({tensors}, Tensor counts, str product) -> Tensor"


# The bodies serve tools that count FLOPs and memory on tensors without data, whose counts of rows
# cannot be read.
_forward_op = define(
    _schema("grouped_scaled_product", ("x", "weight")),
    lambda x, _xs, w, _ws, counts, product: x.new_empty(x.shape[0], w.shape[1], dtype=_scaled(product).dtype),
    body=_forward_of_one,
    CompositeExplicitAutograd=_forward,
)
_input_gradient_op = define(
    _schema("grouped_scaled_input_gradient", ("grad", "weight")),
    lambda g, _gs, w, _ws, counts, product: g.new_empty(g.shape[0], w.shape[2], dtype=_scaled(product).dtype),
    body=_input_gradient_of_one,
    CompositeExplicitAutograd=_input_gradient,
)
_weight_gradient_op = define(
    _schema("grouped_scaled_weight_gradient", ("grad", "x")),
    lambda g, _gs, x, _xs, counts, product: g.new_empty(
        counts.shape[0], g.shape[1], x.shape[1], dtype=_scaled(product).dtype
    ),
    body=_weight_gradient_of_one,
    CompositeExplicitAutograd=_weight_gradient,
)
