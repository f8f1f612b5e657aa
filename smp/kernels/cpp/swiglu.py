"""See :mod:`smp.kernels.swiglu`."""

from __future__ import annotations

import torch

from smp.kernels import swiglu
from smp.kernels.cpp.library import computes, library, pointers, require, rows_of


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`smp.kernels.swiglu.forward_reference`."""
    if not computes(gate, up):
        return swiglu.forward_reference(gate, up)
    require(gate.shape == up.shape, "gate and up of one shape")
    gate, up = rows_of(gate), rows_of(up)
    out = gate.new_empty(gate.shape)
    sizes = *gate.shape, gate.stride(0), up.stride(0), torch.get_num_threads()
    library().smp_swiglu(gate.dtype == torch.bfloat16, *pointers(gate, up, out), *sizes)
    return out


def backward(da: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool) -> tuple[torch.Tensor, ...]:
    """See :func:`smp.kernels.swiglu.backward_reference`."""
    if not computes(da, gate, up):
        return swiglu.backward_reference(da, gate, up, again)
    require(da.shape == gate.shape == up.shape, "gate, up and gradient of one shape")
    da, gate, up = rows_of(da), rows_of(gate), rows_of(up)
    dgate, dup, out = gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if again else 0)
    sizes = *gate.shape, da.stride(0), gate.stride(0), up.stride(0), torch.get_num_threads()
    tensors = pointers(da, gate, up, dgate, dup, out if again else None)
    library().smp_swiglu_gradient(gate.dtype == torch.bfloat16, *tensors, *sizes)
    return dgate, dup, out
