"""Which layers of a model compute in FP8."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp.kernels.fp8 import E4M3, inverse_scale, largest
from smp.layers.fp8.history import WEIGHT, Algorithm, AmaxHistory, note
from smp.layers.fp8.scales import Scales
from smp.layers.fp8.scaling import Precision, Scaling
from smp.layers.fp8.traced import TracedScaling
from smp.layers.linear import RowParallelLinear, linear_layers
from smp.layers.moe.experts import ExpertLinear, expert_layers
from smp.parallel.collectives import Group, max_over
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
    """What a linear layer knows of FP8: how its scales are made, and with delayed scaling its row of the history."""

    def __init__(self, made: Scales, history: AmaxHistory | None = None, row: int = 0) -> None:
        self._made, self._key, self.history = made, made.key, history
        # its tensors and not its row: compiled code of a block serves all blocks
        self._now = None if history is None else history.now[row]
        self._inverse = None if history is None else history.inverses[row]
        self.gathered = False  # the weight comes as 8-bit numbers, and its maximum is noted before

    def of_call(self, layers: Sequence[LayerScaling]) -> Scaling:
        """Of one call of layers that share their input, this one the first of them."""
        inverse = [layer._inverse for layer in layers if layer._inverse is not None]
        notes = [layer._now for layer in layers if layer._now is not None] if torch.is_grad_enabled() else []
        is_empty = self.history is not None and self.history.is_empty
        notes_weights = is_empty or not self.gathered
        if torch.compiler.is_compiling():
            return TracedScaling(self._made, self._key, notes, inverse, is_empty, notes_weights)
        return self._made.scaling(notes, inverse, is_empty, notes_weights)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Whose ranks have parts of a tensor."""
        return self._made.groups

    def of_weight(self, part: torch.Tensor) -> torch.Tensor:
        """Delayed scaling: the scale of a weight, fp32 0-dim; the maximum of this rank's part of it is noted."""
        assert self._now is not None and self._inverse is not None
        note([part], [self._now[WEIGHT]])
        return self._inverse[WEIGHT]


def scales_of_parts(layers: Sequence[LayerScaling], parts: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The scales, fp32 0-dim, of whole weights of which this rank has ``parts``; of recipes with one for a tensor.
    None: there are none yet. With delayed scaling maxima are noted here, before numbers are rounded."""
    if (history := layers[0].history) is not None:
        if history.is_empty:
            return None
        return [layer.of_weight(part) for layer, part in zip(layers, parts, strict=True)]
    amaxes = torch.stack([largest(part) for part in parts])
    return list(inverse_scale(max_over(amaxes, layers[0].groups), E4M3).unbind())


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
        layer.scaling = LayerScaling(_scales(layer, fp8.precision, groups), history, row)
    model.fp8_history = history  # type: ignore[assignment]  # also of a pipeline rank that has no such layer


def _scales(layer: Any, precision: Precision, groups: tuple[Group, ...]) -> Scales:
    """Of ``layer``: which ranks have a part of its tensors, or with scales of rows, of its rows."""
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
    """What :func:`use_fp8` made for delayed scaling; None without it."""
    found = getattr(model, "fp8_history", None)
    return found if isinstance(found, AmaxHistory) else None


def read_scales_of(copy: nn.Module, model: nn.Module) -> None:
    """Let a frozen copy of ``model`` quantise under the model's scales: with delayed scaling those of the model's
    history, which a copy, that is only evaluated, would never have."""
    owners = fp8_layers(model)
    for name, layer in fp8_layers(copy).items():
        layer.scaling = owners[name].scaling
    copy.fp8_history = fp8_history(model)  # type: ignore[assignment]
