"""The dense feed-forward network of a block."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.quick_geglu import QuickGeglu
from smp.kernels.swiglu import FusedSwiglu, swiglu
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.parallel.context import ParallelContext

Activation = Literal["swiglu", "geglu", "tanh_geglu", "gelu", "tanh_gelu", "relu", "squared_relu"]
GATED = ("swiglu", "geglu", "tanh_geglu")
"""Activations with a third matrix: the activation of the gate is multiplied by the up projection."""


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """An activation without a gate."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "tanh_gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) if activation == "relu" else F.relu(x).square()


def activate_gated(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation | QuickGeglu, backend: str
) -> torch.Tensor:
    """A gated activation; ``backend`` computes SwiGLU."""
    if isinstance(activation, QuickGeglu):
        return activation(gate, up)
    if activation == "swiglu":
        return swiglu(gate, up, backend)
    return F.gelu(gate, approximate="tanh" if activation == "tanh_geglu" else "none") * up


def has_gate(activation: Activation | QuickGeglu) -> bool:
    """Whether the activation has a gate projection.

    Raises:
        ValueError: there is no such activation.
    """
    if not isinstance(activation, QuickGeglu) and activation not in get_args(Activation):
        raise ValueError(f"activation {activation!r} is not one of {', '.join(get_args(Activation))}")
    return isinstance(activation, QuickGeglu) or activation in GATED


class MLP(nn.Module):
    """Column-parallel in, activation, row-parallel out.

    The gate and up projections of SwiGLU and GEGLU (Shazeer 2020) are two parameters: one fused matrix cut by rows
    would change its meaning with the number of ranks. They share one gather of the input.

    Args:
        hidden_size, ffn_hidden_size: global sizes; ffn must be divisible by the number of TP ranks.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        activation: see :data:`Activation`; or a gated one with settings of its own.
        bias: biases on all projections.
        gate_multiplier, multiplier: of the gate, before its activation, and of the result.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: backend of SwiGLU; a fused one keeps only the projections' outputs for the backward pass.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for an unknown activation, a gate multiplier without a gate, or when the ranks do not divide
            ``ffn_hidden_size``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        activation: Activation | QuickGeglu = "swiglu",
        bias: bool = False,
        gate_multiplier: float = 1.0,
        multiplier: float = 1.0,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        gated = has_gate(activation)
        if gate_multiplier != 1.0 and not gated:
            raise ValueError(f"a gate_multiplier, and the activation {activation} has no gate")
        context = ParallelContext.of(parallel)
        self.activation: Activation | QuickGeglu = activation
        self.gate_multiplier, self.multiplier = gate_multiplier, multiplier
        self.sequence_parallel = context.sequence_parallel
        self.backend = kernels.swiglu
        self.gate: ColumnParallelLinear | None = None
        # Two matrices with one input, not one matrix: see the class.
        if gated:
            self.gate = ColumnParallelLinear(hidden_size, ffn_hidden_size, context, bias=bias, init_std=init_std)
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, context, bias=bias, init_std=init_std)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, context, bias=bias, init_std=output_std)

    def forward(
        self,
        x: torch.Tensor,
        token_index: torch.Tensor | None = None,
        local_token_index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden).

        ``token_index`` holds the numbers of all tokens and ``local_token_index`` those of the ones in ``x``, int64, for
        dropout in adapters.
        """
        y = self._computed(x, token_index, local_token_index)
        return y if self.multiplier == 1.0 else y * self.multiplier

    def _computed(
        self, x: torch.Tensor, token_index: torch.Tensor | None, local_token_index: torch.Tensor | None
    ) -> torch.Tensor:
        if self.gate is None:
            assert not isinstance(self.activation, QuickGeglu), "which has a gate"
            # (tokens, ffn/p)
            a = activate(self.up(x, local_token_index), self.activation)
            return self.down(a, token_index=token_index)
        # One gather of the input for both.
        gate, up = column_parallel(x, [self.gate, self.up], local_token_index)  # (tokens, ffn/p) each
        gate = gate if self.gate_multiplier == 1.0 else gate * self.gate_multiplier
        # an adapter multiplies the activation too, so there it has to be kept
        if self.activation != "swiglu" or self.backend == "torch" or self.down.add_low_rank is not None:
            return self.down(activate_gated(gate, up, self.activation, self.backend), token_index=token_index)
        # The product of gate and up is not kept for the backward pass, which makes it again from the two.
        return self.down(gate, up, activation=FusedSwiglu(self.backend))
