"""torch's SyncBatchNorm on CPUs: its own exchange over a process group, with kernels that torch has for GPUs only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm

EPS = 1e-5
CHANNELS = 8200
"""So many that the gather of means and the sum of gradients are above 64 KiB."""


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), (x.var(0, unbiased=False) + eps).rsqrt()


def _gather_stats(
    _: torch.Tensor, means: torch.Tensor, invstds: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    eps, counts = others[-2], others[-1]
    share = (counts / counts.sum())[:, None]
    mean = (means * share).sum(0)
    squares = ((invstds**-2 - eps + means**2) * share).sum(0)
    return mean, (squares - mean**2 + eps).rsqrt()


def _normalize(x: torch.Tensor, w: Any, b: Any, mean: torch.Tensor, invstd: torch.Tensor, _: float) -> torch.Tensor:
    return (x - mean) * invstd * w + b


def _reduce(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    product = (g * (x - mean)).sum(0)
    return g.sum(0), product, product * invstd, g.sum(0)


def _backward(
    g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, w: Any, *sums: torch.Tensor
) -> torch.Tensor:
    total, product, counts = sums
    rows = counts.sum()
    return (g - total / rows - (x - mean) * invstd**2 * product / rows) * invstd * w


KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather_stats,
    "batch_norm_elemt": _normalize,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _backward,
}


def error_of_sync_batch_norm(rank: int, world: int, group: Any) -> float:
    """Largest difference of results and gradients from a norm over the rows of all ranks, which have unequal many."""
    sizes = [2 + of for of in range(world)]
    whole = torch.randn(sum(sizes), CHANNELS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    slope = torch.randn(sum(sizes), CHANNELS, generator=torch.Generator().manual_seed(1))
    plain = nn.BatchNorm1d(CHANNELS, eps=EPS)
    (plain(whole) * slope).sum().backward()
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    x = whole.detach()[own].requires_grad_()
    weight, bias = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in KERNELS.items():
            patch.setattr(torch, name, kernel)
        y = SyncBatchNorm.apply(x, weight, bias, None, None, EPS, 0.1, group, world)
        (y * slope[own]).sum().backward()
    assert x.grad is not None and whole.grad is not None
    return max(float((y - plain(whole)[own]).abs().max()), float((x.grad - whole.grad[own]).abs().max()))
