"""Recipes of FP8: which numbers share a scale, and which ranks have to agree on it.

A scale is a function of the whole tensor, of which a rank holds a part. With tokens cut over the data-parallel,
context-parallel and, under sequence parallelism, tensor-parallel ranks, and widths over the tensor-parallel ones:

============  ==========================  ==========================  ==============================================
recipe        one scale for               the weight's gradient       maxima are taken over
============  ==========================  ==========================  ==============================================
delayed       a tensor, of past steps     in FP8                      all ranks with the layer, once per step
tensorwise    a tensor, as it is now      in FP8                      all ranks with the layer, for each tensor
rowwise       a token; a weight's row     in the run's precision      TP ranks, of rows that are cut: a row-parallel
                                                                      input and weight, a column-parallel gradient
                                                                      and the columns of its weight
blockwise     128 numbers of a token;     in FP8, 128 tokens share    none: cuts lie between blocks
              128 x 128 of a weight       a scale
mxfp8         32 numbers along the        in FP8, 32 tokens share     none: cuts lie between blocks
              dimension that is summed    a scale
nvfp4         16 numbers of a token;      in the run's precision      all ranks with the layer, for each tensor: the
              16 x 16 of a weight                                     scale of the tensor, under which those are e4m3
============  ==========================  ==========================  ==============================================

Tensorwise scales, and nvfp4's of a tensor, are those of a micro-batch over all data-parallel ranks. The others do not
depend on how a batch is cut into micro-batches either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from smp.kernels.precision.fp8 import (
    BLOCK,
    E4M3,
    MX_BLOCK,
    Operand,
    Quantised,
    inverse_scale,
    largest,
    largest_of_blocks,
    quantise,
    transposed,
)
from smp.kernels.precision.nvfp4 import quantise_to_e2m1, tensor_scale
from smp.kernels.product import Format, Granularity, Scaled, along_rows, gradient_dtype
from smp.parallel.collectives import Group, max_over

Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
_GRANULARITY: dict[str, Granularity] = {
    "delayed": "tensor",
    "tensorwise": "tensor",
    "rowwise": "row",
    "blockwise": "block",
    "mxfp8": "mx",
    "nvfp4": "nv",
}


class Operands(NamedTuple):
    """Operands of a forward pass: the input and the weights as products take them, the input as it is kept for the
    weights' gradients, and scales that the backward pass uses again."""

    x: Operand
    kept: Operand
    weights: list[Operand]
    scales: list[torch.Tensor]


class Scaling(Protocol):
    """Makes the operands of one call of a linear function from plain tensors of this rank, (tokens [/p], width)."""

    @property
    def gathers_first(self) -> bool:
        """Whether a gradient that has to be gathered is gathered before it is quantised, because the weight's gradient
        takes it as it is."""

    def product(self, dtype: torch.dtype) -> str:
        """The name of the product, for results of ``dtype``."""

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        """Operands of an input, and of the weights that it is multiplied with, (out, in), or (experts, out, in)."""

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        """The input as ``forward`` kept it, once more."""

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        """The weights as operands of the product for the input's gradient."""

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        """Operands of the output gradient of each weight: one for the input's gradient, one for the weight's."""


@dataclass(frozen=True)
class Precision:
    """Recipe and formats of a run's layers; see ``smp.kernels.product.Scaled``."""

    recipe: Recipe
    fp8_format: Format
    emulate: bool

    def product(self, dtype: torch.dtype) -> str:
        """The name of the product for results of ``dtype``."""
        return Scaled(_GRANULARITY[self.recipe], self.fp8_format, dtype, self.emulate).name

    @property
    def gradient(self) -> torch.dtype:
        """Dtype of gradients."""
        return gradient_dtype(self.fp8_format)


@dataclass(frozen=True)
class TensorScaling:
    """One scale for a tensor, from its maximum over the ranks of ``groups``, all that have a part of it."""

    precision: Precision
    groups: tuple[Group, ...]

    gathers_first = False

    def product(self, dtype: torch.dtype) -> str:
        return self.precision.product(dtype)

    def _scales(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Scales of several tensors, (n,), with one exchange."""
        return inverse_scale(max_over(torch.stack([largest(x) for x in tensors]), self.groups), dtype)

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        scales = self._scales([x, *weights], E4M3)
        used = quantise(x, scales[0], E4M3)
        # The input is quantised once for both passes; weights are quantised again in the backward
        # pass, under the saved scales.
        return Operands(used, used, self.weights(weights, [scales]), [scales])

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        return quantise(x, scales[0][0], E4M3)

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        return [quantise(w, scale, E4M3) for w, scale in zip(weights, scales[0][1:], strict=True)]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        dtype = self.precision.gradient
        scales = self._scales(grads, dtype)
        # One quantised gradient for both products: with one scale it may be transposed.
        made = [quantise(grad, scale, dtype) for grad, scale in zip(grads, scales, strict=True)]
        return [(grad, grad) for grad in made]


@dataclass(frozen=True)
class RowScaling:
    """A scale for each token, and for each row of a weight; the weight's gradient is not in FP8. ``kind`` is that of
    the layer: of a row-parallel one a token's numbers are cut over ``tp``, of a column-parallel one its gradient's."""

    precision: Precision
    kind: Literal["column", "row"]
    tp: Group

    gathers_first = True

    def product(self, dtype: torch.dtype) -> str:
        return self.precision.product(dtype)

    def _scales(self, amaxes: Sequence[torch.Tensor], dtype: torch.dtype, *, cut: bool) -> list[torch.Tensor]:
        """Scales of rows, one for each number of ``amaxes``; rows that are ``cut`` over the ranks take one exchange."""
        # All tensors of the call in one vector: one exchange, also for several weights.
        every = torch.cat([amax.flatten() for amax in amaxes])
        scales = inverse_scale(max_over(every, (self.tp,)) if cut else every, dtype)
        parts = scales.split([amax.numel() for amax in amaxes])
        return [part.view_as(amax) for part, amax in zip(parts, amaxes, strict=True)]

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        # A row-parallel layer has columns of the input and of the weight: maxima of rows are over TP ranks.
        scales = self._scales([largest(y, -1) for y in (x, *weights)], E4M3, cut=self.kind == "row")
        used, *others = (quantise(y, scale, E4M3) for y, scale in zip((x, *weights), scales, strict=True))
        return Operands(used, x, list(others), [])

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        return x

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        """The weights, with scales of columns: the product for the input's gradient sums over rows."""
        # A column-parallel layer has rows of the weight, so maxima of its columns are over TP ranks.
        columns = self._scales([largest(w, -2) for w in weights], E4M3, cut=self.kind == "column")
        return [quantise(w, scale, E4M3) for w, scale in zip(weights, columns, strict=True)]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        dtype = self.precision.gradient
        # Of a column-parallel layer each rank has columns of the output, and so of its gradient.
        scales = self._scales([largest(grad, -1) for grad in grads], dtype, cut=self.kind == "column")
        # The gradient itself for the weight's gradient, which sums over tokens: a scale for each
        # token cannot be taken out of that sum.
        return [(quantise(grad, scale, dtype), grad) for grad, scale in zip(grads, scales, strict=True)]


@dataclass(frozen=True)
class BlockScaling:
    """A scale for neighbouring numbers. No rank has a part of a block only.

    Of a token ``blockwise`` takes 128 and ``mxfp8`` 32; of a weight 128 x 128, and 32 of those that a product sums:
    along a row in the forward pass, along a column for the input's gradient.
    """

    precision: Precision

    gathers_first = True

    @property
    def _size(self) -> int:
        return BLOCK if self.precision.recipe == "blockwise" else MX_BLOCK

    def product(self, dtype: torch.dtype) -> str:
        return self.precision.product(dtype)

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        used = self._along_width(x, E4M3)
        if self.precision.recipe == "blockwise":
            # The input itself is kept: the weight's gradient takes blocks along the tokens.
            return Operands(used, x, self.weights(weights, []), [])
        return Operands(used, x, [self._along_width(w, E4M3) for w in weights], [])

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        return x

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        if self.precision.recipe == "mxfp8":
            # Blocks along the other dimension than in the forward pass: this product sums over the outputs.
            return [transposed(along_rows(w, E4M3, MX_BLOCK)) for w in weights]
        # Square blocks: a weight and its transpose have the same scales, so both products use the same numbers.
        return [quantise(w, inverse_scale(largest_of_blocks(w, square=True), E4M3), E4M3) for w in weights]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        return [(self._along_width(grad, self.precision.gradient), grad) for grad in grads]

    def _along_width(self, x: torch.Tensor, dtype: torch.dtype) -> Quantised:
        return quantise(x, inverse_scale(largest_of_blocks(x, size=self._size), dtype), dtype)


@dataclass(frozen=True)
class Fp4Scaling:
    """NVFP4 (``smp.kernels.precision.nvfp4``): blocks of 16 under a scale of the tensor, from its maximum over the
    ranks of ``groups``. Both products of a weight take the same 4-bit numbers of it; its gradient is not in FP4.
    (NVIDIA's recipe has it in FP4, with Hadamard transforms, and rounds gradients stochastically.)"""

    precision: Precision
    groups: tuple[Group, ...]

    gathers_first = True

    def product(self, dtype: torch.dtype) -> str:
        return self.precision.product(dtype)

    def _scales(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scales of several tensors, (n,), with one exchange."""
        return tensor_scale(max_over(torch.stack([largest(x) for x in tensors]), self.groups))

    def forward(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        scales = self._scales([x, *weights])
        return Operands(quantise_to_e2m1(x, scales[0]), x, self.weights(weights, [scales]), [scales])

    def kept(self, x: torch.Tensor, scales: Sequence[torch.Tensor]) -> Operand:
        return x

    def weights(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        return [quantise_to_e2m1(w, scale, square=True) for w, scale in zip(weights, scales[0][1:], strict=True)]

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        scales = self._scales(grads)
        return [(quantise_to_e2m1(grad, scale), grad) for grad, scale in zip(grads, scales, strict=True)]
