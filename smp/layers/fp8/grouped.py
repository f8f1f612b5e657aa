"""Experts' projections in FP8: the scales of ``scaling.py``, of rows that are sorted by expert.

All experts of a projection are one tensor, so with one scale for a tensor they share it, whichever ranks hold them;
with scales of rows each has its own. A rank without rows takes part in every exchange of maxima.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from smp.kernels.experts import grouped_scaled
from smp.kernels.experts.grouped import Later, gradients_now
from smp.kernels.precision.fp8 import Operand, Quantised
from smp.kernels.registry import first_derivative_only
from smp.layers.fp8.scaling import Scaling


def scaled_experts(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: torch.Tensor,
    scaling: Scaling,
    later: Sequence[Later] = (),
) -> tuple[torch.Tensor, ...]:
    """Products of the same rows with several projections.

    Args:
        x: (n, in), sorted by expert.
        weights: (experts, out, in) each.
        counts: int64 (experts,), rows of each.
        scaling: of this call.
        later: as of :func:`smp.kernels.experts.grouped.grouped_products`.

    Returns:
        (n, out) for each weight, in the dtype of ``x``.
    """
    return _Scaled.apply(x, counts, scaling, tuple(later), *weights)


class _Scaled(torch.autograd.Function):
    """FP8 products of rows with several projections; without FP8 where ``scaling`` does not quantise, as in the first
    step of delayed scaling."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """x, counts, scaling, later, weights."""
        x, counts, ctx.scaling, ctx.later, *weights = inputs
        ctx.product = ctx.scaling.product(x.dtype)
        made = ctx.scaling.forward(x, weights)
        # The input is for the weights' gradients; frozen ones have none.
        kept = _parts(made.kept) if any(ctx.needs_input_grad[4:]) else [x.new_empty(0)]
        ctx.kept = len(kept)
        ctx.save_for_backward(counts, *kept, *weights, *made.scales)
        return tuple(grouped_scaled.forward(made.x, weight, counts, ctx.product) for weight in made.weights)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        trained = ctx.needs_input_grad[4:]
        counts, *tensors = ctx.saved_tensors
        end = ctx.kept + len(trained)
        kept, weights, scales = tensors[: ctx.kept], tensors[ctx.kept : end], tensors[end:]
        x: Operand = kept[0] if len(kept) == 1 else Quantised(*kept)
        pairs = ctx.scaling.gradients([grad.contiguous() for grad in grads])
        dx = None
        if ctx.needs_input_grad[0]:
            for (grad, _), weight in zip(pairs, ctx.scaling.weights(weights, scales), strict=True):
                # Gradients by the same rows, through each projection, add up.
                part = grouped_scaled.input_gradient(grad, weight, counts, ctx.product)
                dx = part if dx is None else dx + part
        # Not computed yet: with sinks each of these is handed over, see ``gradients_now``.
        weight_gradient = partial(grouped_scaled.weight_gradient, x=x, counts=counts, product=ctx.product)
        computations = [partial(weight_gradient, grad) for _, grad in pairs]
        return dx, None, None, None, *gradients_now(computations, trained, ctx.later)


def _parts(operand: Operand) -> list[torch.Tensor]:
    return [operand] if isinstance(operand, torch.Tensor) else list(operand)
