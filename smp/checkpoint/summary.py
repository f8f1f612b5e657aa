"""Numbers about a part of a stored tensor, and its corners, without holding more than a few megabytes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from smp.checkpoint.box import read_blocks
from smp.checkpoint.entries import DTYPES, Manifest
from smp.checkpoint.folder import Folder

SHOWN_WHOLE = 1000
"""Elements. Of more, torch prints only the first and last ones in each dimension."""
_EDGE = 3  # torch's: so many of them
_ELEMENTS = 1 << 16  # summed at a time: 0.5 MB of them in double precision, which stay in the cache


class Summary:
    """Of the elements from ``offsets`` on, ``sizes`` many in each dimension.

    Attributes:
        count: of elements; nan, infinite: how many of them are that.
        lowest, highest: NaN when an element is.
        mean, norm: in double precision.
        shown: what torch prints like the elements themselves; when ``cut``, by its short way.

    Raises:
        DamagedError, CheckpointError: they cannot be read.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.count, self.nan, self.infinite = math.prod(sizes), 0, 0
        self._low, self._high = torch.tensor(math.inf).double(), torch.tensor(-math.inf).double()
        self._sum, self._squares = 0.0, 0.0
        self.cut = self.count > SHOWN_WHOLE
        corners = _Corners(sizes, DTYPES[manifest.tensors[name].dtype], self.cut)
        for where, block in read_blocks(folder, manifest, name, offsets, sizes):
            corners.take(where, block)
            for part in block.reshape(-1).split(_ELEMENTS):
                self._add(part.double())
        self.shown = corners.held

    def _add(self, numbers: torch.Tensor) -> None:
        self.nan += int(numbers.isnan().sum())
        self.infinite += int(numbers.isinf().sum())
        self._low = torch.minimum(self._low, numbers.min())
        self._high = torch.maximum(self._high, numbers.max())
        self._sum += numbers.sum().item()
        self._squares += numbers.square().sum().item()

    @property
    def lowest(self) -> float:
        return self._low.item()

    @property
    def highest(self) -> float:
        return self._high.item()

    @property
    def mean(self) -> float:
        return self._sum / self.count

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares)


class _Corners:
    """A small tensor that torch prints as it would print the large one: edges, and something in between, unseen."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, cut: bool) -> None:
        limit = 2 * _EDGE + 1
        self.wanted = [_ends(n) if cut and n > limit else list(range(n)) for n in sizes]
        self.held = torch.zeros([min(n, limit) if cut else n for n in sizes], dtype=dtype)

    def take(self, where: tuple[int, ...], block: torch.Tensor) -> None:
        """Copy what is wanted of a block that begins at ``where``."""
        rows: list[torch.Tensor] = []
        for dim, (wanted, begin) in enumerate(zip(self.wanted, where, strict=True)):
            here = [(i, at - begin) for i, at in enumerate(wanted) if 0 <= at - begin < block.shape[dim] and at >= 0]
            rows.append(torch.tensor([i for i, _ in here], dtype=torch.long))
            block = _select(block, dim, [at for _, at in here])
        if not rows:
            self.held.copy_(block)
        elif block.numel():
            _bits(self.held)[torch.meshgrid(*rows, indexing="ij")] = _bits(block)


def _ends(size: int) -> list[int]:
    """The first and last indices, and between them -1, which is no element's."""
    return [*range(_EDGE), -1, *range(size - _EDGE, size)]


def _select(block: torch.Tensor, dim: int, at: list[int]) -> torch.Tensor:
    return _bits(block).index_select(dim, torch.tensor(at, dtype=torch.long)).view(block.dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as integers, which torch can index."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
