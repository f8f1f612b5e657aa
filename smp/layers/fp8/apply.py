"""Which layers of a model compute in FP8."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp.layers.fp8.history import Algorithm, AmaxHistory
from smp.layers.fp8.layer_scaling import LayerScaling
from smp.layers.fp8.scales import Scales
from smp.layers.fp8.scaling import Precision
from smp.layers.linear import RowParallelLinear, linear_layers
from smp.layers.moe.experts import ExpertLinear, expert_layers
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext


@dataclass(frozen=True)
class Fp8:
    """FP8 settings of a run.

    Attributes:
        precision: recipe and formats.
        history_len, algorithm: of delayed scaling, see :class:`AmaxHistory`.
    """

    precision: Precision
    history_len: int = 1024
    algorithm: Algorithm = "max"


def use_fp8(
    model: nn.Module, fp8: Fp8, context: ParallelContext, device: torch.device, *, leave: Collection[str] = ()
) -> None:
    """Let the column- and row-parallel layers of ``model``, and experts' projections, compute in FP8.

    Args:
        model: or this rank's part of one, with layers of this package.
        fp8: recipe, formats and history.
        context: that the layers were built with.
        device: of the layers.
        leave: names of layers that stay as they are.
    """
    layers = {name: layer for name, layer in fp8_layers(model).items() if name not in leave}
    # The ranks that have parts of a layer's tensors: widths are cut over TP, tokens over the data ranks.
    groups = (context.tp_group, *context.data_groups)
    history = None
    if fp8.precision.recipe == "delayed":
        pipeline = None if context.pp is None else Group.of(context.pp)
        gradient = fp8.precision.gradient
        history = AmaxHistory(list(layers), fp8.history_len, fp8.algorithm, gradient, groups, pipeline, device)
    for row, layer in enumerate(layers.values()):
        # Set on the layer, which computes in its usual precision as long as this is None.
        layer.scaling = LayerScaling(_scales(layer, fp8.precision, groups), history, row)
    model.fp8_history = history  # type: ignore[assignment]  # also of a pipeline rank that has no such layer


def _scales(layer: Any, precision: Precision, groups: tuple[Group, ...]) -> Scales:
    """How scales of ``layer`` are made: which ranks have a part of its tensors, or with scales of rows, of its rows."""
    if precision.recipe != "rowwise":
        return Scales(precision, groups)
    if isinstance(layer, ExpertLinear):
        return Scales(precision, (layer.tp_group,), layer.kind)
    # the group of a layer with every output on each rank is that rank alone: its rows are whole
    return Scales(precision, (layer.group,), "row" if isinstance(layer, RowParallelLinear) else "column")


def fp8_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that can compute in FP8, by name."""
    return linear_layers(model) | expert_layers(model)


def fp8_history(model: nn.Module) -> AmaxHistory | None:
    """The history that :func:`use_fp8` made for delayed scaling; None for other recipes."""
    found = getattr(model, "fp8_history", None)
    return found if isinstance(found, AmaxHistory) else None


def read_scales_of(copy: nn.Module, model: nn.Module) -> None:
    """Let a frozen copy of ``model`` quantise under the model's scales: with delayed scaling those of the model's
    history, which a copy, that is only evaluated, would never have."""
    owners = fp8_layers(model)
    for name, layer in fp8_layers(copy).items():
        layer.scaling = owners[name].scaling
    copy.fp8_history = fp8_history(model)  # type: ignore[assignment]
