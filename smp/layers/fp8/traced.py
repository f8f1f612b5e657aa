"""FP8 in compiled code: how operands are made, as operators that a graph calls and does not look into.

Scales are maxima over ranks, and delayed ones are noted in a history: as operators they have the bits that they have
without a compiler, and the compiler fuses what is around them. An operator takes no objects, so how scales are made
comes as a string.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch

from smp.kernels.fp8 import Operand, Quantised
from smp.kernels.registry import define
from smp.layers.fp8.history import GRADIENT, INPUT, WEIGHT, DelayedScaling, note
from smp.layers.fp8.scaling import BlockScaling, Operands, Precision, RowScaling, Scaling, TensorScaling
from smp.parallel.collectives import Group


@dataclass(frozen=True)
class Scales:
    """How the scales of a layer are made.

    Attributes:
        precision: recipe and formats.
        groups: whose ranks have parts of a tensor, or with scales of rows the one whose ranks have parts of rows.
        kind: of the layer, for scales of rows.
    """

    precision: Precision
    groups: tuple[Group, ...]
    kind: Literal["column", "row"] = "column"

    def scaling(
        self,
        now: Sequence[torch.Tensor],
        inverse: Sequence[torch.Tensor],
        is_empty: bool,
        notes_weights: bool = True,
    ) -> Scaling:
        """Of a call; the arguments are those of :class:`DelayedScaling`."""
        recipe = self.precision.recipe
        if recipe == "delayed":
            return DelayedScaling(self.precision, tuple(now), tuple(inverse), is_empty, notes_weights)
        if recipe == "tensorwise":
            return TensorScaling(self.precision, self.groups)
        if recipe == "rowwise":
            return RowScaling(self.precision, self.kind, self.groups[0])
        return BlockScaling(self.precision)

    @property
    def key(self) -> str:
        """As operators take it."""
        return json.dumps(astuple(self))

    @staticmethod
    @functools.cache
    def of(key: str) -> Scales:
        """From its :attr:`key`."""
        precision, groups, kind = json.loads(key)
        return Scales(Precision(*precision), tuple(Group(*group) for group in groups), kind)


class TracedScaling:
    """A :class:`Scaling` whose work is done by operators; arguments beside ``key`` as of :meth:`Scales.scaling`."""

    def __init__(
        self,
        scales: Scales,
        key: str,
        now: list[torch.Tensor],
        inverse: list[torch.Tensor],
        is_empty: bool,
        notes_weights: bool,
    ) -> None:
        self._precision, self._key = scales.precision, key
        self._now, self._inverse, self._is_empty, self._notes_weights = now, inverse, is_empty, notes_weights
        self.gathers_first = scales.precision.recipe not in ("delayed", "tensorwise")

    def product(self, dtype: torch.dtype) -> str:
        return "dense" if self._is_empty else self._precision.product(dtype)

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        if self._now:
            _note_op([x], self._now, INPUT)
        if self._now and self._notes_weights:
            _note_op(list(weights), self._now, WEIGHT)
        if self._is_empty:
            return Operands(x, x, list(weights), [])
        made = _operands_op(x, list(weights), self._inverse, self._key)
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
        if self._now:
            _note_op(list(grads), self._now, GRADIENT)
        if self._is_empty:
            return [(grad, grad) for grad in grads]
        made = _pairs(_gradients_op(list(grads), self._inverse, self._key))
        return [(q, grad if self.gathers_first else q) for q, grad in zip(made, grads, strict=True)]


def _pairs(parts: Sequence[torch.Tensor]) -> list[Quantised]:
    """Quantised operands from all their parts."""
    return [Quantised(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]


def _parts(operands: Sequence[Operand]) -> list[torch.Tensor]:
    """The parts of quantised operands. What an operator returns shares no memory, so scales are copied."""
    out = list[torch.Tensor]()
    for operand in operands:
        assert isinstance(operand, Quantised)
        out += [operand.data, operand.inverse.clone()]
    return out


def _operands(
    x: torch.Tensor, weights: list[torch.Tensor], inverse: list[torch.Tensor], key: str
) -> list[torch.Tensor]:
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


def _like(run: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """The fake version: the shapes of what ``run`` makes of tensors without data, which no kernel takes."""

    def shapeless(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return torch.empty_like(given, device="meta")
        return [shapeless(each) for each in given] if isinstance(given, list) else given

    def fake(*given: Any) -> list[torch.Tensor]:
        device = (given[0] if isinstance(given[0], torch.Tensor) else given[0][0]).device
        made = run(*map(shapeless, given))
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in made]

    return fake


def _operator(name: str, arguments: str, run: Callable[..., Any]) -> Any:
    schema = f"{name}({arguments}, Tensor[] inverse, str key) -> Tensor[]"
    return define(schema, _like(run), CompositeExplicitAutograd=run)


_operands_op = _operator("fp8_operands", "Tensor x, Tensor[] weights", _operands)
_gradients_op = _operator("fp8_gradients", "Tensor[] grads", _gradients)
_weights_op = _operator("fp8_weights", "Tensor[] weights, Tensor[] scales", _weights)
_kept_op = _operator("fp8_kept", "Tensor x, Tensor[] scales", _kept)
_note_op = define(
    "fp8_note(Tensor[] tensors, Tensor(a!)[] now, int column) -> ()",
    lambda tensors, now, column: None,
    CompositeExplicitAutograd=note,
)
