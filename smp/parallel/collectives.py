"""Collectives for layers, as pairs of adjoints.

Each differentiable function's backward pass is its adjoint:

======================  =============================  =====================
function                forward                        backward
======================  =============================  =====================
copy_to_group           identity                       reduce_from_group
reduce_from_group       all-reduce                     copy_to_group
gather_tokens           all-gather of dim 0            reduce_scatter_tokens
reduce_scatter_tokens   reduce-scatter of dim 0        gather_tokens
split_tokens            this rank's part of dim 0      all-gather of dim 0
gather_features         all-gather of the last dim     this rank's part of it
======================  =============================  =====================

The backward pass of ``gather_tokens`` sums, because each rank does different work on the whole (its columns of a
matrix). That of ``split_tokens`` only gathers: what is split was the same on all ranks. That of ``gather_features``
only cuts: what follows is the same computation on all ranks.

All are built on torch's functional collectives, which trace under ``torch.compile(fullgraph=True)``. The ``start_*``
functions return at once and ``wait`` finishes them: layers put a matrix product in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """A process group as constants that a compiled graph can hold: its registered name, its size and this rank's
    index in it."""

    name: str
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Group:
        """The group of a 1-D mesh."""
        if mesh.ndim != 1:
            raise ValueError(f"a one-dimensional mesh is needed, got dimensions {mesh.mesh_dim_names}")
        return Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def start_all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Begin a sum over the group. The result must go through :func:`wait` before use."""
    return x if group.size == 1 else _ops.all_reduce(x.contiguous(), "sum", group.name)


def start_all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Begin an all-gather along dim 0: (n, ...) -> (n * group size, ...)."""
    return x if group.size == 1 else _ops.all_gather_into_tensor(x.contiguous(), group.size, group.name)


def start_reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Begin a reduce-scatter along dim 0: (n, ...) -> (n / group size, ...); n must be divisible."""
    if group.size == 1:
        return x
    if x.shape[0] % group.size:
        raise ValueError(f"reduce-scatter of {x.shape[0]} rows over {group.size} ranks: not divisible")
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name)


def wait(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Finish a started collective."""
    return x if group.size == 1 else _ops.wait_tensor(x)


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    return wait(start_all_reduce(x, group), group)


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    return wait(start_all_gather(x, group), group)


def _reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    return wait(start_reduce_scatter(x, group), group)


def _own_part(x: torch.Tensor, group: Group) -> torch.Tensor:
    if x.shape[0] % group.size:
        raise ValueError(f"split of {x.shape[0]} rows over {group.size} ranks: not divisible")
    rows = x.shape[0] // group.size
    return x.narrow(0, group.rank * rows, rows).contiguous()


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return _all_gather(x.movedim(-1, 0), group).movedim(0, -1)  # (..., width x size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.narrow(-1, ctx.group.rank * ctx.width, ctx.width), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad.float(), ctx.group).to(grad.dtype), None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Identity; the gradient is summed over the group. For an input that every rank uses with its own weights."""
    return x if group.size == 1 else _CopyToGroup.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group; the gradient passes unchanged. For partial results of a row-parallel product."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)


def gather_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All ranks' rows, (n, ...) -> (n * size, ...); gradients are summed and scattered back."""
    return x if group.size == 1 else _GatherTokens.apply(x, group)


def reduce_scatter_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's rows of the sum, (n, ...) -> (n / size, ...); gradients are gathered."""
    return x if group.size == 1 else _ReduceScatterTokens.apply(x, group)


def split_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks hold, (n, ...) -> (n / size, ...); gradients are gathered."""
    return x if group.size == 1 else _SplitTokens.apply(x, group)


def gather_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All ranks' columns, (..., n) -> (..., n * size). Every rank must compute the same with the result: its gradient
    is cut, not summed."""
    return x if group.size == 1 else _GatherFeatures.apply(x, group)


def sum_gradient(parameter: torch.Tensor, group: Group) -> torch.Tensor:
    """Identity for a weight that all ranks hold but use on different data; its gradient is summed over the group in
    fp32.

    The same as :func:`copy_to_group` except for the precision: a bf16 sum would round once per rank, and the ranks'
    number would show in the result.
    """
    return parameter if group.size == 1 else _SumGradient.apply(parameter, group)
