"""Per-token tensors that layers need (rotary tables, documents, chunks), prepared once per micro-batch.

A layer has ``needs``, a tuple of values of this file or of a caller's own classes. The model calls ``prepare`` once for
each distinct one and keeps the result under its ``key`` in ``TokenLayout.prepared``, from where the layer's forward
pass reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from smp.kernels.token_layout import TokenLayout
from smp.layers.rope import DynamicScaling, LongRopeScaling, Scaling, rope_frequencies, rope_table, temperature

RotaryTable = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each fp32 (tokens, 1, channels)."""


class TokenNeed(Protocol):
    """A hashable description of a tensor that a layer needs."""

    @property
    def key(self) -> str:
        """Key of the result in ``TokenLayout.prepared``. (Text, which compiled code can compare.)"""

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> Any:
        """Compute the result from a layout with ``position_ids``, of which this rank has all rows.

        Args:
            layout: of the micro-batch.
            sequence_lengths: int64 (tokens,), tokens of the sequence that each belongs to.
        """


@dataclass(frozen=True)
class RopeTable:
    """See :data:`RotaryTable`.

    Attributes:
        base: theta.
        channels: of a head that are rotated.
        scaling: of the frequencies.
    """

    base: float
    channels: int
    scaling: Scaling | None = None

    @cached_property
    def key(self) -> str:
        # All fields are in it: equal needs of several layers have one key, and one table.
        return repr(self)

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> RotaryTable:
        positions, scaling = layout.position_ids, self.scaling
        assert positions is not None, "a model gives them"
        # Made in each micro-batch: dim / 2 numbers, and no buffer that meta-device initialization would lose.
        freqs = rope_frequencies(self.channels, self.base, scaling, positions.device)
        if isinstance(scaling, LongRopeScaling):
            # Called only here: lengths cost a tensor, and only LongRoPE and dynamic NTK depend on them.
            freqs = scaling.frequencies(freqs, sequence_lengths())
        elif isinstance(scaling, DynamicScaling):
            freqs = scaling.frequencies(freqs, self.base, sequence_lengths())
        return rope_table(positions, freqs, 1.0 if scaling is None else scaling.amplitude)


@dataclass(frozen=True)
class QueryScale:
    """fp32 (tokens, 1, 1), what queries are multiplied by; see :func:`smp.layers.rope.temperature`."""

    floor_scale: int
    scale: float

    @cached_property
    def key(self) -> str:
        return repr(self)

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> torch.Tensor:
        assert layout.position_ids is not None, "a model gives them"
        return temperature(layout.position_ids, self.floor_scale, self.scale)


def chunks_key(size: int) -> str:
    """Key in ``TokenLayout.prepared`` of the layout in which tokens see their own chunk of ``size``."""
    return f"chunks of {size}"


def with_needs(
    layout: TokenLayout, needs: Iterable[TokenNeed], sequence_lengths: Callable[[], torch.Tensor]
) -> TokenLayout:
    """The layout with the results of ``needs``, distinct ones, added to ``prepared``."""
    prepared = {need.key: need.prepare(layout, sequence_lengths) for need in needs}
    # A new dictionary: other layouts may share the old one.
    return replace(layout, prepared={**layout.prepared, **prepared})


def prepared(layout: TokenLayout, key: str) -> Any:
    """The value of ``key`` in ``TokenLayout.prepared``.

    Raises:
        ValueError: nothing prepared it.
    """
    if key not in layout.prepared:
        raise ValueError(
            f"TokenLayout.prepared has no {key!r}, which this layer needs; it has {sorted(layout.prepared)}"
        )
    return layout.prepared[key]
