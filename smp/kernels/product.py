"""Which matrix product a linear layer runs: forward, and the two products of its backward pass.

With x (n, in), W (out, in) and the output's gradient g (n, out) a linear layer needs

    y = x W^T      dx = g W      dW = g^T x

A layer names its product, and the functions of ``smp.layers.linear_functions`` look it up by that name: an operator
that graphs see takes no objects. Another precision is another entry of ``PRODUCTS``. Operands of a product in FP8 are
quantised before it, by what knows the scales (``smp.layers.fp8``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from smp.kernels.matmul import linear, weight_gradient
from smp.kernels.precision.fp8 import (
    BLOCK,
    E4M3,
    E5M2,
    MX_BLOCK,
    Quantised,
    inverse_scale,
    largest_of_blocks,
    quantise,
    scaled_product,
    transposed,
)
from smp.kernels.precision.nf4 import Nf4
from smp.kernels.registry import define, shapes_of

Format = Literal["hybrid", "e4m3", "e2m1"]
Granularity = Literal["tensor", "row", "block", "mx", "nv"]


class Product(Protocol):
    """The three products of a linear layer, on operands of this rank: tensors, or :class:`Quantised`.

    Attributes:
        differentiable: autograd's own backward pass of ``forward`` is the other two.
    """

    @property
    def differentiable(self) -> bool: ...

    def forward(self, x: Any, weight: Any) -> torch.Tensor:
        """(..., in) -> (..., out)."""

    def input_gradient(self, grad: Any, weight: Any) -> torch.Tensor:
        """(..., out) -> (..., in)."""

    def weight_gradient(self, grad: Any, x: Any) -> torch.Tensor:
        """(..., out) and (..., in) -> (out, in)."""

    def in_features(self, weight: torch.Tensor) -> int:
        """Elements of a row of the matrix that ``weight`` holds."""


class Dense:
    """Products in the dtype of the tensors: bf16 or fp32."""

    differentiable = True

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight)

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # ``linear`` multiplies by the transpose of what it is given: a view of W^T gives g W.
        return linear(grad, weight.t())

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return weight_gradient(grad, x)

    def in_features(self, weight: torch.Tensor) -> int:
        return weight.shape[1]


def gradient_dtype(fp8_format: Format) -> torch.dtype:
    """Dtype of gradients: hybrid gives them more range and less precision than inputs and weights, which are e4m3.
    Numbers of e2m1 are held in e4m3."""
    return E5M2 if fp8_format == "hybrid" else E4M3


@dataclass(frozen=True)
class Scaled:
    """Products in FP8, of operands (n, in) that are quantised, with results of ``dtype``.

    Attributes:
        granularity: numbers that share a scale. A weight's gradient is a sum over tokens: with one scale it takes the
            same operands as the other products; with a scale for each row (a token) it takes the tensors themselves,
            and stays in ``dtype``, as with NVFP4's blocks (``nv``); with other blocks it quantises them again, in
            blocks of 128 tokens, or 32 (``mx``).
        fp8_format: of gradients.
        dtype: of results.
        emulate: see :func:`scaled_product`.
    """

    granularity: Granularity
    fp8_format: Format
    dtype: torch.dtype
    emulate: bool

    differentiable = False

    @property
    def name(self) -> str:
        """Name of this product in :data:`PRODUCTS`."""
        how = "emulated" if self.emulate else "scaled"
        return f"fp8:{self.granularity}:{self.fp8_format}:{self.dtype}:{how}"

    def forward(self, x: Quantised, weight: Quantised) -> torch.Tensor:
        # Fast accumulation in the forward pass only, as in Transformer Engine: gradients need the bits.
        return scaled_product(x, weight, self.dtype, emulate=self.emulate, fast=True)

    def input_gradient(self, grad: Quantised, weight: Quantised) -> torch.Tensor:
        # (n, out) x (out, in): the weight comes with the scales that this product needs, see ``fp8.scaling``.
        return scaled_product(grad, transposed(weight), self.dtype, emulate=self.emulate)

    def weight_gradient(self, grad: Any, x: Any) -> torch.Tensor:
        if self.granularity in ("row", "nv"):
            # A scale for each token cannot be taken out of a sum over tokens, so the tensors
            # themselves are multiplied.
            return DENSE.weight_gradient(grad, x)
        if self.granularity in ("block", "mx"):
            size = BLOCK if self.granularity == "block" else MX_BLOCK
            # The sum is over tokens, so blocks have to lie along them.
            of_grad, of_x = along_rows(grad, gradient_dtype(self.fp8_format), size), along_rows(x, E4M3, size)
        else:
            of_grad, of_x = transposed(grad), transposed(x)
        # (out, tokens) and (in, tokens): the summed dimension is the last of both
        return scaled_product(of_grad, of_x, self.dtype, emulate=self.emulate)

    def in_features(self, weight: torch.Tensor) -> int:
        return weight.shape[1]


def along_rows(x: torch.Tensor, dtype: torch.dtype, size: int) -> Quantised:
    """(rows, width) -> (width, rows), of which ``size`` neighbours share a scale. In a graph an operator of its own, so
    that a compiler does not round."""
    if torch.compiler.is_compiling():
        return Quantised(*_along_rows_op(x, dtype, size))
    return _along_rows(x, dtype, size)


def _along_rows(x: torch.Tensor, dtype: torch.dtype, size: int) -> Quantised:
    # Blocks along the tokens: the maxima of columns of x are those of rows here.
    turned = x.t()
    return quantise(turned, inverse_scale(largest_of_blocks(turned, size=size), dtype), dtype)


_along_rows_op = define(
    "fp8_along_rows(Tensor x, ScalarType dtype, int size) -> Tensor[]",
    shapes_of(_along_rows),
    CompositeExplicitAutograd=lambda x, dtype, size: [*_along_rows(x, dtype, size)],
)


DENSE = Dense()
_FP8 = [
    Scaled(granularity, fp8_format, dtype, emulate)
    for granularity in ("tensor", "row", "block", "mx")
    for fp8_format in ("hybrid", "e4m3")
    for dtype in (torch.bfloat16, torch.float32, torch.float64)
    for emulate in (True, False)
]
# NVFP4 has no kernel here, it is always emulated.
_FP8 += [Scaled("nv", "e2m1", dtype, True) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
# All combinations, as operators look a product up by its name alone, which may come from a compiled graph.
PRODUCTS: dict[str, Product] = {
    "dense": DENSE,
    "nf4": Nf4(double=False),
    "nf4-double": Nf4(double=True),
    **{product.name: product for product in _FP8},
}
"""Products by the name that a layer gives."""
