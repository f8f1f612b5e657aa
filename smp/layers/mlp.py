"""The feed-forward part of a block."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel, row_parallel_swiglu

Activation = Literal["swiglu", "gelu", "tanh_gelu", "squared_relu"]


def _activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "gelu":
        return F.gelu(x)
    if activation == "tanh_gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x).square()


class MLP(nn.Module):
    """Column-parallel in, activation, row-parallel out.

    The gate and up projections of SwiGLU (Shazeer 2020) are two parameters: one fused matrix cut by rows would change
    its meaning with the number of ranks. They share one gather of the input.

    Args:
        hidden_size, ffn_hidden_size: global sizes; ffn must be divisible by the mesh size.
        mesh: 1-D tensor-parallel mesh.
        activation: see :data:`Activation`.
        bias: biases on all projections.
        sequence_parallel: input and output are split along dim 0.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what computes SwiGLU; fused ones keep only the projections' outputs.
        device, dtype: of the parameters.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for an unknown activation, or when the mesh does not divide ``ffn_hidden_size``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        mesh: DeviceMesh,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ValueError(f"activation {activation!r} is not one of {', '.join(get_args(Activation))}")
        self.activation: Activation = activation
        self.sequence_parallel = sequence_parallel
        self.backend = kernels.swiglu
        column = {
            "bias": bias,
            "sequence_parallel": sequence_parallel,
            "init_std": init_std,
            "device": device,
            "dtype": dtype,
        }
        self.gate: ColumnParallelLinear | None = None
        if activation == "swiglu":
            self.gate = ColumnParallelLinear(hidden_size, ffn_hidden_size, mesh, **column)  # type: ignore[arg-type]
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, mesh, **column)  # type: ignore[arg-type]
        row = {**column, "init_std": output_std}
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, mesh, **row)  # type: ignore[arg-type]

    def forward(
        self, x: torch.Tensor, numbers: torch.Tensor | None = None, local_numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden).

        ``numbers`` are those of all tokens and ``local_numbers`` of the ones in ``x``, int64, for dropout in adapters.
        """
        if self.gate is None:
            return self.down(_activate(self.up(x, local_numbers), self.activation), numbers)
        gate, up = column_parallel(x, [self.gate, self.up], local_numbers)  # (tokens, ffn/p) each
        return row_parallel_swiglu(gate, up, self.down, self.backend, numbers)
