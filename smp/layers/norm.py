"""Normalizations whose weights every TP rank holds."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.norm import add_norm, layer_norm, rms_norm
from smp.layers.parameter import REPLICATE, Constant, Initializer, local, tp_parameter
from smp.parallel.collectives import Group


class Norm(nn.Module):
    """What both kinds share: replicated parameters, whose gradients are summed when each rank sees its own part.

    Args:
        features: size of the last dimension.
        mesh: 1-D tensor-parallel mesh.
        eps: added to the variance.
        sequence_parallel: each rank normalizes its own part of the data, so the gradient is the sum over the ranks.
        kernels: what computes it.
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
        kernels: Kernels = TORCH,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.sequence_parallel = features, eps, sequence_parallel
        self.backend, self.group = kernels.norm, Group.of(mesh)
        self.weight = tp_parameter((features,), REPLICATE, mesh, device, dtype)
        self.bias = tp_parameter((features,), REPLICATE, mesh, device, dtype) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Constant(1.0), "bias": Constant(0.0)}

    def after_addition(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized x + added, x + added), in one pass where the kernel can."""
        bias = None if self.bias is None else self._own(self.bias, x.dtype)
        return add_norm(x, added, self._own(self.weight, x.dtype), bias, self.eps, self.backend)

    def _own(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return local(parameter, dtype, summed_over=self.group if self.sequence_parallel else None)


class RMSNorm(Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019), (..., features) -> (..., features)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension; the arithmetic is fp32 inside."""
        return rms_norm(x, self._own(self.weight, x.dtype), self.eps, self.backend)


class LayerNorm(Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016), (..., features) -> (..., features)."""

    def __init__(self, features: int, mesh: DeviceMesh, **options: object) -> None:
        super().__init__(features, mesh, bias=True, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension; the arithmetic is fp32 inside."""
        assert self.bias is not None
        return layer_norm(x, self._own(self.weight, x.dtype), self._own(self.bias, x.dtype), self.eps, self.backend)
