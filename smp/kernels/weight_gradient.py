"""Adding a product to an fp32 weight gradient: G += dy^T x with dy (n, out) and x (n, in) in bf16.

On a GPU cuBLAS does it in the product itself: 8 bytes per element of G (read and write), and no bf16 rounding of the
product on the way. There is nothing left to fuse, so there is no kernel of our own. (apex's
``fused_weight_gradient_dense`` predates ``torch.addmm(out_dtype=...)``.) On a CPU that product does not exist; the bf16
product is rounded and then added. fp32 products are made by what :mod:`smp.kernels.matmul` chooses.
"""

from __future__ import annotations

import torch

from smp.kernels.matmul import add_weight_gradient, gradient_by_onednn

_WIDENED = 1 << 20
"""Elements that a CPU adds at once to a sum in fp32."""


def accumulate_weight_gradient(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, *, first: bool = False) -> None:
    """``total += dy^T x``, in place, in fp32.

    Args:
        total: fp32 (out, in); not read when ``first``.
        dy: (n, out).
        x: (n, in), of the same dtype as ``dy``.
        first: start from zero, without reading what ``total`` holds.
    """
    # A view: the product reads the transpose as it lies.
    left = dy.t()
    if total.dtype == x.dtype and gradient_by_onednn(dy, x):
        add_weight_gradient(total, dy, x, first=first)
    elif x.dtype == total.dtype:
        torch.mm(left, x, out=total) if first else torch.addmm(total, left, x, out=total)
    elif x.is_cuda:
        if first:
            # bf16 operands and an fp32 result, without a bf16 product in between.
            torch.mm(left, x, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, x, out_dtype=total.dtype, out=total)
    else:
        # On a CPU: a bf16 product, rounded, and then the sum in fp32.
        product = left @ x
        if first:
            total.copy_(product)
            return
        # Some rows at a time: torch widens what it adds in memory of its own, here never more than a cache holds. (The
        # same bits; an output layer of 32,000 x 512 and 512 tokens took 42 ms, and takes 24, its product alone 23.)
        rows = max(1, _WIDENED // max(total.shape[1], 1))
        for part, added in zip(total.split(rows), product.split(rows), strict=True):
            part.add_(added)
