"""Which matrix product a linear layer of a transformers model uses.

On a CPU whose MKL is slow, products in fp32 are oneDNN's (:mod:`smp.kernels.matmul`). Layers that a plan cuts have them
in their own forward pass; :func:`install` is for a model without tensor parallelism. Weights that rest in 4 bits are
widened for each product (:mod:`smp.layers.adapters.quantized`).
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from smp.kernels import matmul
from smp.kernels.matmul import linear
from smp.kernels.precision.nf4 import Nf4
from smp.kernels.product import PRODUCTS
from smp.kernels.registry import first_derivative_only

_LINEAR = nn.Linear.forward


def install(model: nn.Module) -> int:
    """Give each ``nn.Linear`` with its class's own forward pass the faster product; returns how many."""
    if not matmul.SLOW_MKL:
        return 0
    layers: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    layers = [layer for layer in layers if layer.weight.dtype == torch.float32]
    for layer in layers:
        layer.forward = partial(forward, layer)  # which can be pickled
    return len(layers)


def forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., out) by ``layer``, unless its class or the class's forward has been replaced."""
    own: Any = type(layer).forward
    return linear(input, layer.weight, layer.bias) if own is _LINEAR else own(layer, input)


def product(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` (..., in) times ``weight``, rows of ``layer``'s weight as stored -> (..., out)."""
    packed = PRODUCTS[vars(layer).get("product", "dense")]
    if not isinstance(packed, Nf4):
        return linear(x, weight, bias)
    y: torch.Tensor = _Packed.apply(x, weight, packed)
    return y if bias is None else y + bias


def take_product(layer: Any, name: str) -> None:
    """Let ``layer``, whose weight is replaced by a packed one, use the product ``name`` of ``PRODUCTS``."""
    layer.product = name
    layer.__class__ = PackedLinear
    if isinstance(vars(layer).get("forward"), partial):  # of install, above
        del layer.forward
    # An adapter calls the layer without itself by this attribute.
    if "without_adapter" in vars(layer) and "smp_cut" not in vars(layer):
        layer.without_adapter = MethodType(PackedLinear.forward, layer)


class PackedLinear(nn.Linear):
    """A linear layer with a frozen 4-bit weight; made from a plain one by :func:`take_product`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return product(self, input, self.weight, self.bias)


class _Packed(torch.autograd.Function):
    """The product with a packed weight, which is unpacked again in the backward pass: only 4 bits per weight are
    saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, packed: Nf4) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.packed = packed
        return packed.forward(x, weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [weight] = ctx.saved_tensors
        return ctx.packed.input_gradient(grads[0], weight), None, None
