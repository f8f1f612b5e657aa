"""The calls of a training step, operator by operator with shapes, from a step on fake tensors.

A step has a few hundred different calls, however many micro-batches and blocks it has; a machine can time each of them
once (:mod:`smp.planner.machine`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from smp.config import Config, Layout
from smp.pipeline.actions import Action, Op
from smp.pipeline.stage_plan import Plan
from smp.training.build import choose_backends
from smp.training.cost.fake_step import fake_step
from smp.training.cost.meter import Key, Meter


@dataclass(frozen=True)
class TensorLike:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Items:
    """A list or tuple of arguments."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class NotANumber:
    """Stands for NaN, which does not equal itself: calls are keys of dictionaries."""


@dataclass(frozen=True)
class Operator:
    """An operator with its arguments, tensors as shapes.

    Attributes:
        name: such as ``aten.mm.default``.
        arguments: by position.
        keywords: by name.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Collective:
    """A collective or message.

    Attributes:
        group: of the mesh: tp, cp, dp_shard, ...
        kind: as :class:`smp.training.cost.meter.Meter` names it.
        ranks: that take part.
        size: bytes of the tensor, all parts together.
    """

    group: str
    kind: str
    ranks: int
    size: int


@dataclass(frozen=True)
class Place:
    """Where in a step something is called.

    Attributes:
        phase: forward, backward, clipping or optimizer.
        op, stage: the action of a pipeline; None: none.
    """

    phase: str
    op: Op | None = None
    stage: int | None = None


Call = tuple[Place, Operator | Collective]


UNCUT: Any = SimpleNamespace(cp_exchange=None)
"""Stands for the context of a run with whole sequences: without process groups, the fake step cuts sequences itself."""


class CallRecorder(Meter):
    """Counts calls in ``counts.calls``, by :data:`Call`."""

    _action: Action | None = None

    def _place(self) -> Place | None:
        if (phase := self.current_phase) is None:
            return None
        return Place(phase) if self._action is None else Place(phase, self._action.op, self._action.stage)

    def _ran(self, func: Any, args: Any, kwargs: Any) -> None:
        # Marks of the profiler are operators of their own, and take no time.
        if func.namespace != "profiler" and (place := self._place()) is not None:
            # Sorted: two calls with the same keywords are one.
            keywords = tuple((name, like(value)) for name, value in sorted(kwargs.items()))
            call = place, Operator(str(func), tuple(like(value) for value in args), keywords)
            self.counts.calls[call] += 1

    def _sent(self, key: Key, ranks: int, size: int) -> None:
        # Within a group of one rank nothing is sent.
        if (place := self._place()) is not None and ranks > 1:
            self.counts.calls[place, Collective(*key, ranks, size)] += 1

    def posted(self, receive: Action) -> None:
        """Messages are counted where they are sent."""

    arrived = posted

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Calls inside belong to this action."""
        self._action = action
        try:
            yield
        finally:
            self._action = None


def like(value: Any) -> Any:
    """An argument as a value that can be compared and pickled."""
    if isinstance(value, torch.Tensor):
        return TensorLike(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, list | tuple):
        return Items(tuple(like(item) for item in value))
    if isinstance(value, float) and math.isnan(value):
        return NotANumber()
    return value


Calls = Mapping[Call, int]
"""How often each call is made in a step."""


def recorded_step(config: Config, layout: Layout, plan: Plan | None = None) -> list[Calls]:
    """Calls of a step on this machine's CPU, by pipeline rank."""
    # Without a cut: the fake step puts the exchange around attention itself.
    kernels, _ = choose_backends(config, UNCUT, torch.device("cpu"), documents=False)
    # Ranks of a pipeline have different layers: one fake step for each.
    steps = [
        fake_step(config, layout, kernels, "cpu", plan, rank, make_meter=CallRecorder) for rank in range(layout.pp)
    ]
    return [cast(Calls, step.counts.calls) for step in steps]
