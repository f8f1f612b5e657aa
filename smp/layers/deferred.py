"""Linear layers whose backward pass leaves the weights' gradients for later: what zero-bubble schedules need.

A backward pass computes two products per matrix, one for the gradient of the input, which the stage before waits for,
and one for the gradient of the weight, which nobody waits for until the step ends (Qi et al. 2023, arXiv 2401.10241).
A layer with a ``defer`` runs only the first and hands over the second as a function, to be called once, on any later
occasion. What it holds until then is this rank's part of its input and the gradient of its output.

Not for ``torch.compile``: a compiled graph drops the hand-over without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from smp.layers.operators import column_forward, row_forward
from smp.parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter, wait

if TYPE_CHECKING:
    from smp.layers.linear import ColumnParallelLinear, RowParallelLinear

WeightGradients = Callable[[], list[tuple["ColumnParallelLinear | RowParallelLinear", torch.Tensor]]]
"""Computes gradients of weights: pairs of a layer and what is to be added to the gradient of its local weight."""
Defer = Callable[[WeightGradients], None]
"""Takes the computation over."""


def column_parallel_deferred(
    x: torch.Tensor, layers: Sequence[ColumnParallelLinear], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The products of ``smp.layers.linear.column_parallel``, with weight gradients for the layers' ``defer``.

    A weight that several ranks share (fewer key/value heads than ranks) gets its gradient at once: it is summed over
    the ranks by what made ``weights`` from the parameters.
    """
    return _ColumnParallel.apply(x, tuple(layers), *weights)


def row_parallel_deferred(x: torch.Tensor, layer: RowParallelLinear, weight: torch.Tensor) -> torch.Tensor:
    """The product and sum of ``RowParallelLinear``, with the weight gradient for the layer's ``defer``."""
    return _RowParallel.apply(x, layer, weight)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: tuple[ColumnParallelLinear, ...], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.layers = layers
        ctx.save_for_backward(x, *weights)
        group = layers[0].group
        if group.size == 1:
            return tuple(F.linear(x, weight) for weight in weights)
        where = group.name, group.size, group.rank, layers[0].sequence_parallel
        return tuple(column_forward(x, list(weights), *where))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        first = ctx.layers[0]
        dx = grads[-1] @ weights[-1]  # (tokens, ..., in), this rank's part of the sum
        for grad, weight in zip(grads[-2::-1], weights[-2::-1], strict=True):  # autograd's order: the last use first
            dx = dx + grad @ weight
        start = start_reduce_scatter if first.sequence_parallel else start_all_reduce
        reducing = start(dx, first.group)
        products = list(zip(ctx.layers, grads, strict=True))
        first.defer(partial(_column_gradients, x, [(m, g) for m, g in products if not m.replicated]))
        now = dict(_column_gradients(x, [(m, g) for m, g in products if m.replicated]))
        return wait(reducing, first.group), None, *(now.get(layer) for layer in ctx.layers)


def _column_gradients(
    x: torch.Tensor, products: list[tuple[ColumnParallelLinear, torch.Tensor]]
) -> list[tuple[Any, torch.Tensor]]:
    if not products:
        return []
    flat = _gathered(x, products[0][0]).flatten(0, -2)  # (tokens, in)
    return [(layer, grad.flatten(0, -2).t() @ flat) for layer, grad in products]


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: RowParallelLinear, weight: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        if layer.group.size == 1:
            return F.linear(x, weight)
        return row_forward(x, weight, layer.group.name, layer.group.size, layer.group.rank, layer.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.layer.defer(partial(_row_gradient, x, ctx.layer, grad))
        return _gathered(grad, ctx.layer) @ weight, None, None


def _row_gradient(x: torch.Tensor, layer: RowParallelLinear, grad: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    return [(layer, _gathered(grad, layer).flatten(0, -2).t() @ x.flatten(0, -2))]


def _gathered(x: torch.Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> torch.Tensor:
    """(tokens [/p], ...) -> (tokens, ...)."""
    return wait(start_all_gather(x, layer.group), layer.group) if layer.sequence_parallel else x
