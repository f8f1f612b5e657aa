"""Normalizations. Every TP rank has a copy of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.norm import add_norm, norm
from smp.kernels.registry import accumulation_dtype
from smp.layers.parameter import REPLICATE, SHARD_ROWS, Constant, Initializer, local, tp_parameter
from smp.parallel.collectives import copy_to_group, reduce_from_group, sum_gradients
from smp.parallel.context import ParallelContext

Own = Sequence[torch.Tensor]
"""A norm's weight and, if it has one, its bias, whose gradients will be sums over the ranks that share them."""


class Norm(nn.Module):
    """Base of RMSNorm and LayerNorm: replicated parameters; gradients are summed when each rank sees its own part.

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
        # Heads are split over the ranks with and without sequence parallelism.
        self.shared_by = context.tp_group if split_input else context.shared_by
        self.weight = tp_parameter((features,), REPLICATE, context.tp)
        self.bias = tp_parameter((features,), REPLICATE, context.tp) if bias else None
        self.initializers: dict[str, Initializer] = {
            "weight": Constant(0.0 if one_plus else 1.0),
            "bias": Constant(0.0),
        }

    def forward(self, x: torch.Tensor, own: Own | None = None) -> torch.Tensor:
        """Normalize the last dimension; the arithmetic is fp32 inside. ``own`` is from :func:`local_weights`."""
        return norm(x, *self._weights(x.dtype, own), self.eps, self.backend)

    def after_addition(
        self, x: torch.Tensor, added: torch.Tensor, own: Own | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized x + added, x + added), in one pass where the kernel can."""
        return add_norm(x, added, *self._weights(x.dtype, own), self.eps, self.backend)

    def parts(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Weight and, if there is one, bias of this rank, whose gradients are not yet summed."""
        # Not summed here: ``local_weights`` sums those of several norms at once.
        return [local(p, dtype) for p in (self.weight, self.bias) if p is not None]

    def _weights(self, dtype: torch.dtype, own: Own | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, *biases = local_weights([self], dtype)[0] if own is None else own
        bias = biases[0] if biases else None
        if self.one_plus:
            weight = 1 + weight.to(accumulation_dtype(dtype))  # bf16 has no 1.001
            bias = None if bias is None else bias.to(weight.dtype)
        return weight, bias


def local_weights(norms: Sequence[Norm], dtype: torch.dtype) -> list[Own]:
    """Weights and biases of each norm in ``dtype``. Gradients of norms that the same ranks share are summed in one
    all-reduce, when all are there; so the norms are of one unit of FSDP, which takes its gradients together."""
    parts = [each.parts(dtype) for each in norms]
    shared_by = norms[0].shared_by
    # Several groups in one all-reduce would sum what does not belong together.
    assert all(each.shared_by == shared_by for each in norms), "norms that the same ranks share"
    if shared_by is None:
        return list(parts)
    # In the order of the norms, which is the same on all ranks.
    summed = iter(sum_gradients([part for own in parts for part in own], shared_by))
    return [[next(summed) for _ in own] for own in parts]


class RMSNorm(Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019), (..., features) -> (..., features)."""


class SplitRMSNorm(nn.Module):
    """:class:`RMSNorm` of features that are split over the TP ranks: (..., features/p) -> the same. It all-reduces one
    float per row in the forward and in the backward pass, or nothing where every rank has whole groups.

    Args:
        features: number over all ranks; divisible by the number of ranks.
        parallel: a context, or a plain 1-D tensor-parallel mesh.
        eps: added to the mean square.
        groups: of neighbouring features, each normalized alone: one, or a multiple of the number of ranks.
    """

    def __init__(
        self, features: int, parallel: ParallelContext | DeviceMesh, *, eps: float = 1e-5, groups: int = 1
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        ranks = context.tp_group.size
        if groups > 1 and groups % ranks:
            raise ValueError(f"{groups} groups of features do not split over {ranks} ranks")
        self.size, self.eps, self.group = features // groups, eps, context.tp_group
        self.own_groups = max(groups // ranks, 1)
        self.is_shared = groups < ranks
        self.weight = tp_parameter((features,), SHARD_ROWS, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Constant(1.0)}

    def forward(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normalize each group of the last dimension, over all ranks that have of it; the arithmetic is fp32 inside.
        The result is in ``dtype``, by default that of ``x``."""
        dtype = dtype or x.dtype
        # (..., groups of this rank, features of a group on this rank)
        wide = x.to(accumulation_dtype(x.dtype)).unflatten(-1, (self.own_groups, -1))
        # (..., groups of this rank, 1)
        squares = wide.square().sum(-1, keepdim=True)
        if self.is_shared:
            # Its adjoint passes the gradient as it is; the next line sums it.
            squares = reduce_from_group(squares, self.group)
            squares = copy_to_group(squares, self.group)  # every rank divides its own features by it
        normed = (wide * torch.rsqrt(squares / self.size + self.eps)).flatten(-2)
        return (normed * local(self.weight, dtype)).to(dtype)


def l2_normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps)`` of the last dimension, without a weight; the arithmetic is fp32 inside."""
    return F.rms_norm(x.to(accumulation_dtype(x.dtype)), x.shape[-1:], eps=eps).to(x.dtype)


class LayerNorm(Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016), (..., features) -> (..., features)."""

    def __init__(
        self, features: int, parallel: ParallelContext | DeviceMesh, *, bias: bool = True, **options: Any
    ) -> None:
        super().__init__(features, parallel, bias=bias, **options)

    def _weights(self, dtype: torch.dtype, own: Own | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = super()._weights(dtype, own)
        return weight, torch.zeros_like(weight) if bias is None else bias  # a kernel centers where there is a bias
