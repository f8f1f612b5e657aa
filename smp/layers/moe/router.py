"""The router: which experts a token gets, with which weights, and what keeps their loads even.

Logits are ``x W^T`` in fp32, (tokens, experts). With k = ``topk``, chosen experts C_t and scaling factor f:

    softmax              weights = f softmax(logits of C_t)                 (Mixtral, Qwen 3)
    softmax, pre_softmax weights = f (softmax(logits) of C_t)               (sum below f; OLMoE, Qwen 2)
    sigmoid              weights = f s / (sum of s over C_t), s = sigmoid   (DeepSeek-V3; with k = 1 f s)

The experts chosen are those with the k largest logits, and of equal ones those with the lowest numbers: the same on
every device, whatever order a top-k leaves equal values in.

Auxiliary losses, with p the scores of all experts (softmax, or sigmoids divided by their sum), w the loss weights of
the tokens, E experts, and c the tokens that chose each:

    load balancing   sum_t w_t sum_e (E c_e / sum c) p_te     at an even load the sum of w
                                                              (Switch, arXiv 2101.03961, eq. 4, divided by k)
    z                sum_t w_t logsumexp(logits_t)^2          (ST-MoE, arXiv 2202.08906)

Both are sums over tokens in the one way in which the loss itself is, so ranks and micro-batches add up. c is counted
over the micro-batches that all data-parallel ranks compute at the same time, tokens of weight 0 left out, and has no
gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels.registry import accumulation_dtype
from smp.layers.parameter import REPLICATE, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import reduce_from_group, sum_over
from smp.parallel.context import ParallelContext

ScoreFunction = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: int64 (tokens, k), in the order of falling logits.
        weights: fp32 (tokens, k).
        logits: fp32 (tokens, experts).
    """

    experts: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor


class Router(nn.Module):
    """Scores tokens, chooses their experts, and measures the balance.

    Args:
        hidden_size: of the tokens.
        num_experts, topk: number of experts, and how many of them a token gets.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` each rank routes its
            slice of the tokens.
        score_function, pre_softmax, scaling_factor: see above.
        init_std: standard deviation of the initial weights.

    Raises:
        ValueError: when a token cannot get so many experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        score_function: ScoreFunction = "softmax",
        pre_softmax: bool = False,
        scaling_factor: float = 1.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if not 1 <= topk <= num_experts:
            raise ValueError(f"{topk} of {num_experts} experts cannot be chosen")
        context = ParallelContext.of(parallel)
        self.num_experts, self.topk = num_experts, topk
        self.score_function, self.pre_softmax, self.scaling_factor = score_function, pre_softmax, scaling_factor
        self.shared_by = context.shared_by
        slices = () if self.shared_by is None else (self.shared_by,)
        self.token_groups = (*slices, *context.data_groups)
        self.weight = tp_parameter((num_experts, hidden_size), REPLICATE, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}

    def forward(self, x: torch.Tensor) -> Routing:
        """(tokens [/p], hidden) -> the routing of these tokens."""
        weight = local(self.weight, x.dtype, summed_over=self.shared_by)
        wide = accumulation_dtype(x.dtype)
        logits = F.linear(x.to(wide), weight.to(wide))
        experts = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.topk]
        return Routing(experts, self._weights(logits, experts), logits)

    def _weights(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if self.score_function == "sigmoid":
            chosen = logits.gather(1, experts).sigmoid()
            weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if self.topk > 1 else chosen
        elif self.pre_softmax:
            weights = logits.softmax(-1).gather(1, experts)
        else:
            weights = logits.gather(1, experts).softmax(-1)
        return weights * self.scaling_factor

    def balance(self, routing: Routing, loss_weights: torch.Tensor) -> torch.Tensor:
        """Both auxiliary losses without their coefficients, and the largest load of an expert as a multiple of the mean
        times the tokens' weight (no gradient), fp32 (3,). Under sequence parallelism summed over its ranks, so that all
        TP ranks hold the same; a part of the sum over data-parallel ranks, as the loss is.

        Args:
            routing: of the tokens of this rank.
            loss_weights: fp32 (tokens [/p],); a token of weight 0 does not count.
        """
        logits = routing.logits
        load = self._load(routing.experts, loss_weights != 0).to(logits.dtype)  # (experts,), 1 on average
        scores = logits.softmax(-1)
        if self.score_function == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        w = loss_weights.to(logits.dtype)
        z = logits.logsumexp(-1).square()
        found = torch.stack([(scores @ load * w).sum(), (z * w).sum(), load.max() * w.sum()]).float()
        return found if self.shared_by is None else reduce_from_group(found, self.shared_by)

    def _load(self, experts: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Tokens of each expert, as multiples of their mean over the experts. Integers are added up, so the ranks'
        order does not show."""
        ones = counted[:, None].expand_as(experts).long()
        counts = ones.new_zeros(self.num_experts).scatter_add_(0, experts.flatten(), ones.flatten())
        counts = sum_over(counts, self.token_groups).double()
        return counts * self.num_experts / counts.sum().clamp(min=1)
