"""Linear layers of a model on a CPU whose MKL is slow: their products in fp32 are oneDNN's (:mod:`smp.kernels.matmul`).

Layers that a plan cuts have them in their own forward pass; this is for a model without tensor parallelism.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from smp.kernels import matmul
from smp.kernels.matmul import linear

_LINEAR = nn.Linear.forward


def install(model: nn.Module) -> int:
    """Give each ``nn.Linear`` whose forward pass is its class's own another one; returns how many."""
    if not matmul.SLOW_MKL:
        return 0
    layers: list[Any] = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    layers = [layer for layer in layers if layer.weight.dtype == torch.float32]
    for layer in layers:
        layer.forward = partial(forward, layer)  # which can be pickled
    return len(layers)


def forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., out) by ``layer``, unless something has replaced its class, or that one's forward pass."""
    own: Any = type(layer).forward
    return linear(input, layer.weight, layer.bias) if own is _LINEAR else own(layer, input)
