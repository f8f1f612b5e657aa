"""Which texts go into which sequence, which of them are for validation, and how full sequences are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from smp.data.keyed_random import keyed_permutation
from smp.data.packing import Packing, pack_best_fit
from smp.data.tuning.samples import Samples

_SPLIT = 2  # purpose of the permutation that splits; the order of an epoch has another


def split_samples(count: int, fractions: tuple[float, float, float], seed: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Indices of the training and of the validation samples, in ascending order.

    Which sample goes where is drawn with ``seed``: files are often sorted by subject.

    Args:
        count: samples (pairs) there are.
        fractions: of training, validation and test.
        seed: keys the draw.
    """
    # Sums are rounded, so that no sample is lost between two parts.
    ends = [round(sum(fractions[: i + 1]) * count) for i in range(2)]
    drawn = keyed_permutation(count, seed, 0, 0, purpose=_SPLIT)
    # The draw says which part; the order within it is that of the files.
    return np.sort(drawn[: ends[0]]), np.sort(drawn[ends[0] : ends[1]])


@dataclass(frozen=True)
class Sequences(Packing):
    """Texts packed into sequences.

    Attributes:
        used: positions that hold text, over all sequences.
        length: positions of a sequence.
    """

    used: int
    length: int

    @property
    def packed(self) -> bool:
        """Whether a sequence holds more than one text."""
        return bool((np.diff(self.offsets) > 1).any())

    @property
    def efficiency(self) -> float:
        """Fraction of all positions that hold text."""
        return self.used / max(len(self) * self.length, 1)


def lay_out(
    samples: Samples, chosen: npt.NDArray[np.int64], length: int, packing: Literal["best-fit", "off"]
) -> Sequences:
    """Pack the ``chosen`` texts into sequences of ``length`` positions. A text of n tokens takes n - 1 positions: its
    last token is only predicted.

    With best-fit several texts share a sequence (best-fit decreasing); with off each has its own, in their order.
    """
    positions = samples.lengths[chosen] - 1
    used = int(positions.sum())
    # Every sequence has one text: order and offsets are trivial.
    if packing == "off":
        return Sequences(chosen, np.arange(len(chosen) + 1), used, length)
    # Packing works on positions within ``chosen``; the result is numbers of texts.
    packed = pack_best_fit(positions, length)
    return Sequences(chosen[packed.order], packed.offsets, used, length)
