"""The calls of a training step, operator by operator with shapes, from a step on fake tensors.

A step has a few hundred different calls, however many micro-batches and blocks it has; a machine can time each of them
once (:mod:`smp.planner.machine`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._pytree import tree_iter

from smp.config import Config, Layout
from smp.kernels.experts import grouped
from smp.pipeline.actions import Action, Op
from smp.pipeline.stage_plan import Plan
from smp.training.build import choose_backends
from smp.training.cost.fake_step import fake_step
from smp.training.cost.meter import FREE, Key, Meter

FAR = 8 << 20
"""Bytes that a step reads or writes after which what it touched before is taken to be in no cache any more: a core has
a megabyte or two of its own, and of the 16 or 32 MiB that cores share each process has a part."""


@dataclass(frozen=True)
class TensorLike:
    """A tensor without its values.

    Attributes:
        far: nothing touched its memory for so long that it is in no cache any more: weights, gradients of another
            micro-batch, the optimizer's state.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    far: bool = False


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
        writes_far: its result is in memory that nothing touched for so long that it is in no cache any more: what a
            step keeps for later goes where something was kept before.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    writes_far: bool = False


@dataclass(frozen=True)
class Collective:
    """A collective or message.

    Attributes:
        group: of the mesh: tp, cp, dp_shard, ...
        kind: as :class:`smp.training.cost.meter.Meter` names it.
        ranks: that take part.
        size: bytes of the tensor, all parts together.
        far: the group's last one was so long ago that the memory which its ranks share is in no cache any more.
    """

    group: str
    kind: str
    ranks: int
    size: int
    far: bool = False


@dataclass(frozen=True)
class CallSite:
    """Where in a step something is called.

    Attributes:
        phase: forward, backward, clipping or optimizer.
        op, stage: the action of a pipeline; None: none.
    """

    phase: str
    op: Op | None = None
    stage: int | None = None


Call = tuple[CallSite, Operator | Collective]


UNCUT: Any = SimpleNamespace(cp_exchange=None)
"""Stands for the context of a run with whole sequences: without process groups, the fake step cuts sequences itself."""


class CallRecorder(Meter):
    """Counts calls in ``counts.calls``, by :data:`Call`."""

    _action: Action | None = None

    def __init__(self, groups: Mapping[str, str]) -> None:
        super().__init__(groups)
        self._passed = 0  # bytes that were read or written so far
        # what ``_passed`` was when a storage was last read or written, and a group last exchanged something
        self._touched: dict[int | str, int] = {}
        # The same of freed memory, by its size: what was freed last is taken first, as by the C library.
        self._freed_at: defaultdict[int, list[int]] = defaultdict(list)

    def _call_site(self) -> CallSite | None:
        if (phase := self.current_phase) is None:
            return None
        return CallSite(phase) if self._action is None else CallSite(phase, self._action.op, self._action.stage)

    def _body(self, func: Any, args: Any) -> Callable[..., Any] | None:
        """As the meter's, but a grouped product is one call: its loop over experts is not what its body does, which
        takes all rows for one expert's."""
        return None if func in grouped.OPERATORS else super()._body(func, args)

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        # Marks of the profiler are operators of their own, and take no time.
        if func.namespace == "profiler":
            return
        free = func._opname in FREE
        if (site := self._call_site()) is not None:
            is_far = _nowhere if free else self._is_far
            # Sorted: two calls with the same keywords are one.
            keywords = tuple((name, like(value, is_far)) for name, value in sorted(kwargs.items()))
            given = tuple(like(value, is_far) for value in args)
            writes_far = not free and any(map(is_far, _made_by(result, args, kwargs)))
            self.counts.calls[site, Operator(str(func), given, keywords, writes_far)] += 1
        # An empty tensor is memory that nobody has written yet.
        if not free and not func._opname.startswith(("empty", "new_empty")):
            self._touch(args, kwargs, result)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key, before = storage._cdata, self._sizes.get(storage._cdata, 0)
        super()._resized(storage)
        if key not in self._sizes or (size := self._sizes[key]) == before:
            return
        if before:
            self._freed_at[before].append(self._touched.get(key, 0))
        there = self._freed_at[size]
        self._touched[key] = there.pop() if there else 0

    def _freed(self, key: int) -> None:
        if size := self._sizes[key]:
            self._freed_at[size].append(self._touched.get(key, 0))
        super()._freed(key)

    def _communicated(self, name: str, args: Any, result: Any) -> None:
        super()._communicated(name, args, result)
        self._touch(args, result)

    def _is_far(self, tensor: torch.Tensor) -> bool:
        """Whether more than FAR bytes passed since its memory was touched; at first nothing was."""
        return self._is_old(tensor.untyped_storage()._cdata)

    def _is_old(self, key: int | str) -> bool:
        return self._passed - self._touched.get(key, 0) > FAR

    def _touch(self, *values: Any) -> None:
        """Note that a call read or wrote these tensors' memory, each once."""
        tensors = {x.untyped_storage()._cdata: x for x in tree_iter(values) if isinstance(x, torch.Tensor)}
        for storage, tensor in tensors.items():
            self._touched[storage] = self._passed
            self._passed += tensor.numel() * tensor.itemsize

    def _sent(self, key: Key, ranks: int, size: int) -> None:
        # Within a group of one rank nothing is sent.
        if (site := self._call_site()) is not None and ranks > 1:
            self.counts.calls[site, Collective(*key, ranks, size, self._is_old(key[0]))] += 1
        self._touched[key[0]] = self._passed

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


def _made_by(result: Any, *given: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result whose memory is none of what was given."""
    known = {x.untyped_storage()._cdata for x in tree_iter(given) if isinstance(x, torch.Tensor)}
    for tensor in tree_iter(result):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
            yield tensor


def _nowhere(tensor: torch.Tensor) -> bool:
    return False


def like(value: Any, is_far: Callable[[torch.Tensor], bool] = _nowhere) -> Any:
    """An argument as a value that can be compared and pickled."""
    if isinstance(value, torch.Tensor):
        return TensorLike(tuple(value.shape), tuple(value.stride()), value.dtype, is_far(value))
    if isinstance(value, list | tuple):
        return Items(tuple(like(item, is_far) for item in value))
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
