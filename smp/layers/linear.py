"""Column- and row-parallel linear layers.

With weights (out, in) and p ranks, a column-parallel layer holds rows ``out/p`` of the weight and makes columns
``out/p`` of the result; a row-parallel one holds columns ``in/p``, takes such a result and sums the partial products.
One after the other they need one collective each way (Shoeybi et al. 2019, arXiv 1909.08053). With sequence parallelism
(Korthikanti et al. 2022, arXiv 2205.05198) what enters and leaves the pair is split along dim 0 of the input: the sum
becomes a reduce-scatter, and an all-gather precedes the column-parallel layer.

The layers own parameters; ``smp.layers.linear_functions`` has the products and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels.swiglu import FusedSwiglu
from smp.layers.fp8.layer_scaling import LayerScaling
from smp.layers.linear_functions import Linear, Sink, column_parallel_function, row_parallel_function
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
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext

_ALONE = Group("alone", 1, 0)


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b`` with the output features split over the TP ranks.

    Args:
        in_features, out_features: global sizes.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` dim 0 of the input is
            split over the ranks.
        bias: add a bias, split like the output.
        parts: into how many parts the output may be cut (key/value heads). With fewer parts than ranks, neighbouring
            ranks hold the whole weight and compute the same part; the gradient is their sum.
        every_output: every rank holds the whole weight and computes all outputs of the tokens that it has; nothing is
            communicated but, under sequence parallelism, the weight's gradient, which is summed.
        init_std: standard deviation of the initial weight.

    Shapes: (tokens, ..., in) -> (tokens, ..., out / min(p, parts)); under sequence parallelism the input's dim 0 is
    tokens / p and the output's is tokens. With ``every_output`` (tokens [/p], ..., in) -> (tokens [/p], ..., out).

    Raises:
        ValueError: when out_features cannot be cut evenly.

    Attributes:
        product: which matrix product runs, see ``smp.kernels.product``.
        scaling: in FP8 where scales come from, and thereby the product, see ``smp.layers.fp8``.
        sink: who computes weight gradients later; None: the backward pass does.
        shared_by: the group whose ranks have different tokens of ``x``; None: all have the same.
    """

    add_low_rank: ClassVar[Callable[..., list[torch.Tensor]] | None] = None
    """Hook of layers with an adapter: adds to the products of all layers that share its input; see
    ``smp.layers.adapters.lora``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        bias: bool = True,
        parts: int | None = None,
        every_output: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.group, self.sequence_parallel = context.tp_group, context.sequence_parallel
        self.shared_by = context.shared_by
        self.replicated = every_output or (parts is not None and parts < self.group.size)
        if every_output:
            self.group, self.sequence_parallel, parts = _ALONE, False, 1
        self._summed_over = self.shared_by if every_output else self.group  # of a replicated weight
        if parts and (out_features % parts or (parts % self.group.size and self.group.size % parts)):
            raise ValueError(f"{out_features} outputs in {parts} parts cannot be shared by {self.group.size} ranks")
        self.part_features = out_features // (parts if self.replicated and parts else self.group.size)
        # A replicated weight is one parameter in checkpoints, whatever number of ranks share a part of it.
        placement = REPLICATE if self.replicated else SHARD_ROWS
        self.weight = tp_parameter((out_features, in_features), placement, context.tp)
        self.bias = tp_parameter((out_features,), placement, context.tp) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std), "bias": Constant(0.0)}
        # So many neighbouring ranks compute the same part.
        shared_by = self.group.size // parts if self.replicated and parts else 1
        self._first_row = (self.group.rank // shared_by) * self.part_features
        self.product = "dense"
        self.scaling: LayerScaling | None = None
        self.sink: Sink | None = None

    def own_rows(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows of the weight, or of what is cut as it is, that this rank computes with."""
        if not self.replicated:
            return local(parameter, dtype)
        # Each rank uses other rows, or the same rows on other tokens: the parameter's gradient is the sum.
        part = local(parameter, dtype, summed_over=self._summed_over)
        return part.narrow(0, self._first_row, self.part_features)

    def forward(self, x: torch.Tensor, token_index: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], ..., in) -> (tokens, ..., this rank's outputs). ``token_index`` is int64 (tokens [/p],), global
        numbers of the tokens in ``x``, which dropout in an adapter is keyed by."""
        return column_parallel(x, [self], token_index)[0]


def column_parallel(
    x: torch.Tensor, layers: Sequence[ColumnParallelLinear], token_index: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Apply several column-parallel layers to one input, with one collective in each direction for all of them.

    Args:
        x: (tokens [/p], ..., in).
        layers: one or more.
        token_index: as of :meth:`ColumnParallelLinear.forward`.

    Raises:
        ValueError: when the layers differ in their group, in ``sequence_parallel``, in their product or in their sink.
    """
    first = layers[0]
    linear = _call([first], x.dtype)
    for m in layers[1:]:
        # Compared without their scaling, which each layer has of its own.
        if _call([m], x.dtype) != linear or m.sink != first.sink:
            raise ValueError("layers with one input differ in their group, sequence_parallel, product or sink")
    # Again with all layers: in FP8 they share one exchange of maxima.
    linear = _call(layers, x.dtype)
    # (out/p, in) each
    weights = [layer.own_rows(layer.weight, x.dtype) for layer in layers]
    outputs = list(column_parallel_function(x, weights, linear, first.sink, layers if first.sink else ()))
    add_low_rank = next((m.add_low_rank for m in layers if m.add_low_rank is not None), None)
    if add_low_rank is not None:
        # Adapters of all layers together: one collective for their low-rank activations.
        outputs = add_low_rank(x, outputs, layers, token_index)
    biases = [layer.bias for layer in layers]
    return [y if b is None else y + m.own_rows(b, y.dtype) for y, b, m in zip(outputs, biases, layers, strict=True)]


class RowParallelLinear(nn.Module):
    """``y = x W^T + b`` with the input features split over the TP ranks.

    Args:
        in_features, out_features: global sizes; in_features must be divisible by the number of ranks.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` dim 0 of the output is
            split over the ranks instead of giving all of it to each.
        bias: add a bias, once, after the sum.
        init_std: standard deviation of the initial weight.

    Shapes: (tokens, ..., in / p) -> (tokens, ..., out), or (tokens / p, ..., out) under sequence parallelism.

    Attributes:
        product, scaling, sink: as of :class:`ColumnParallelLinear`.
    """

    add_low_rank: ClassVar[Callable[..., torch.Tensor] | None] = None
    """Hook of layers with an adapter: adds to the product; see ``smp.layers.adapters.lora``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        bias: bool = True,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.group, self.sequence_parallel = context.tp_group, context.sequence_parallel
        self.shared_by = context.shared_by
        self.weight = tp_parameter((out_features, in_features), SHARD_COLUMNS, context.tp)
        self.bias = tp_parameter((out_features,), REPLICATE, context.tp) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std), "bias": Constant(0.0)}
        self.product = "dense"
        self.scaling: LayerScaling | None = None
        self.sink: Sink | None = None

    def forward(
        self,
        *inputs: torch.Tensor,
        token_index: torch.Tensor | None = None,
        activation: FusedSwiglu | None = None,
    ) -> torch.Tensor:
        """(tokens, ..., in/p) -> (tokens [/p], ..., out).

        Args:
            inputs: one, or those of ``activation``.
            token_index: int64 (tokens,), global numbers of the tokens, for dropout in an adapter.
            activation: applied first; its result is not kept for the backward pass but made again. Not for a layer with
                an adapter, which needs the result too.
        """
        # (out, in/p)
        weight = local(self.weight, inputs[0].dtype)
        linear = _call([self], weight.dtype)
        # (tokens [/p], ..., out), summed over the ranks
        y = row_parallel_function(inputs, weight, linear, activation, self.sink, self if self.sink else None)
        if self.add_low_rank is not None:
            y = self.add_low_rank(inputs[0], y, token_index)
        # After the sum over ranks: before it the bias would be added once per rank.
        return y if self.bias is None else y + local(self.bias, y.dtype, summed_over=self.shared_by)


def _call(layers: Sequence[Any], dtype: torch.dtype) -> Linear:
    """Options of a call of layers that share an input, with results of ``dtype``."""
    first = layers[0]
    if first.scaling is None:
        return Linear(first.group, first.sequence_parallel, first.product)
    scaling = first.scaling.of_call([layer.scaling for layer in layers])
    return Linear(first.group, first.sequence_parallel, scaling.product(dtype), scaling)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Column- and row-parallel layers of ``model`` by name."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
