"""Arguments of recorded calls, made of memory that is as near to the processor as it is in a step.

What a step touched a moment ago rotates over copies that a core's own cache does not hold, since other operators come
in between. What it has not touched for long is taken from memory that no cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from smp.planner.record import FAR, Items, NotANumber, Operator, TensorLike

COPIES = 8
"""Of inputs at most, and FAR bytes together."""
FIELD = 64 << 20
"""Bytes of each dtype that :class:`FarMemory` goes through before it comes to the same place again."""
MOST_RESULTS = 64
"""Of a call that are kept at a time."""
_ALIGNED = 64
"""Bytes of a cache line, at which torch's tensors begin."""

_DRAWS = torch.Generator().manual_seed(1)
"""Of values that the time of a call depends on."""

_INDICES: dict[str, Callable[[tuple[Any, ...]], tuple[int, int]]] = {
    "aten.embedding.default": lambda arguments: (1, arguments[0].shape[0]),
    "aten.embedding_bag.padding_idx": lambda arguments: (1, arguments[0].shape[0]),
    "aten.embedding_dense_backward.default": lambda arguments: (1, arguments[2]),
    "aten.index_select.default": lambda arguments: (2, arguments[0].shape[arguments[1]]),
}
"""Operator -> which of its arguments are indices, and what they are below."""


class FarMemory:
    """Memory that is in no cache, because so much other memory was read since it was used."""

    def __init__(self) -> None:
        self._fields: dict[torch.dtype, torch.Tensor] = {}
        self._next: dict[torch.dtype, int] = {}

    def take(self, value: TensorLike) -> torch.Tensor:
        """A tensor as described, of ones (integers: zeros), at the next place of the field."""
        elements = _reach(value)
        size = FIELD // value.dtype.itemsize
        if elements > size:
            return _filled(value)  # larger than caches are
        if (field := self._fields.get(value.dtype)) is None:
            field = self._fields[value.dtype] = _filled(TensorLike((size,), (1,), value.dtype))
        start = self._next.get(value.dtype, 0)
        start = 0 if start + elements > size else start
        line = _ALIGNED // value.dtype.itemsize
        self._next[value.dtype] = start + -(-elements // line) * line
        return field.as_strided(value.shape, value.stride, start)

    def use(self, size: int) -> None:
        """Write so many bytes of the field, so that what was touched before leaves the caches."""
        self.take(TensorLike((size // 4,), (1,), torch.float32)).fill_(1)


class Operands:
    """Arguments of one call, for as many calls as are wanted.

    Args:
        call: whose arguments.
        far: where those come from that the call describes as far.
    """

    def __init__(self, call: Operator, far: FarMemory) -> None:
        self._far = far
        self._copies = [_inputs(call)]
        size = sum(x.untyped_storage().nbytes() for x in tree_leaves(self._copies) if isinstance(x, torch.Tensor))
        # As many copies as make FAR bytes: a small operand would stay in the core's cache.
        self._copies += [_inputs(call) for _ in range(min(COPIES, FAR // max(size, 1)) - 1)]
        self.turns = len(self._copies)

    def of(self, turn: int) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by position and by name of this turn."""
        return tree_map(lambda x: self._far.take(x) if isinstance(x, TensorLike) else x, self._copies[turn])


def kept_results(run: Callable[..., Any], operands: Operands, *, far: bool) -> list[Any]:
    """Results of a call on memory that was written before, as a step's is: one for each turn, or where it is ``far``
    as many as fill FIELD bytes, MOST_RESULTS at most: the memory of the oldest is in no cache then."""
    arguments, keywords = operands.of(0)
    result = run(*arguments, **keywords)
    size = sum(x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
    number = min(MOST_RESULTS, -(-FIELD // max(size, 1))) if far else operands.turns
    return [tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result) for _ in range(number)]


def fill_again(arguments: Any) -> None:
    """Fill floating-point inputs with 1 again: repeated exponentials soon give infinities, which are slow."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.fill_(1)


def _inputs(call: Operator) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with tensors, but for far ones, which stay descriptions."""
    arguments, keywords = [_made(value) for value in call.arguments], {name: _made(v) for name, v in call.keywords}
    if call.name == "aten.repeat_interleave.Tensor" and keywords.get("output_size"):
        counts = arguments[0] = _filled(call.arguments[0])
        counts[0] = keywords["output_size"]  # whose sum it checks
    if call.name.startswith("smp.grouped_"):
        rows, _, counts, _ = call.arguments
        # Rows choose their experts: numbers that products are not fastest with.
        chosen = _drawn(counts.shape[0], (rows.items[0] if isinstance(rows, Items) else rows).shape[:1])
        arguments[2] = chosen.bincount(minlength=counts.shape[0])
    if (indices := _INDICES.get(call.name)) is not None:
        # One row for all would stay in a register, or be added up one after the other.
        place, end = indices(call.arguments)
        arguments[place] = _drawn(end, call.arguments[place].shape)
    if call.name.startswith("aten.embedding_bag."):
        chosen, bags = (call.arguments[place].shape[0] for place in (1, 2))
        arguments[2] = torch.arange(bags) * (chosen // max(bags, 1))  # bags are equally large
    return arguments, keywords


def _drawn(end: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Integers below ``end``."""
    return torch.randint(end, shape, generator=_DRAWS)


def _made(value: Any) -> Any:
    """An argument from its description; a far tensor stays one."""
    if isinstance(value, Items):
        return [_made(item) for item in value.items]
    if isinstance(value, NotANumber):
        return math.nan
    return _filled(value) if isinstance(value, TensorLike) and not value.far else value


def _filled(value: TensorLike) -> torch.Tensor:
    """A tensor from its description. Floats are 1, which products keep; integers 0, a valid index of everything."""
    # The recorded strides: a transposed operand takes another kernel.
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    storage.fill_(1 if value.dtype.is_floating_point or value.dtype == torch.bool else 0)
    return tensor


def _reach(value: TensorLike) -> int:
    """Elements from the first to the last one."""
    if 0 in value.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
