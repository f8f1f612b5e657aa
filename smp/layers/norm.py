"""Normalizations whose weights every TP rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.norm import add_norm, norm
from smp.kernels.registry import accumulation_dtype
from smp.layers.parameter import REPLICATE, SHARD_ROWS, Constant, Initializer, local, tp_parameter
from smp.parallel.collectives import copy_to_group, reduce_from_group
from smp.parallel.context import ParallelContext


class Norm(nn.Module):
    """What both kinds share: replicated parameters, whose gradients are summed when each rank sees its own part.

    Args:
        features: size of the last dimension.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` each rank normalizes
            its own tokens.
        eps: added to the variance.
        bias: add one.
        one_plus: multiply by 1 + the weight, which starts at 0 (Gemma).
        split_input: each rank normalizes other data even without sequence parallelism, as its own heads.
        kernels: what computes it.

    Where ranks normalize different data the gradient of the weight is the sum over them.
    """

    def __init__(
        self,
        features: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        eps: float = 1e-5,
        bias: bool = False,
        one_plus: bool = False,
        split_input: bool = False,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.features, self.eps, self.backend = features, eps, kernels.norm
        self.one_plus = one_plus
        self.sequence_parallel = context.sequence_parallel
        self.shared_by = context.tp_group if split_input else context.shared_by
        self.weight = tp_parameter((features,), REPLICATE, context.tp)
        self.bias = tp_parameter((features,), REPLICATE, context.tp) if bias else None
        self.initializers: dict[str, Initializer] = {
            "weight": Constant(0.0 if one_plus else 1.0),
            "bias": Constant(0.0),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension; the arithmetic is fp32 inside."""
        return norm(x, *self._weights(x.dtype), self.eps, self.backend)

    def after_addition(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized x + added, x + added), in one pass where the kernel can."""
        return add_norm(x, added, *self._weights(x.dtype), self.eps, self.backend)

    def _weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.bias is None else local(self.bias, dtype, summed_over=self.shared_by)
        if not self.one_plus:
            return local(self.weight, dtype, summed_over=self.shared_by), bias
        own = local(self.weight, dtype, summed_over=self.shared_by)  # as FSDP gathers it
        weight = 1 + own.to(accumulation_dtype(dtype))  # bf16 has no 1.001
        return weight, None if bias is None else bias.to(weight.dtype)


class RMSNorm(Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019), (..., features) -> (..., features)."""


class SplitRMSNorm(nn.Module):
    """:class:`RMSNorm` of features that are split over the TP ranks: (..., features/p) -> the same. What crosses links
    is a float for each row, there and in the backward pass.

    Args:
        features: of all ranks, which have to divide them.
        parallel: a context, or a plain 1-D tensor-parallel mesh.
        eps: added to the mean square.
    """

    def __init__(self, features: int, parallel: ParallelContext | DeviceMesh, *, eps: float = 1e-5) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.features, self.eps, self.group = features, eps, context.tp_group
        self.weight = tp_parameter((features,), SHARD_ROWS, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Constant(1.0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension over all ranks; the arithmetic is fp32 inside."""
        wide = x.to(accumulation_dtype(x.dtype))
        squares = reduce_from_group(wide.square().sum(-1, keepdim=True), self.group)
        squares = copy_to_group(squares, self.group)  # every rank divides its own features by it
        normed = wide * torch.rsqrt(squares / self.features + self.eps)
        return (normed * local(self.weight, x.dtype)).to(x.dtype)


class LayerNorm(Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016), (..., features) -> (..., features)."""

    def __init__(
        self, features: int, parallel: ParallelContext | DeviceMesh, *, bias: bool = True, **options: Any
    ) -> None:
        super().__init__(features, parallel, bias=bias, **options)

    def _weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = super()._weights(dtype)
        return weight, torch.zeros_like(weight) if bias is None else bias  # a kernel centers where there is a bias
