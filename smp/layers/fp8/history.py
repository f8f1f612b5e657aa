"""Delayed scaling: scales from the largest magnitudes of past steps (Micikevicius et al. 2022, arXiv 2209.05433).

A scale is fixed for a whole step, so how the step is cut into micro-batches and over ranks cannot change it. While a
step runs each rank notes the maxima of what it sees, and at its end one exchange makes them those of all ranks. A pass
that is computed again notes the same maxima again: that changes nothing.

As long as there is no history, in the first step of a run, layers compute without FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from smp.kernels.precision.fp8 import E4M3, LARGEST, Operand, inverse_scale, largest, quantise
from smp.layers.fp8.scaling import Operands, Precision
from smp.parallel.collectives import Group, max_over, sum_over

Algorithm = Literal["max", "most_recent"]
INPUT, WEIGHT, GRADIENT = 0, 1, 2
HISTORY = "fp8.amax_history."
"""Prefix of its tensors' names in checkpoints."""
Maxima = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Maxima of a layer in one step: of its inputs, weights and gradients, fp32 0-dim each. Each has its own memory, which
compiled code writes into: see ``traced.py``."""


class AmaxHistory:
    """The maxima of inputs, weights and gradients of this rank's FP8 layers, in the last steps.

    Args:
        names: of the layers.
        length: steps.
        algorithm: a scale is that of the largest maximum of these steps, or of the last one's.
        gradient: the FP8 dtype of gradients.
        groups: whose ranks hold parts of these layers' tensors.
        pipeline: the group of ranks with the other layers; None: this rank has all.
        device: of the layers.
    """

    def __init__(
        self,
        names: Sequence[str],
        length: int,
        algorithm: Algorithm,
        gradient: torch.dtype,
        groups: Sequence[Group],
        pipeline: Group | None,
        device: torch.device,
    ) -> None:
        self.names, self.algorithm, self.groups = tuple(names), algorithm, tuple(groups)
        self.pipeline = () if pipeline is None else (pipeline,)
        self._formats = (E4M3, E4M3, gradient)
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self._maxima = torch.zeros(len(names), length, 3, **fp32)  # newest first
        # Separate tensors and not rows of one: see :data:`Maxima`.
        zeros = [torch.zeros((), **fp32) for _ in range(3 * len(names))]
        self.now: list[Maxima] = list(zip(zeros[::3], zeros[1::3], zeros[2::3], strict=True))
        self._step = torch.zeros(len(names), 3, **fp32)
        self.inverse = torch.ones(len(names), 3, **fp32)
        # Views of the rows: layers hold them, and see new scales without being told.
        self.inverses = self.inverse.unbind()
        self._ends = torch.tensor([LARGEST[number] for number in self._formats], **fp32)
        self.is_empty = True

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors for a checkpoint, (length, 3) of each layer, by names that do not depend on the layout. The tensors
        are the live ones; call :meth:`restored` after loading into them."""
        return {f"{HISTORY}{name}": self._maxima[i] for i, name in enumerate(self.names)}

    def restored(self) -> None:
        """Compute the scales from maxima that were loaded from a checkpoint."""
        self.is_empty = not bool(self._anywhere(self._maxima) > 0)
        self._set_scales()

    def checked(self, norm: torch.Tensor) -> torch.Tensor:
        """Make the maxima of a step those of all ranks. ``norm``, or NaN when one of them is not finite: an infinite
        number becomes the largest one when it is quantised, and would not show."""
        if self.now:
            # One exchange for all layers: (layers, 3).
            own = torch.stack([maximum for maxima in self.now for maximum in maxima]).view(-1, 3)
            self._step = max_over(own, self.groups)
        # The trainer asks for this before the optimizer step and skips a step whose norm is not finite.
        return torch.where(self._anywhere(self._step).isfinite(), norm, torch.nan)

    def saturated(self) -> torch.Tensor:
        """Number of tensors of all pipeline ranks whose largest number did not fit in the step that was checked, fp32
        0-dim."""
        if self.is_empty:
            return self._step.new_zeros(())
        return sum_over((self._step > self._ends * self.inverse).float().sum(), self.pipeline)

    def advance(self, is_finite: torch.Tensor) -> None:
        """End a step: its maxima enter the history, except for one that was skipped, because it was not finite.

        The host waits for a step only as long as there is no history: one without a gradient leaves none.
        """
        if self.is_empty:
            self.is_empty = not bool(is_finite & (self._anywhere(self._step[:, GRADIENT]) > 0))
        if not self.is_empty:
            # (layers, steps, 3), newest first; the oldest falls out
            newer = torch.cat((self._step[:, None], self._maxima[:, :-1]), dim=1)
            # On the device: whether the step was finite is not known to the host.
            self._maxima.copy_(torch.where(is_finite, newer, self._maxima))
            self._set_scales()
        if self.now:
            # In place: layers and compiled code hold these tensors.
            torch._foreach_zero_([maximum for maxima in self.now for maximum in maxima])

    def _set_scales(self) -> None:
        # (layers, 3): over the steps, of which the newest is first
        maxima = self._maxima.amax(1) if self.algorithm == "max" else self._maxima[:, 0]
        for i, dtype in enumerate(self._formats):
            self.inverse[:, i] = inverse_scale(maxima[:, i], dtype)

    def _anywhere(self, maxima: torch.Tensor) -> torch.Tensor:
        """The largest of them on all pipeline ranks, 0-dim."""
        # A pipeline rank without FP8 layers takes part in the exchange all the same.
        own = maxima.amax() if maxima.numel() else maxima.new_zeros(())
        return max_over(own, self.pipeline)


def note(tensors: Sequence[torch.Tensor], maxima: Sequence[torch.Tensor]) -> None:
    """Note the largest magnitudes of tensors, one for each of ``maxima`` (fp32 0-dim) or one for all."""
    amaxes = [largest(tensor) for tensor in tensors]
    for maximum, amax in zip(maxima, amaxes * (len(maxima) // len(amaxes)), strict=True):
        # In place: compiled code and the history share these tensors.
        torch.maximum(maximum, amax, out=maximum)


@dataclass(frozen=True)
class DelayedScaling:
    """Scales from the history of layers that share an input.

    Attributes:
        now: of each layer, the maxima of this step: noted as training does; empty: evaluation notes none.
        inverse: fp32 (3,) of each layer, its scales.
        is_empty: there is no history yet.
        notes_weights: also maxima of weights; False: a gather does, before it rounds them.
    """

    precision: Precision
    now: tuple[Maxima, ...]
    inverse: tuple[torch.Tensor, ...]
    is_empty: bool
    notes_weights: bool = True

    gathers_first = False

    def _note(self, tensors: Sequence[torch.Tensor], column: int) -> None:
        if self.now:
            note(tensors, [maxima[column] for maxima in self.now])

    def product(self, dtype: torch.dtype) -> str:
        return "dense" if self.is_empty else self.precision.product(dtype)

    def _quantised(self, x: torch.Tensor, inverse: torch.Tensor, column: int) -> Operand:
        if self.is_empty:
            return x
        return quantise(x, inverse[column], self.precision.gradient if column == GRADIENT else E4M3)

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        self._note([x], INPUT)
        if self.notes_weights:
            self._note(weights, WEIGHT)
        used = self.kept(x, [])
        return Operands(used, used, self.weights(weights, []), [])

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        return self._quantised(x, self.inverse[0], INPUT)

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        return [self._quantised(w, inverse, WEIGHT) for w, inverse in zip(weights, self.inverse, strict=True)]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        self._note(grads, GRADIENT)
        made = [self._quantised(grad, inverse, GRADIENT) for grad, inverse in zip(grads, self.inverse, strict=True)]
        return [(grad, grad) for grad in made]
