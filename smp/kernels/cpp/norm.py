"""See :mod:`smp.kernels.norm`: a row is read once and stays in the cache; weight gradients are sums of some rows each,
as many as the number of rows says."""

from __future__ import annotations

import torch

from smp.kernels import norm
from smp.kernels.cpp.library import computes, library, pointers, require

Tensors = tuple[torch.Tensor, ...]


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> Tensors:
    """See :func:`smp.kernels.norm.forward_reference`."""
    if not computes(x, residual):
        return norm.forward_reference(x, residual, weight, bias, eps)
    rows, width = x.shape
    _require(width, weight, bias)
    require(residual is None or residual.shape == x.shape, "a residual of the shape of x")
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    y, total = torch.empty_like(x), x.new_empty(0 if residual is None else x.shape)
    mean, scale = (x.new_empty(0 if none else rows, dtype=torch.float32) for none in (bias is None, False))
    wide, shift = _wide(weight), None if bias is None else _wide(bias)
    tensors = pointers(x, residual, wide, shift, y, total, mean, scale)
    library().smp_norm(x.dtype == torch.bfloat16, *tensors, rows, width, eps, torch.get_num_threads())
    return y, total, mean, scale


def backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    has_bias: bool,
) -> Tensors:
    """See :func:`smp.kernels.norm.backward_reference`."""
    if not computes(x, dy, dtotal):
        return norm.backward_reference(dy, dtotal, x, weight, mean, scale, has_bias)
    (rows, width), kinds = x.shape, 2 if has_bias else 1
    _require(width, weight)
    require(dy.shape == x.shape and (dtotal is None or dtotal.shape == x.shape), "gradients of the shape of x")
    x, dy, dtotal = x.contiguous(), dy.contiguous(), None if dtotal is None else dtotal.contiguous()
    dx, gradients = torch.empty_like(x), scale.new_empty(kinds, width)
    sums = scale.new_empty(scratch_bytes(x, has_bias) // 4)
    wide, dbias = _wide(weight), gradients[1] if has_bias else None
    tensors = pointers(dy, dtotal, x, wide, mean, scale, dx, gradients[0], dbias, sums)
    library().smp_norm_gradient(x.dtype == torch.bfloat16, *tensors, rows, width, torch.get_num_threads())
    narrow = gradients.to(weight.dtype)
    # Each its own memory: an operator's results may not share it.
    return dx, narrow[0].clone() if has_bias else narrow[0], narrow[1].clone() if has_bias else narrow.new_empty(0)


def scratch_bytes(x: torch.Tensor, has_bias: bool) -> int:
    """What a backward pass takes while it runs."""
    return 4 * (1 + has_bias) * int(library().smp_norm_sums(*x.shape))


def _require(width: int, *parameters: torch.Tensor | None) -> None:
    require(all(p is None or p.shape == (width,) for p in parameters), f"weights of the {width} features of a row")


def _wide(weight: torch.Tensor) -> torch.Tensor:
    """A row's factors in fp32: few, beside the rows."""
    return weight.to(torch.float32).contiguous()
