"""What differs between two checkpoints, whatever their layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from smp.checkpoint.box import read_box
from smp.checkpoint.entries import Manifest
from smp.checkpoint.folder import Folder


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of the second checkpoint is from that of the first.

    Attributes:
        equal: to the last bit, NaNs included.
        largest: largest |a - b|.
        relative: |a - b| / |a| in the L2 norm.
    """

    equal: bool
    largest: float
    relative: float

    def within(self, atol: float, rtol: float) -> bool:
        """Whether it may pass: equal, or no element is off by more than ``atol``, or the norm by more than ``rtol``."""
        return self.equal or self.largest <= atol or self.relative <= rtol


def diff_tensor(
    a: tuple[Folder, Manifest], b: tuple[Folder, Manifest], name: str, progress: Callable[[int], None]
) -> TensorDifference:
    """Compare a tensor that both have, of one shape and dtype, shard by shard of the first.

    Raises:
        DamagedError, CheckpointError: one of them cannot be read.
    """
    equal, largest, squares, norm = True, 0.0, 0.0, 0.0
    for shard in a[1].tensors[name].shards:
        left, right = (read_box(*side, name, shard.offsets, shard.sizes) for side in (a, b))
        progress(left.nbytes)
        if torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)):
            norm += left.double().square().sum().item()
            continue
        difference = (left.double() - right.double()).abs()
        equal, largest = False, max(largest, _finite(difference.max().item()))
        squares += _finite(difference.square().sum().item())
        norm += left.double().square().sum().item()
    return TensorDifference(equal, largest, math.sqrt(squares / norm) if norm else math.inf if squares else 0.0)


def _finite(value: float) -> float:
    """A NaN on one side is as far away as can be."""
    return math.inf if math.isnan(value) else value
