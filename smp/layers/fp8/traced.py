"""FP8 in compiled code: quantisation of operands as operators, which torch.compile does not trace into.

Scales are maxima over ranks, and delayed scaling notes them in a history. As operators these computations have the same
bits as without a compiler, and the compiler still fuses the code around them. An operator takes no objects, so the
recipe of the scales is passed as a string.

A separate operator notes maxima, in place. A compiled graph reads the current value of a tensor that it updates, but
only if just one of its two halves, forward or backward, updates that tensor. So inputs, weights and gradients of a
layer have a tensor each (``history.py``), and any number of forward passes may come before a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smp.kernels.precision.fp8 import Operand, Quantised
from smp.kernels.registry import define, shapes_of
from smp.layers.fp8.history import GRADIENT, INPUT, WEIGHT, Maxima, note
from smp.layers.fp8.scales import Scales
from smp.layers.fp8.scaling import Operands


class TracedScaling:
    """A :class:`Scaling` whose work is done by operators. ``key`` is :attr:`Scales.key`; the other arguments are those
    of :meth:`Scales.scaling`."""

    def __init__(
        self,
        scales: Scales,
        key: str,
        now: list[Maxima],
        inverse: list[torch.Tensor],
        is_empty: bool,
        notes_weights: bool,
    ) -> None:
        self._precision, self._key = scales.precision, key
        self._now, self._inverse, self._is_empty, self._notes_weights = now, inverse, is_empty, notes_weights
        self.gathers_first = scales.precision.recipe not in ("delayed", "tensorwise")

    def _note(self, tensors: list[torch.Tensor], column: int) -> None:
        if self._now:
            # An input that several layers share is noted for each of them.
            _note_op(tensors, [maxima[column] for maxima in self._now])

    def product(self, dtype: torch.dtype) -> str:
        return "dense" if self._is_empty else self._precision.product(dtype)

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        self._note([x], INPUT)
        if self._notes_weights:
            self._note(list(weights), WEIGHT)
        # The first step of delayed scaling: no history, so no FP8.
        if self._is_empty:
            return Operands(x, x, list(weights), [])
        # One operator for all operands: an exchange of maxima inside of it is one, too.
        made = _operands_op(x, list(weights), self._inverse, self._key)
        # Two tensors (numbers, scales) for each operand, then the scales that the backward pass needs.
        end = 2 * (1 + len(weights))
        used, *others = _pairs(made[:end])
        return Operands(used, x if self.gathers_first else used, list(others), made[end:])

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        if self._is_empty or self.gathers_first:
            return x
        return Quantised(*_kept_op(x, list(scales), self._inverse, self._key))

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        if self._is_empty:
            return list(weights)
        return [*_pairs(_weights_op(list(weights), list(scales), self._inverse, self._key))]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        self._note(list(grads), GRADIENT)
        if self._is_empty:
            return [(grad, grad) for grad in grads]
        made = _pairs(_gradients_op(list(grads), self._inverse, self._key))
        return [(q, grad if self.gathers_first else q) for q, grad in zip(made, grads, strict=True)]


def _pairs(parts: Sequence[torch.Tensor]) -> list[Quantised]:
    """Quantised operands from a flat list (data, scales, data, scales, ...)."""
    return [Quantised(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]


def _parts(operands: Sequence[Operand]) -> list[torch.Tensor]:
    """A flat list (data, scales, data, scales, ...) of quantised operands. Outputs of an operator must not alias its
    inputs, so scales are copied."""
    out = list[torch.Tensor]()
    for operand in operands:
        assert isinstance(operand, Quantised)
        out += [operand.data, operand.inverse.clone()]
    return out


def _operands(
    x: torch.Tensor, weights: list[torch.Tensor], inverse: list[torch.Tensor], key: str
) -> list[torch.Tensor]:
    # Without ``now``: only ``_note_op`` notes maxima.
    made = Scales.of(key).scaling([], inverse, False).forward(x, weights)
    return [*_parts([made.x, *made.weights]), *(scales.clone() for scales in made.scales)]


def _gradients(grads: list[torch.Tensor], inverse: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return _parts([used for used, _ in Scales.of(key).scaling([], inverse, False).gradients(grads)])


def _weights(
    weights: list[torch.Tensor], scales: list[torch.Tensor], inverse: list[torch.Tensor], key: str
) -> list[torch.Tensor]:
    return _parts(Scales.of(key).scaling([], inverse, False).weights(weights, scales))


def _kept(x: torch.Tensor, scales: list[torch.Tensor], inverse: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return _parts([Scales.of(key).scaling([], inverse, False).kept(x, scales)])


def _operator(name: str, arguments: str, run: Callable[..., Any]) -> Any:
    schema = f"{name}({arguments}, Tensor[] inverse, str key) -> Tensor[]"
    return define(schema, shapes_of(run), CompositeExplicitAutograd=run)


_operands_op = _operator("fp8_operands", "Tensor x, Tensor[] weights", _operands)
_gradients_op = _operator("fp8_gradients", "Tensor[] grads", _gradients)
_weights_op = _operator("fp8_weights", "Tensor[] weights, Tensor[] scales", _weights)
_kept_op = _operator("fp8_kept", "Tensor x, Tensor[] scales", _kept)
_note_op = define(
    "fp8_note(Tensor[] tensors, Tensor(a!)[] maxima) -> ()",
    lambda tensors, maxima: None,
    CompositeExplicitAutograd=note,
)
