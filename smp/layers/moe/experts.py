"""The experts: many networks of one shape, each projection of all of them one parameter.

A parameter (experts, out, in) is cut by experts over the expert-parallel ranks and by its inner width over the ranks of
expert tensor parallelism, which are the tensor-parallel ones or some of them. FSDP cuts what is left. So a checkpoint
has one tensor per projection and layer, whatever the layout. TP stands for those ranks here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from smp.kernels import TORCH, Kernels
from smp.kernels.experts.grouped import add_rows_of_groups, counts_where_read, grouped_products
from smp.kernels.quick_geglu import QuickGeglu
from smp.layers.fp8.grouped import scaled_experts
from smp.layers.fp8.layer_scaling import LayerScaling
from smp.layers.linear_functions import Sink
from smp.layers.mlp import Activation, activate, activate_gated, has_gate
from smp.layers.parameter import Constant, Initializer, Normal, local, placed_parameter
from smp.parallel.context import ParallelContext


class ExpertLinear(nn.Module):
    """One projection of all experts: rows sorted by expert, each times its expert's matrix.

    Args:
        num_experts, in_features, out_features: global sizes.
        context: of the layer.
        tp_dim: the dimension of the weight (experts, out, in) that the TP ranks cut.
        bias: each expert has one. Where the TP ranks have parts of a sum each adds its share of it.
        init_std: standard deviation of the initial weights.
        backend: torch or triton, what multiplies.

    Attributes:
        kind: "column" or "row" parallel: TP ranks have columns of the result, or parts of a sum.
        scaling: in FP8 where scales come from, see ``smp.layers.fp8``.
        sink: who computes weight gradients later; None: the backward pass does.
    """

    add_low_rank: ClassVar[Callable[..., torch.Tensor] | None] = None
    """Hook of layers with adapters: adds to the product; see ``smp.layers.moe.lora``."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        context: ParallelContext,
        *,
        tp_dim: int,
        init_std: float,
        bias: bool = False,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        shape = num_experts, out_features, in_features
        self.tp_dim, self.tp_group, self.backend = tp_dim, context.expert_tp_group, backend

        def spread(shape: tuple[int, ...], tp_dim: int) -> nn.Parameter:
            if context.ep_tp is None:
                # Without expert parallelism: every rank has all experts, each cut over TP.
                return placed_parameter(shape, (Shard(tp_dim),), context.tp)
            return placed_parameter(shape, (Shard(0), Shard(tp_dim)), context.ep_tp)

        self.weight = spread(shape, tp_dim)
        self.bias = spread(shape[:2], 1) if bias else None
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std), "bias": Constant(0.0)}
        self.kind: Literal["column", "row"] = "column" if tp_dim == 1 else "row"
        self.scaling: LayerScaling | None = None
        self.sink: Sink | None = None

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n, in [/p]) sorted by expert, ``counts`` of each -> (n, out [/p])."""
        return apply_experts(rows, [self], counts)[0]

    def later(self, compute: Callable[[], torch.Tensor]) -> None:
        """Hand the computation of the weight's gradient to the sink."""
        assert self.sink is not None
        self.sink(lambda: [(self, compute())])

    def add_bias(self, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n, out [/p]) sorted by expert, with the bias of each row's expert. Parts of a sum get it in the columns
        that are this TP rank's share, so the sum has it once."""
        assert self.bias is not None
        bias = local(self.bias, y.dtype)  # (experts, out/p)
        if self.kind == "row" and self.tp_group.size > 1:
            share, rank = bias.shape[1], self.tp_group.rank
            # Each rank adds its columns of the bias and zeros elsewhere; the sum over ranks has each column once.
            bias = F.pad(bias, (rank * share, y.shape[1] - (rank + 1) * share))
        return add_rows_of_groups(y, bias, counts, self.backend)


def apply_experts(
    rows: torch.Tensor, projections: Sequence[ExpertLinear], counts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Several projections of the same rows, as :meth:`ExpertLinear.forward`; in FP8 with one exchange of maxima."""
    # (experts / ep, out [/p], in [/p])
    weights = [local(projection.weight, rows.dtype) for projection in projections]
    scalings = [projection.scaling for projection in projections if projection.scaling is not None]
    later = (
        [projection.later for projection in projections] if any(projection.sink for projection in projections) else []
    )
    if scalings:
        outputs = scaled_experts(rows, weights, counts, scalings[0].of_call(scalings), later)
    else:
        outputs = grouped_products(rows, weights, counts, later, projections[0].backend)
    outputs = tuple(
        y if projection.bias is None else projection.add_bias(y, counts)
        for projection, y in zip(projections, outputs, strict=True)
    )
    return tuple(
        y if projection.add_low_rank is None else projection.add_low_rank(rows, y, counts)
        for projection, y in zip(projections, outputs, strict=True)
    )


def expert_layers(model: nn.Module) -> dict[str, ExpertLinear]:
    """Experts' projections of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertLinear)}


class Experts(nn.Module):
    """``down(SiLU(gate x) * up x)`` for each expert, or another activation of these two or, without a gate, of one.

    Args:
        num_experts: of the whole group; this rank has an equal share of them.
        hidden_size, ffn_hidden_size: global widths; ffn must be divisible by the number of TP ranks.
        parallel: a context, or a plain 1-D tensor-parallel mesh: then every rank has its part of all experts.
        activation: as of :class:`smp.layers.mlp.MLP`.
        bias: biases on all projections.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what multiplies, and what computes SwiGLU.

    Raises:
        ValueError: for an unknown activation; when the ranks do not divide the number of experts or their width, or
            with ``bias`` that of tokens.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        activation: Activation | QuickGeglu = "swiglu",
        bias: bool = False,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.activation, self.backend = activation, kernels.swiglu
        self.widths = hidden_size, ffn_hidden_size // context.expert_tp_group.size
        inner, outer = (num_experts, hidden_size, ffn_hidden_size), (num_experts, ffn_hidden_size, hidden_size)

        def projection(sizes: tuple[int, int, int], tp_dim: int, std: float) -> ExpertLinear:
            backend = kernels.grouped_gemm
            return ExpertLinear(*sizes, context, tp_dim=tp_dim, init_std=std, bias=bias, backend=backend)

        self.gate = projection(inner, 1, init_std) if has_gate(activation) else None
        self.up, self.down = projection(inner, 1, init_std), projection(outer, 2, output_std)

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """``run(*arguments)``, in which :meth:`compute` is called. FSDP gathers and frees weights around ``forward``;
        a block goes through here before recompute begins, which would otherwise meet FSDP's work in its replay."""
        return run(*arguments)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n, hidden) sorted by expert, ``counts`` of each of this rank's -> (n, hidden), on TP ranks parts of a
        sum."""
        # FP8 products go expert by expert, in a loop of the host, which needs the counts there.
        in_loops = self.up.scaling is not None  # in FP8
        counts = counts.cpu() if in_loops else counts_where_read(counts, rows, self.widths, self.up.backend)
        if self.gate is None:
            assert not isinstance(self.activation, QuickGeglu), "which has a gate"
            return self.down(activate(self.up(rows, counts), self.activation), counts)
        # Both at once: their gradients by the rows are summed where they are made.
        gate, up = apply_experts(rows, [self.gate, self.up], counts)  # (n, ffn/p) each
        return self.down(activate_gated(gate, up, self.activation, self.backend), counts)
