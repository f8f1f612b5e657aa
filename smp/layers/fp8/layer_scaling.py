"""FP8 state of one linear layer. Imports no layer, so that layers can import it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smp.kernels.precision.fp8 import E4M3, inverse_scale, largest
from smp.layers.fp8.history import WEIGHT, AmaxHistory, note
from smp.layers.fp8.scales import Scales
from smp.layers.fp8.scaling import Scaling
from smp.layers.fp8.traced import TracedScaling
from smp.parallel.collectives import Group, max_over


class LayerScaling:
    """FP8 state of a linear layer: how its scales are made, and with delayed scaling its row of the history."""

    def __init__(self, made: Scales, history: AmaxHistory | None = None, row: int = 0) -> None:
        self._made, self._key, self.history = made, made.key, history
        # its tensors and not its row: compiled code of a block serves all blocks
        self._now = None if history is None else history.now[row]
        self._inverse = None if history is None else history.inverses[row]
        self.gathered = False  # the weight comes as 8-bit numbers, and its maximum is noted before

    def of_call(self, layers: Sequence[LayerScaling]) -> Scaling:
        """The scaling for one call of layers that share their input, this one the first of them."""
        inverse = [layer._inverse for layer in layers if layer._inverse is not None]
        # Evaluation notes no maxima: they would enter the history of training.
        notes = [layer._now for layer in layers if layer._now is not None] if torch.is_grad_enabled() else []
        is_empty = self.history is not None and self.history.is_empty
        # Before there is a history the gather is in the run's precision and notes nothing.
        notes_weights = is_empty or not self.gathered
        if torch.compiler.is_compiling():
            return TracedScaling(self._made, self._key, notes, inverse, is_empty, notes_weights)
        return self._made.scaling(notes, inverse, is_empty, notes_weights)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups whose ranks have parts of a tensor."""
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
