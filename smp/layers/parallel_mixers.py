"""Several mixers in one layer (Falcon-H1, arXiv 2507.22448: attention and Mamba-2): all read the layer's normed input,
and what the layer adds is the sum of their results, each multiplied by a number of its own.

Each gathers its input and reduces its result as it does alone, so a layer of two moves twice what one moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from smp.kernels.token_layout import TokenLayout
from smp.layers.mixer import Mixer
from smp.layers.token_needs import TokenNeed


class ParallelMixers(nn.Module):
    """Mixers that read one input, whose results are added in their order.

    Args:
        mixers: by name, one or more. Of a text that is written at most one keeps keys and values, and at most one a
            state: that is what a layer of the cache has room for.
        multipliers: of their results.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: they differ in ``sequence_parallel``, or one of them measures a loss of its own.
    """

    def __init__(self, mixers: Mapping[str, Mixer], multipliers: Sequence[float]) -> None:
        super().__init__()
        split = {name: mixer.sequence_parallel for name, mixer in mixers.items()}
        if len(set(split.values())) != 1:
            raise ValueError(f"parallel mixers differ in sequence_parallel: {split}")
        measuring = [name for name, mixer in mixers.items() if getattr(mixer, "measures", False)]
        if measuring:
            raise ValueError(f"{', '.join(measuring)}: a mixer with a loss of its own is alone in its layer")
        for name, mixer in mixers.items():
            self.add_module(name, cast(nn.Module, mixer))
        self.names, self.multipliers = tuple(mixers), tuple(multipliers)
        self.sequence_parallel = next(iter(split.values()))
        self.needs: tuple[TokenNeed, ...] = tuple(need for mixer in mixers.values() for need in mixer.needs)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers, in their order."""
        return tuple(cast(Mixer, getattr(self, name)) for name in self.names)

    def forward(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden); ``key`` is the dropout key of this layer's probabilities."""
        total: torch.Tensor | None = None
        for mixer, multiplier in zip(self.mixers, self.multipliers, strict=True):
            y = mixer(x, layout, key)
            y = y if multiplier == 1.0 else y * multiplier
            # In the order of the names, on every rank: sums round by their order.
            total = y if total is None else total + y
        assert total is not None, "one or more"
        return total


def mixers_of(mixer: Mixer | None) -> tuple[Mixer, ...]:
    """The mixers of a layer, each alone."""
    if mixer is None:
        return ()
    return mixer.mixers if isinstance(mixer, ParallelMixers) else (mixer,)
