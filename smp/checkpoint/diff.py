"""What differs between two checkpoints, whatever their layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from smp.checkpoint.box import read_blocks, read_box
from smp.checkpoint.entries import DTYPES, Manifest, Shard
from smp.checkpoint.folder import Folder
from smp.checkpoint.tensor_file import as_bits

_ELEMENTS = 1 << 16  # compared at a time: 0.5 MB of them in double precision, which stay in the cache


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of the second checkpoint is from that of the first.

    Elements of equal bits do not differ, NaNs and infinities included; a NaN on one side only is as far away as can be.

    Attributes:
        equal: to the last bit.
        floating: whether elements are floating-point numbers: only those can be close to each other.
        largest: largest |a - b|.
        relative: |a - b| / |a| in the L2 norm; infinite elements that are equal are left out.
    """

    equal: bool
    floating: bool
    largest: float
    relative: float

    def within(self, atol: float, rtol: float) -> bool:
        """Whether it may pass: equal, or floating and no element off by more than ``atol`` or the norm by ``rtol``.

        A tolerance of 0 is none: 0.0 and -0.0 are different bits.
        """
        close = (atol > 0 and self.largest <= atol) or (rtol > 0 and self.relative <= rtol)
        return self.equal or (self.floating and close)


def diff_tensor(
    a: tuple[Folder, Manifest], b: tuple[Folder, Manifest], name: str, progress: Callable[[int], None]
) -> TensorDifference:
    """Compare a tensor that both have, of one shape and dtype. Memory: the largest shard of the first.

    Raises:
        DamagedError, CheckpointError: one of them cannot be read.
    """
    entry = a[1].tensors[name]
    found = _Difference(DTYPES[entry.dtype])
    for shard in entry.shards:
        _compare(a, b, name, shard, found, progress)
    return found.result()


def _compare(
    a: tuple[Folder, Manifest],
    b: tuple[Folder, Manifest],
    name: str,
    shard: Shard,
    found: _Difference,
    progress: Callable[[int], None],
) -> None:
    """One shard of ``a``; what was read of it is forgotten before the next one is read."""
    whole = read_box(*b, name, shard.offsets, shard.sizes)
    for where, left in read_blocks(*a, name, shard.offsets, shard.sizes):
        right = whole
        for dim, (offset, size) in enumerate(zip(where, left.shape, strict=True)):
            right = right.narrow(dim, offset, size)
        for pair in zip(*(side.reshape(-1).split(_ELEMENTS) for side in (left, right)), strict=True):
            found.add(*pair)
        progress(left.nbytes)


class _Difference:
    """Sums over all that was compared so far."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.floating = dtype.is_floating_point
        self.equal, self.largest, self.squares, self.norm = True, 0.0, 0.0, 0.0

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Some elements of both sides, in one dimension."""
        same = torch.equal(as_bits(left), as_bits(right))
        differs = None if same else as_bits(left) != as_bits(right)
        self.norm += _squares(left, differs)
        if differs is None:
            return
        self.equal = False
        away = _distance(left[differs], right[differs])
        self.largest = max(self.largest, away.max().item())
        self.squares += away.square().sum().item()

    def result(self) -> TensorDifference:
        relative = math.sqrt(self.squares / self.norm) if self.norm else math.inf if self.squares else 0.0
        return TensorDifference(self.equal, self.floating, self.largest, math.inf if math.isnan(relative) else relative)


def _squares(values: torch.Tensor, differs: torch.Tensor | None) -> float:
    """Sum of squares, without what is not finite and the same on both sides."""
    if values.dtype.is_floating_point and values.dtype.itemsize > 1:  # torch has no norm of one-byte numbers
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        if math.isfinite(norm):
            return norm**2
    numbers = values.double()
    counted = numbers.isfinite() if differs is None else numbers.isfinite() | differs
    return float(numbers[counted].square().sum())


def _distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right| in double precision; of integers the difference is taken before anything is rounded."""
    if left.dtype.is_floating_point:
        return (left.double() - right.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    one, other = (side.to(torch.int64).numpy() for side in (left, right))
    apart = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
    return torch.from_numpy(apart.astype(np.float64))
