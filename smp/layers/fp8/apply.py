"""Which layers of a model compute in FP8."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smp.layers.fp8.history import Algorithm, AmaxHistory, DelayedScaling
from smp.layers.fp8.scaling import BlockScaling, Precision, RowScaling, Scaling, TensorScaling
from smp.layers.linear import RowParallelLinear, linear_layers
from smp.layers.moe.experts import ExpertLinear, expert_layers
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext


@dataclass(frozen=True)
class Fp8:
    """How a run computes in FP8.

    Attributes:
        precision: recipe and formats.
        history_len, algorithm: of delayed scaling, see :class:`AmaxHistory`.
    """

    precision: Precision
    history_len: int = 1024
    algorithm: Algorithm = "max"


class LayerScaling:
    """What a linear layer knows of FP8: a recipe, and with delayed scaling its row of the history."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling

    @property
    def history(self) -> AmaxHistory | None:
        """Of delayed scaling."""
        return self._scaling.history if isinstance(self._scaling, DelayedScaling) else None

    def of_call(self, layers: Sequence[LayerScaling]) -> Scaling:
        """Of one call of layers that share their input, this one the first of them."""
        if not isinstance(self._scaling, DelayedScaling):
            return self._scaling
        rows: list[int] = []
        for layer in layers:
            assert isinstance(layer._scaling, DelayedScaling), "layers of one call have one recipe"
            rows += layer._scaling.rows
        return replace(self._scaling, rows=tuple(rows), notes=torch.is_grad_enabled())


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
    groups = (context.tp_group, *context.data_groups)
    history = None
    if fp8.precision.recipe == "delayed":
        pipeline = None if context.pp is None else Group.of(context.pp)
        gradient = fp8.precision.gradient
        history = AmaxHistory(list(layers), fp8.history_len, fp8.algorithm, gradient, groups, pipeline, device)
    for row, layer in enumerate(layers.values()):
        layer.scaling = LayerScaling(_scaling(layer, fp8.precision, groups, history, row))
    model.fp8_history = history  # type: ignore[assignment]  # also of a pipeline rank that has no such layer


def _scaling(
    layer: Any, precision: Precision, groups: tuple[Group, ...], history: AmaxHistory | None, row: int
) -> Scaling:
    if history is not None:
        return DelayedScaling(precision, history, (row,))
    if precision.recipe == "tensorwise":
        return TensorScaling(precision, groups)
    if precision.recipe in ("blockwise", "mxfp8"):
        return BlockScaling(precision)
    is_row = layer.kind == "row" if isinstance(layer, ExpertLinear) else isinstance(layer, RowParallelLinear)
    return RowScaling(precision, "row" if is_row else "column", groups[0])


def fp8_layers(model: nn.Module) -> dict[str, Any]:
    """What may compute in FP8, by name."""
    return linear_layers(model) | expert_layers(model)


def fp8_history(model: nn.Module) -> AmaxHistory | None:
    """What :func:`use_fp8` made for delayed scaling; None without it."""
    found = getattr(model, "fp8_history", None)
    return found if isinstance(found, AmaxHistory) else None
