"""Low-rank adapters on experts: each expert of a projection has its own A (rank, in) and B (out, rank).

They are stacked as the weights are, A (experts, rank, in) and B (experts, out, rank), and cut as they are: by experts
over the expert-parallel ranks, and over those of expert tensor parallelism where the weight's inner width is.
Everything that leaves an expert there is a part of a sum over these ranks, and so is what its adapter adds: nothing
more is sent but the gradient of the factor that they share, which is summed over them.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.kernels.experts.grouped import grouped_product
from smp.layers.moe.experts import ExpertLinear
from smp.layers.parameter import REPLICATE, Constant, Initializer, Normal, local, placed_parameter


class ExpertLora(nn.Module):
    """The factors of the adapters of all experts of one projection.

    Args:
        layer: the factors lie on its mesh and device.
        rank: of each B A.
        alpha: B A is scaled by alpha / rank.

    First values are those of :class:`smp.layers.adapters.lora.Lora`.
    """

    def __init__(self, layer: ExpertLinear, rank: int, alpha: float) -> None:
        super().__init__()
        weight = cast(DTensor, layer.weight)
        (experts, out_features, in_features), mesh = weight.shape, weight.device_mesh
        # (ep, tp) placements where experts are spread, else that of TP alone.
        *spread, cut = weight.placements
        self.sums_a = layer.tp_dim == 1  # outputs are cut: the ranks share A
        # As of a dense layer: the factor at the cut side of the weight is cut with it, the other is replicated.
        of_a, of_b = (REPLICATE, cut) if self.sums_a else (cut, REPLICATE)
        with torch.device(weight.device):
            self.a = placed_parameter((experts, rank, in_features), (*spread, of_a), mesh)
            self.b = placed_parameter((experts, out_features, rank), (*spread, of_b), mesh)
        self.initializers: dict[str, Initializer] = {"a": Normal((3 * in_features) ** -0.5), "b": Constant(0.0)}
        self.rank, self.alpha = rank, alpha
        self.enabled = True


class LoraExpertLinear(ExpertLinear):
    """A projection of all experts with adapters ``lora``; made of a plain one by
    :func:`smp.layers.adapters.lora.attach`."""

    lora: ExpertLora

    def add_low_rank(self, rows: torch.Tensor, output: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``output`` of rows (n, in [/p]) sorted by expert plus what the adapters add."""
        lora = self.lora
        if not lora.enabled:
            return output
        a = local(lora.a, rows.dtype, summed_over=self.tp_group if lora.sums_a else None)
        b = local(lora.b, rows.dtype, summed_over=None if lora.sums_a else self.tp_group)
        low = grouped_product(rows, a, counts, self.backend) * (lora.alpha / lora.rank)  # (n, rank)
        return output + grouped_product(low, b, counts, self.backend)
