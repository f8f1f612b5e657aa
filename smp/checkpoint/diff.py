"""What differs between two checkpoints, whatever their layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.entries import Manifest, Shard
from smp.checkpoint.format.tensor_bytes import DTYPES, as_bits
from smp.checkpoint.reader import narrow
from smp.checkpoint.tensor_slices import read_blocks, read_region

CACHED = 1 << 16
"""Elements that are summed at a time: 0.5 MB in double precision, which stay in the cache."""


@dataclass
class TensorDifference:
    """How far a tensor of the second checkpoint is from that of the first.

    Elements of equal bits do not differ, NaNs and infinities included; a NaN on one side only is as far away as can be.

    Attributes:
        floating: whether elements are floating-point numbers: only those can be close to each other.
        equal: to the last bit.
        largest: largest |a - b|.
        squares: sum of |a - b|^2.
        norm: sum of |a|^2; infinite elements that are equal are left out.
    """

    floating: bool
    equal: bool = True
    largest: float = 0.0
    squares: float = 0.0
    norm: float = 0.0

    @property
    def relative(self) -> float:
        """|a - b| / |a| in the L2 norm."""
        relative = math.sqrt(self.squares / self.norm) if self.norm else math.inf if self.squares else 0.0
        return math.inf if math.isnan(relative) else relative

    def within(self, atol: float, rtol: float) -> bool:
        """Whether it may pass: equal, or floating and no element off by more than ``atol`` or the norm by ``rtol``.

        A tolerance of 0 is none: 0.0 and -0.0 are different bits.
        """
        close = (atol > 0 and self.largest <= atol) or (rtol > 0 and self.relative <= rtol)
        return self.equal or (self.floating and close)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add some elements of both sides, given as one dimension."""
        # Bits, not values: a NaN equals itself then, and 0.0 and -0.0 differ.
        differs = as_bits(left) != as_bits(right)
        numbers = left.double()
        squares = float(numbers.square().sum())
        # Infinities that both sides have would make the norm infinite and every relative difference 0.
        if not math.isfinite(squares):
            squares = float(numbers[numbers.isfinite() | differs].square().sum())
        self.norm += squares
        if not differs.any():
            return
        self.equal = False
        # Only of what differs: infinity minus infinity is NaN.
        away = _distance(left[differs], right[differs])
        self.largest = max(self.largest, away.max().item())
        self.squares += away.square().sum().item()


def diff_tensor(
    a: tuple[Folder, Manifest], b: tuple[Folder, Manifest], name: str, progress: Callable[[int], None]
) -> TensorDifference:
    """Compare a tensor that both have, of one shape and dtype. Memory: the largest shard of the first.

    Raises:
        DamagedError, CheckpointError: one of them cannot be read.
    """
    entry = a[1].tensors[name]
    found = TensorDifference(DTYPES[entry.dtype].is_floating_point)
    for shard in entry.shards:
        _compare(a, b, name, shard, found, progress)  # a function, so that its memory is free before the next one
    return found


def _compare(
    a: tuple[Folder, Manifest],
    b: tuple[Folder, Manifest],
    name: str,
    shard: Shard,
    found: TensorDifference,
    progress: Callable[[int], None],
) -> None:
    # The second side at once, because its shards may be cut in another way; the first comes in blocks.
    whole = read_region(*b, name, shard.offsets, shard.sizes)
    for where, left in read_blocks(*a, name, shard.offsets, shard.sizes):
        right = narrow(whole, where, left.shape)
        for pair in zip(left.reshape(-1).split(CACHED), right.reshape(-1).split(CACHED), strict=True):
            found.add(*pair)
        progress(left.nbytes)


def _distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right| in double precision; differences of integers are exact before they are rounded."""
    if left.dtype.is_floating_point:
        return (left.double() - right.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    one, other = (side.to(torch.int64).numpy() for side in (left, right))
    # A difference of two int64 needs 64 bits without a sign: read as uint64 the wrapped result is right.
    apart = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
    return torch.from_numpy(apart.astype(np.float64))
