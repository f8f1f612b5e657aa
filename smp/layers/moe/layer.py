"""The mixture-of-experts layer, which replaces a dense MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.registry import accumulation_dtype
from smp.kernels.token_layout import TokenLayout
from smp.layers.mlp import MLP
from smp.layers.moe.capacity import Capacity
from smp.layers.moe.dispatch import Dispatch, ReadCounts, read_counts
from smp.layers.moe.experts import Experts
from smp.layers.moe.router import Balance, Counted, Router
from smp.layers.parameter import REPLICATE, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import (
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
    split_tokens,
)
from smp.parallel.context import ParallelContext


class SharedExpertGate(nn.Module):
    """The gate of shared experts: their result is multiplied by ``sigmoid(w . x_t)`` of each token (Qwen 2).

    Args:
        hidden_size: of the tokens.
        parallel: a context, or a plain 1-D tensor-parallel mesh.
        init_std: standard deviation of the initial weights.
    """

    def __init__(self, hidden_size: int, parallel: ParallelContext | DeviceMesh, *, init_std: float = 0.02) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.shared_by = context.shared_by
        self.weight = tp_parameter((1, hidden_size), REPLICATE, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The gated y, of tokens x and of y, which the shared experts made of them, both (tokens [/p], hidden). The
        gate is computed in fp32."""
        weight = local(self.weight, x.dtype, summed_over=self.shared_by)
        wide = accumulation_dtype(x.dtype)
        return (F.linear(x.to(wide), weight.to(wide)).sigmoid() * y).to(y.dtype)


class MoE(nn.Module):
    """``y_t = sum over the chosen experts e of weight_te expert_e(x_t)``, plus shared experts, which every token gets.

    Under sequence parallelism each TP rank routes its slice of the tokens; tokens, choices and weights are then
    gathered, as in front of a dense MLP, over the ranks that have parts of an expert's width: all TP ranks, or with
    expert tensor parallelism of a smaller size some; of size one none, and each rank sends its slice to the experts.

    Args:
        router, experts: of the same context.
        parallel: that context.
        shared: an MLP for every token.
        gate: of the shared MLP; None: it counts whole.
        capacity: of each expert in training; None: no choice is dropped.
        weighs_input: experts compute ``expert_e(weight_te x_t)`` instead (Llama 4); a token has one expert.
        kernels: what moves rows.

    Shapes: (tokens [/p], hidden) -> the same.

    Attributes:
        read_counts: how the host learns how many rows an expert gets; a step on tensors without data takes even loads.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        parallel: ParallelContext,
        *,
        shared: MLP | None = None,
        gate: SharedExpertGate | None = None,
        capacity: Capacity | None = None,
        weighs_input: bool = False,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        if weighs_input and router.topk != 1:
            raise ValueError(f"a token has {router.topk} experts: its input has one weight")
        self.router, self.experts, self.shared_experts, self.shared_expert_gate = router, experts, shared, gate
        self.sequence_parallel, self.capacity, self.weighs_input = parallel.sequence_parallel, capacity, weighs_input
        self.group, self.ep = parallel.expert_tp_group, parallel.ep_group
        self.all_slices = parallel.tp_group
        self.backend = kernels.permute
        self.read_counts: ReadCounts = read_counts

    def forward(
        self,
        x: torch.Tensor,
        token_index: torch.Tensor | None = None,
        local_token_index: torch.Tensor | None = None,
        counted: Counted | None = None,
        layout: TokenLayout | None = None,
    ) -> tuple[torch.Tensor, Balance | None]:
        """(tokens [/p], hidden) -> (the same, what :meth:`Router.balance` measures of ``counted``).

        ``token_index`` and ``local_token_index`` are as in :class:`MLP`; a capacity, and a router with sinkhorn, need
        ``layout`` in training.
        """
        # (tokens [/p], k): each rank routes its own slice of the tokens.
        routing = self.router(x, layout)
        gather = gather_tokens if self.sequence_parallel else copy_to_group
        given = (x * routing.weights).to(x.dtype) if self.weighs_input else x
        tokens, weights = gather(given, self.group), gather(routing.weights, self.group)  # (tokens, ...)
        # Integers have no gradient; without sequence parallelism every rank has chosen the same.
        chosen = gather(routing.experts, self.group) if self.sequence_parallel else routing.experts
        kept = None
        if self.capacity is not None and self.training:
            assert layout is not None, "which says where sequences begin"
            kept = self._kept(self.capacity, chosen, weights, layout)
        dispatch = self._dispatch(chosen, kept, layout)
        receive = dispatch.send(tokens, self.backend)
        shared = self._shared(x, token_index, local_token_index)  # here: rows travel meanwhile
        rows = receive()
        del receive  # it has the rows as they arrived
        weights = torch.ones_like(weights) if self.weighs_input else weights
        # No name for the experts' results: they are free once they are sorted for their way back.
        y = dispatch.from_experts(self.experts.compute(rows, dispatch.counts), weights, self.backend)
        reduce = reduce_scatter_tokens if self.sequence_parallel else reduce_from_group
        # Experts are cut over these ranks inside: what they gave are parts of a sum.
        y = reduce(y, self.group)
        # last: the host waits for the counts above, not for this collective
        measured = None
        if counted is not None:
            # The router's loss is of this rank's slice of the tokens.
            own = kept if kept is None or not self.sequence_parallel else split_tokens(kept, self.group)
            measured = self.router.balance(routing, counted, own)
        return y if shared is None else y + shared, measured

    def _shared(
        self, x: torch.Tensor, token_index: torch.Tensor | None, local_token_index: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Output of the shared experts for these tokens; None: there are no shared experts."""
        if self.shared_experts is None:
            return None
        y = self.shared_experts(x, token_index, local_token_index)
        return y if self.shared_expert_gate is None else self.shared_expert_gate(x, y)

    def _kept(
        self, capacity: Capacity, chosen: torch.Tensor, weights: torch.Tensor, layout: TokenLayout
    ) -> torch.Tensor:
        """Which choices of these tokens are not dropped. Slices of all TP ranks make up the sequences."""
        own = len(chosen)
        num_groups = self.all_slices.size // self.group.size
        if self.sequence_parallel and num_groups > 1:
            # A capacity counts over whole sequences, of which this rank's group has only some slices.
            chosen, weights = (self._gathered_from_all(each) for each in (chosen, weights))
        kept = capacity.kept(chosen, weights, self.router.num_experts, layout)
        return kept if len(kept) == own else kept.narrow(0, self.all_slices.rank // self.group.size * own, own)

    def _gathered_from_all(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of all TP ranks, where ``x`` has those of this rank's expert-tensor-parallel group."""
        return gather_tokens(split_tokens(x.detach(), self.group), self.all_slices)

    def _dispatch(self, chosen: torch.Tensor, kept: torch.Tensor | None, layout: TokenLayout | None) -> Dispatch:
        experts = self.router.num_experts
        if kept is None or self.capacity is None or layout is None:
            return Dispatch.of(chosen, experts, self.ep, read=self.read_counts)
        slots = self.capacity.slots(chosen.shape[1], experts, layout)
        if slots is None:
            return Dispatch.of(chosen, experts, self.ep, kept, self.read_counts)
        # Each token chooses an expert once at most: more slots than tokens would stay empty.
        return Dispatch.to_slots(chosen, experts, self.ep, kept, min(slots, len(chosen)))
