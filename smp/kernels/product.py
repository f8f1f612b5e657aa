"""Which matrix product a linear layer runs: forward, and the two products of its backward pass.

With x (n, in), W (out, in) and the output's gradient g (n, out) a linear layer needs

    y = x W^T      dx = g W      dW = g^T x

A layer names its product, and the functions of ``smp.layers.linear_functions`` look it up by that name: an operator
that graphs see takes no objects. Another precision is another entry of ``PRODUCTS``. (A product that has a state, such
as a history of scales, gets it as tensors.)
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Product(Protocol):
    """The three products of a linear layer, on plain tensors of this rank.

    Attributes:
        differentiable: autograd's own backward pass of ``forward`` is the other two.
    """

    differentiable: bool

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(..., out) -> (..., in)."""

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(..., out) and (..., in) -> (out, in)."""


class Dense:
    """In the dtype of the tensors: bf16 or fp32."""

    differentiable = True

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return grad @ weight

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)


PRODUCTS: dict[str, Product] = {"dense": Dense()}
"""By the name that a layer gives."""
