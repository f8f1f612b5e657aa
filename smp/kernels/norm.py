"""RMSNorm and LayerNorm over the last dimension, alone and after an addition to the residual stream.

RMSNorm (Zhang & Sennrich 2019): y = x r w with r = 1 / sqrt(mean(x^2) + eps). LayerNorm (Ba et al. 2016): y = (x - m) r
w + b with r = 1 / sqrt(var(x) + eps). With c(.) the mean over a row and n = y's part before w and b, both have the
gradient dx = r (dy w - n c(n dy w)), LayerNorm's minus r c(dy w); dw = sum dy n, db = sum dy.

Bytes per element in bf16: forward 4 (read x, write y), with an addition 8 (read both, write the sum and y); backward 6
(read x and dy, write dx), with an addition 8 (read the sum's own gradient too). What is kept is x, or the sum, and one
or two floats per row. Arithmetic is fp32 inside and rounds once, when storing; the sum rounds before it is normalized,
as it would without fusion.

The operators work on rows: (n, features), features contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.registry import accumulation_dtype, dispatched, first_derivative_only, kernels_of, register

Tensors = tuple[torch.Tensor, ...]


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, backend: str = "torch"
) -> torch.Tensor:
    """Norm of the last dimension, (..., features) -> the same: LayerNorm with a ``bias``, else RMSNorm; ``backend``
    torch, triton, cpp or apex. The weight may be fp32 where x is not, but with apex."""
    if backend == "torch":
        row = x.shape[-1:]
        if weight.dtype != x.dtype:  # wider, as 1 + w is
            return norm(x.to(weight.dtype), weight, bias, eps).to(x.dtype)
        return F.rms_norm(x, row, weight, eps) if bias is None else F.layer_norm(x, row, weight, bias, eps)
    if backend == "apex":
        return kernels_of("norm", backend).norm(x, weight, bias, eps)
    return _Norm.apply(x, None, weight, bias, eps, backend)[0]


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), of the shape of ``x``; see :func:`norm`."""
    if backend in ("triton", "cpp"):
        y, total = _Norm.apply(x, residual, weight, bias, eps, backend)
        return y, total
    total = x + residual
    return norm(total, weight, bias, eps, backend), total


class _Norm(torch.autograd.Function):
    """(y, sum), or (y, None) without an addition."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, added = _rows(x), None if residual is None else _rows(residual)
        y, total, mean, scale = _forward_op(rows, added, weight, bias, eps, backend)
        # x, or the sum; mean and 1 / std are a float a row.
        ctx.save_for_backward(rows if residual is None else total, weight, mean, scale)
        ctx.backend, ctx.adds, ctx.has_bias = backend, residual is not None, bias is not None
        return _shaped(y, x), None if residual is None else _shaped(total, x)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor, dtotal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        # The residual stream's own gradient: added in the same kernel.
        added = _rows(dtotal) if dtotal is not None and ctx.adds else None
        dx, dweight, dbias = _backward_op(_rows(dy), added, x, weight, mean, scale, ctx.has_bias, ctx.backend)
        dx = dx.view(dy.shape)
        # One gradient for both: x and what was added to it enter the sum alike.
        return dx, dx if ctx.adds else None, dweight, dbias if ctx.has_bias else None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(..., features) -> (n, features) with contiguous rows."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _shaped(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows in the shape of ``x``; the same tensor where the shape is equal, because FSDP2 warns of units that return
    views."""
    return rows if rows.shape == x.shape else rows.view(x.shape)


def forward_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> Tensors:
    """(y, sum, mean, r) by the formulas above; the sum is empty without ``residual``, the mean without ``bias``."""
    total = x if residual is None else x + residual
    wide = total.to(accumulation_dtype(x.dtype))
    mean = wide.mean(dim=1) if bias is not None else wide.new_empty(0)
    # Two passes over the row, first the mean: the difference of mean squares would cancel.
    if bias is not None:
        wide = wide - mean[:, None]
    # (n,), as is the mean
    scale = (wide.square().mean(dim=1) + eps).rsqrt()
    y = wide * scale[:, None] * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), x.new_empty(0) if residual is None else total, mean, scale


def backward_reference(
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    has_bias: bool,
) -> Tensors:
    """(dx, dw, db) by the formulas above; ``dtotal`` is added to dx, and db is empty without ``has_bias``."""
    wide = x.to(scale.dtype)
    # n of the formulas, made again from x and the saved numbers of each row.
    wide = (wide - mean[:, None] if has_bias else wide) * scale[:, None]
    # dy w of the formula; ``wide`` is n.
    dwide = dy.to(scale.dtype) * weight
    # dy w - n c(n dy w); LayerNorm also takes off c(dy w). Both are times r in the end.
    dx = dwide - wide * (wide * dwide).mean(dim=1, keepdim=True)
    dx = (dx - dwide.mean(dim=1, keepdim=True) if has_bias else dx) * scale[:, None]
    dx = dx if dtotal is None else dx + dtotal
    dbias = dy.to(scale.dtype).sum(dim=0) if has_bias else scale.new_empty(0)
    return dx.to(x.dtype), (dy.to(scale.dtype) * wide).sum(dim=0).to(weight.dtype), dbias.to(weight.dtype)


def _forward_fake(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any
) -> Tensors:
    wide = accumulation_dtype(x.dtype)
    total = x.new_empty(0 if residual is None else x.shape)
    mean = x.new_empty(0 if bias is None else x.shape[0], dtype=wide)
    return x.new_empty(x.shape), total, mean, x.new_empty(x.shape[0], dtype=wide)


def _backward_fake(*arguments: Any) -> Tensors:
    _, _, x, weight, _, _, has_bias, _ = arguments
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape if has_bias else 0)


_forward_op = register(
    "norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    dispatched("norm", "forward", forward_reference),
    _forward_fake,
)
_backward_op = register(
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor mean, Tensor scale, bool has_bias,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    dispatched("norm", "backward", backward_reference),
    _backward_fake,
)
