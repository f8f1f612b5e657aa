"""Column- and row-parallel linear layers.

With weights (out, in) and p ranks, a column-parallel layer holds rows ``out/p`` of the weight and makes columns
``out/p`` of the result; a row-parallel one holds columns ``in/p``, takes such a result and sums the partial products.
One after the other they need one collective each way (Shoeybi et al. 2019, arXiv 1909.08053). With sequence parallelism
(Korthikanti et al. 2022, arXiv 2205.05198) what enters and leaves the pair is split along dim 0 of the input: the sum
becomes a reduce-scatter, and an all-gather precedes the column-parallel layer.

Product and collective are one operator, see ``smp.layers.operators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward
from smp.layers.deferred import Defer, column_parallel_deferred, row_parallel_deferred
from smp.layers.lora import Lora, add_column_adapters, add_row_adapter
from smp.layers.operators import column_forward, row_forward
from smp.layers.parameter import (
    REPLICATE,
    SHARD_COLUMNS,
    SHARD_ROWS,
    Constant,
    Initializer,
    Normal,
    local,
    tp_parameter,
)
from smp.parallel.collectives import (
    Group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)


@torch.library.custom_op("smp::column_parallel_backward", mutates_args=())
def _column_backward(
    grads: list[torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    wanted: list[bool],
    name: str,
    size: int,
    rank: int,
    sequence_parallel: bool,
) -> list[torch.Tensor]:
    """Gradients of the input and of each wanted weight; ``x`` is empty when none is. The links are kept busy under the
    matrix products: the all-gather of the input runs under the input-gradient product, the reduction of the input
    gradient under the weight-gradient products."""
    group = Group(name, size, rank)
    gathers = sequence_parallel and any(wanted)
    gathering = start_all_gather(x, group) if gathers else x
    dx = grads[0] @ weights[0]  # (tokens, ..., in), this rank's part of the sum
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx = dx + grad @ weight
    full = wait(gathering, group) if gathers else x
    reducing = start_reduce_scatter(dx, group) if sequence_parallel else start_all_reduce(dx, group)
    flat = full.flatten(0, -2) if any(wanted) else full
    dws = [g.flatten(0, -2).t() @ flat for g, want in zip(grads, wanted, strict=True) if want]
    return [wait(reducing, group), *dws]


@_column_backward.register_fake
def _(
    grads: list[torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    wanted: list[bool],
    name: str,
    size: int,
    rank: int,
    sequence_parallel: bool,
) -> list[torch.Tensor]:
    tokens = grads[0].shape[0] // (size if sequence_parallel else 1)
    dx = grads[0].new_empty(tokens, *grads[0].shape[1:-1], weights[0].shape[1])
    return [dx, *(w.new_empty(w.shape) for w, want in zip(weights, wanted, strict=True) if want)]


class _ColumnParallel(torch.autograd.Function):
    """Saves only this rank's part of the input; the backward pass gathers it again. Weights that are frozen get no
    gradient, and when all are the input is not saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """x, group, sequence_parallel, weights. (Were the first three parameters of their own, torch 2.13's compiler
        would take two weights without a gradient for a call that has no ``ctx``: it compares counts.)"""
        x, group, sequence_parallel, *weights = inputs
        ctx.where = (group.name, group.size, group.rank, sequence_parallel)
        wanted = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(x if wanted else x.new_empty(0), *weights)
        return tuple(column_forward(x, weights, *ctx.where))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[3:])
        dx, *dws = _column_backward(list(grads), x, weights, wanted, *ctx.where)
        rest = iter(dws)
        return dx, None, None, *(next(rest) if want else None for want in wanted)


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Group, sequence_parallel: bool) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else x.new_empty(0), weight)
        return row_forward(x, weight, group.name, group.size, group.rank, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad = wait(start_all_gather(grad, ctx.group), ctx.group)  # (tokens, ..., out)
        dweight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight, dweight, None, None


class _RowParallelSwiglu(torch.autograd.Function):
    """SwiGLU and the product behind it. The activation between them, which the weight's gradient needs, is not kept:
    the backward pass of SwiGLU makes it again on its way."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        weight: torch.Tensor,
        group: Group,
        sequence_parallel: bool,
        backend: str,
    ) -> torch.Tensor:
        ctx.group, ctx.sequence_parallel, ctx.backend = group, sequence_parallel, backend
        ctx.save_for_backward(gate, up, weight)
        a = swiglu_forward(gate, up, backend)  # (tokens, ..., in/p)
        if group.size == 1:
            return F.linear(a, weight)
        return row_forward(a, weight, group.name, group.size, group.rank, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad = wait(start_all_gather(grad, ctx.group), ctx.group)  # (tokens, ..., out)
        trained = ctx.needs_input_grad[2]
        dgate, dup, a = swiglu_backward(grad @ weight, gate, up, ctx.backend, again=trained)
        dweight = grad.flatten(0, -2).t() @ a.flatten(0, -2) if trained else None
        return dgate, dup, dweight, None, None, None


def row_parallel_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    layer: RowParallelLinear,
    backend: str,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """``layer(SiLU(gate) * up)``; with a fused ``backend`` the activation in between is not kept but made again.

    Shapes: (tokens, ..., in / p) twice -> (tokens [/p], ..., out). ``numbers`` are those of the tokens, for dropout in
    an adapter.
    """
    # a deferred weight gradient needs the activation later, and so does an adapter's
    if backend == "torch" or layer.defer is not None or layer.lora is not None:
        return layer(swiglu(gate, up, backend), numbers)
    y = _RowParallelSwiglu.apply(
        gate, up, local(layer.weight, gate.dtype), layer.group, layer.sequence_parallel, backend
    )
    return layer.add_bias(y)


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b`` with the output features split over the TP ranks.

    Args:
        in_features, out_features: global sizes.
        mesh: 1-D tensor-parallel mesh.
        bias: add a bias, split like the output.
        sequence_parallel: dim 0 of the input is split over the ranks.
        parts: into how many parts the output may be cut (key/value heads). With fewer parts than ranks, neighbouring
            ranks hold the whole weight and compute the same part; the gradient is their sum.
        init_std: standard deviation of the initial weight.
        device, dtype: of the parameters.

    Shapes: (tokens, ..., in) -> (tokens, ..., out / min(p, parts)); under sequence parallelism the input's dim 0 is
    tokens / p and the output's is tokens.

    Raises:
        ValueError: when out_features cannot be cut evenly.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        parts: int | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = Group.of(mesh)
        self.sequence_parallel = sequence_parallel
        self.replicated = parts is not None and parts < self.group.size
        if parts and (out_features % parts or (parts % self.group.size and self.group.size % parts)):
            raise ValueError(f"{out_features} outputs in {parts} parts cannot be shared by {self.group.size} ranks")
        self.part_features = out_features // (parts if self.replicated and parts else self.group.size)
        placement = REPLICATE if self.replicated else SHARD_ROWS
        self.weight = tp_parameter((out_features, in_features), placement, mesh, device, dtype)
        self.bias = tp_parameter((out_features,), placement, mesh, device, dtype) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std), "bias": Constant(0.0)}
        shared_by = self.group.size // parts if self.replicated and parts else 1
        self._first_row = (self.group.rank // shared_by) * self.part_features
        self.defer: Defer | None = None  # see smp.layers.deferred
        self.lora: Lora | None = None  # see smp.layers.lora

    def _own(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows that this rank computes with."""
        if not self.replicated:
            return local(parameter, dtype)
        return local(parameter, dtype, summed_over=self.group).narrow(0, self._first_row, self.part_features)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], ..., in) -> (tokens, ..., this rank's outputs); ``numbers`` of the tokens, for dropout."""
        return column_parallel(x, [self], numbers)[0]


def column_parallel(
    x: torch.Tensor, layers: Sequence[ColumnParallelLinear], numbers: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Apply several column-parallel layers to one input, with one collective in each direction for all of them.

    Args:
        x: (tokens [/p], ..., in).
        layers: one or more.
        numbers: int64 (tokens [/p],), global numbers of the tokens, which dropout in adapters is keyed by.

    Raises:
        ValueError: when the layers differ in their group, in ``sequence_parallel`` or in who computes their gradients.
    """
    first = layers[0]
    for m in layers[1:]:
        same = m.group == first.group and m.sequence_parallel == first.sequence_parallel and m.defer == first.defer
        if not same:
            raise ValueError("layers with one input differ in their group, in sequence_parallel or in defer")
    weights = [layer._own(layer.weight, x.dtype) for layer in layers]
    if first.defer is not None:
        outputs = column_parallel_deferred(x, layers, weights)
    elif first.group.size == 1:
        outputs = tuple(F.linear(x, w) for w in weights)
    else:
        outputs = _ColumnParallel.apply(x, first.group, first.sequence_parallel, *weights)
    adapted = add_column_adapters(x, outputs, layers, numbers)
    biases = [layer.bias for layer in layers]
    return [y if b is None else y + m._own(b, y.dtype) for y, b, m in zip(adapted, biases, layers, strict=True)]


class RowParallelLinear(nn.Module):
    """``y = x W^T + b`` with the input features split over the TP ranks.

    Args:
        in_features, out_features: global sizes; in_features must be divisible by the mesh size.
        mesh: 1-D tensor-parallel mesh.
        bias: add a bias, once, after the sum.
        sequence_parallel: split dim 0 of the output over the ranks instead of giving all of it to each.
        init_std: standard deviation of the initial weight.
        device, dtype: of the parameters.

    Shapes: (tokens, ..., in / p) -> (tokens, ..., out), or (tokens / p, ..., out) under sequence parallelism.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = Group.of(mesh)
        self.sequence_parallel = sequence_parallel
        self.weight = tp_parameter((out_features, in_features), SHARD_COLUMNS, mesh, device, dtype)
        self.bias = tp_parameter((out_features,), REPLICATE, mesh, device, dtype) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std), "bias": Constant(0.0)}
        self.defer: Defer | None = None  # see smp.layers.deferred
        self.lora: Lora | None = None  # see smp.layers.lora

    def forward(self, x: torch.Tensor, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens, ..., in/p) -> (tokens [/p], ..., out); ``numbers`` int64 (tokens,), for dropout in an adapter."""
        if self.defer is not None:
            y = row_parallel_deferred(x, self, local(self.weight, x.dtype))
        elif self.group.size == 1:
            y = F.linear(x, local(self.weight, x.dtype))
        else:
            y = _RowParallel.apply(x, local(self.weight, x.dtype), self.group, self.sequence_parallel)
        return self.add_bias(add_row_adapter(x, y, self, numbers))

    def add_bias(self, y: torch.Tensor) -> torch.Tensor:
        """The end of ``forward``: (tokens [/p], ..., out) -> the same."""
        if self.bias is None:
            return y
        return y + local(self.bias, y.dtype, summed_over=self.group if self.sequence_parallel else None)
