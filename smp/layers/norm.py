"""Normalizations whose weights every TP rank holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.layers.parameter import REPLICATE, Constant, Initializer, local, tp_parameter
from smp.parallel.collectives import Group, sum_gradient


class _Norm(nn.Module):
    """What both kinds share: replicated parameters, whose gradients are summed when each rank sees its own part.

    Args:
        features: size of the last dimension.
        mesh: 1-D tensor-parallel mesh.
        eps: added to the variance.
        sequence_parallel: each rank normalizes its own part of the data, so the gradient is the sum over the ranks.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        features: int,
        mesh: DeviceMesh,
        *,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.sequence_parallel = features, eps, sequence_parallel
        self.group = Group.of(mesh)
        self.weight = tp_parameter((features,), REPLICATE, mesh, device, dtype)
        self.bias = tp_parameter((features,), REPLICATE, mesh, device, dtype) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Constant(1.0), "bias": Constant(0.0)}

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        return sum_gradient(local(parameter), self.group) if self.sequence_parallel else local(parameter)


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019), (..., features) -> (..., features)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension; the arithmetic is fp32 inside."""
        return F.rms_norm(x, (self.features,), self._own(self.weight), self.eps)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016), (..., features) -> (..., features)."""

    def __init__(self, features: int, mesh: DeviceMesh, **options: object) -> None:
        super().__init__(features, mesh, bias=True, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension; the arithmetic is fp32 inside."""
        assert self.bias is not None
        return F.layer_norm(x, (self.features,), self._own(self.weight), self._own(self.bias), self.eps)
