"""How the scales of a layer are made: by which recipe, and over which ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch

from smp.layers.fp8.history import DelayedScaling, Maxima
from smp.layers.fp8.scaling import BlockScaling, Fp4Scaling, Precision, RowScaling, Scaling, TensorScaling
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
        now: Sequence[Maxima],
        inverse: Sequence[torch.Tensor],
        is_empty: bool,
        notes_weights: bool = True,
    ) -> Scaling:
        """The scaling for a call; the arguments are those of :class:`DelayedScaling`."""
        recipe = self.precision.recipe
        if recipe == "delayed":
            return DelayedScaling(self.precision, tuple(now), tuple(inverse), is_empty, notes_weights)
        if recipe == "tensorwise":
            return TensorScaling(self.precision, self.groups)
        if recipe == "rowwise":
            return RowScaling(self.precision, self.kind, self.groups[0])
        if recipe == "nvfp4":
            return Fp4Scaling(self.precision, self.groups)
        return BlockScaling(self.precision)

    @property
    def key(self) -> str:
        """These values as JSON, which is how operators take them."""
        return json.dumps(astuple(self))

    @staticmethod
    @functools.cache
    def of(key: str) -> Scales:
        """The object that has this :attr:`key`."""
        # Cached: an operator calls this in every step, with the few keys that a run has.
        precision, groups, kind = json.loads(key)
        return Scales(Precision(*precision), tuple(Group(*group) for group in groups), kind)
