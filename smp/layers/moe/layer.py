"""The layer that stands where a dense MLP would."""

from __future__ import annotations

import torch
from torch import nn

from smp.layers.mlp import MLP
from smp.layers.moe.dispatch import Dispatch
from smp.layers.moe.experts import Experts
from smp.layers.moe.router import Router
from smp.parallel.collectives import (
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from smp.parallel.context import ParallelContext


class MoE(nn.Module):
    """``y_t = sum over the chosen experts e of weight_te expert_e(x_t)``, plus shared experts, which every token gets.

    Under sequence parallelism each TP rank routes its slice of the tokens; tokens, choices and weights are then
    gathered, as in front of a dense MLP, because every TP rank has a part of each expert's width.

    Args:
        router, experts: of the same context.
        parallel: that context.
        shared: an MLP for every token.

    Shapes: (tokens [/p], hidden) -> the same.
    """

    def __init__(
        self, router: Router, experts: Experts, parallel: ParallelContext, *, shared: MLP | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared_experts = router, experts, shared
        self.sequence_parallel = parallel.sequence_parallel
        self.group, self.ep = parallel.tp_group, parallel.ep_group

    def forward(
        self,
        x: torch.Tensor,
        token_index: torch.Tensor | None = None,
        local_token_index: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [/p], hidden) -> (the same, what :meth:`Router.balance` measures, zeros without ``loss_weights``).

        ``token_index`` and ``local_token_index`` are as in :class:`MLP`; ``loss_weights`` is fp32 (tokens [/p],).
        """
        routing = self.router(x)
        gather = gather_tokens if self.sequence_parallel else copy_to_group
        tokens, weights = gather(x, self.group), gather(routing.weights, self.group)  # (tokens, ...)
        chosen = gather(routing.experts, self.group) if self.sequence_parallel else routing.experts
        dispatch = Dispatch.of(chosen, self.router.num_experts, self.ep)
        rows = self.experts.compute(dispatch.to_experts(tokens), dispatch.counts)
        y = dispatch.from_experts(rows, weights)
        reduce = reduce_scatter_tokens if self.sequence_parallel else reduce_from_group
        y = reduce(y, self.group)
        measured = torch.zeros(3, device=x.device)
        if loss_weights is not None:  # last: the host waits for the counts above, not for this collective
            measured = self.router.balance(routing, loss_weights)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x, token_index, local_token_index)
        return y, measured
