"""The experts: many SwiGLU networks of one shape, each projection of all of them one parameter.

A parameter (experts, out, in) is cut by experts over the expert-parallel ranks and by its inner width over the
tensor-parallel ones, which is Megatron's expert tensor parallelism of the size of the tensor parallelism. FSDP cuts
what is left. So a checkpoint has one tensor per projection and layer, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from smp.kernels import TORCH, Kernels
from smp.kernels.grouped import counts_where_read, grouped_product
from smp.kernels.swiglu import swiglu
from smp.layers.parameter import Initializer, Normal, local, placed_parameter
from smp.parallel.context import ParallelContext


class ExpertLinear(nn.Module):
    """One projection of all experts: rows sorted by expert, each times its expert's matrix.

    Args:
        num_experts, in_features, out_features: global sizes.
        context: of the layer.
        tp_dim: the dimension of the weight (experts, out, in) that the TP ranks cut.
        init_std: standard deviation of the initial weights.
    """

    add_low_rank: ClassVar[Callable[..., torch.Tensor] | None] = None
    """What a layer with adapters adds to its product; see ``smp.layers.moe.lora``."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        context: ParallelContext,
        *,
        tp_dim: int,
        init_std: float,
    ) -> None:
        super().__init__()
        shape = num_experts, out_features, in_features
        self.tp_dim, self.tp_group = tp_dim, context.tp_group
        if context.ep_tp is None:
            self.weight = placed_parameter(shape, (Shard(tp_dim),), context.tp)
        else:
            self.weight = placed_parameter(shape, (Shard(0), Shard(tp_dim)), context.ep_tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n, in [/p]) sorted by expert, ``counts`` of each -> (n, out [/p])."""
        y = grouped_product(rows, local(self.weight, rows.dtype), counts)
        return y if self.add_low_rank is None else self.add_low_rank(rows, y, counts)


class Experts(nn.Module):
    """``down(SiLU(gate x) * up x)`` for each expert.

    Args:
        num_experts: of the whole group; this rank has an equal share of them.
        hidden_size, ffn_hidden_size: global widths; ffn must be divisible by the number of TP ranks.
        parallel: a context, or a plain 1-D tensor-parallel mesh: then every rank has its part of all experts.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what computes SwiGLU.

    Raises:
        ValueError: when the ranks do not divide the number of experts or their width.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.backend = kernels.swiglu
        self.widths = hidden_size, ffn_hidden_size // context.tp.size()
        inner = num_experts, hidden_size, ffn_hidden_size, context
        self.gate = ExpertLinear(*inner, tp_dim=1, init_std=init_std)
        self.up = ExpertLinear(*inner, tp_dim=1, init_std=init_std)
        self.down = ExpertLinear(num_experts, ffn_hidden_size, hidden_size, context, tp_dim=2, init_std=output_std)

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """``run(*arguments)``, in which :meth:`compute` is called. FSDP gathers and frees weights around ``forward``;
        a block goes through here before recompute begins, which would otherwise meet FSDP's work in its replay."""
        return run(*arguments)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n, hidden) sorted by expert, ``counts`` of each of this rank's -> (n, hidden), on TP ranks parts of a
        sum."""
        counts = counts_where_read(counts, rows, *self.widths)
        gate, up = self.gate(rows, counts), self.up(rows, counts)  # (n, ffn/p) each
        return self.down(swiglu(gate, up, self.backend), counts)
