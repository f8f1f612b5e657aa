"""apex's fused norms; they bring their own autograd."""

from __future__ import annotations

import torch


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See :func:`smp.kernels.norm.norm`."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    if bias is None:
        return fused_rms_norm_affine(x, weight, weight.shape, eps)
    return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
