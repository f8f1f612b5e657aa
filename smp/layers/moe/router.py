"""The router: the choice of experts and their weights, and the losses and biases that balance the experts' loads.

Logits are ``x W^T``, or with a bias ``x W^T + b`` (GPT-OSS), in fp32, (tokens, experts). With k = ``topk``, chosen
experts C_t and scaling factor f:

    softmax              weights = f softmax(logits of C_t)                 (Mixtral, Qwen 3)
    softmax, pre_softmax weights = f (softmax(logits) of C_t)               (sum below f; OLMoE, Qwen 2)
    sigmoid              weights = f s / (sum of s over C_t), s = sigmoid   (DeepSeek-V3; with k = 1 f s)

The experts chosen are those with the k largest logits, and of equal ones those with the lowest numbers: the same on
every device, whatever order a top-k leaves equal values in. Three things change the choice, and not the weights:

    expert bias          sigmoid + b_e is compared. b is no parameter: after each step b_e += u sign(mean c - c_e), with
                         the tokens c of the global batch (arXiv 2408.15664)
    groups               of G groups of neighbours the g best are kept, by the sum of their k // g largest values
                         (DeepSeek-V3) or by their largest (DeepSeek-V2); of sigmoids, of the softmax with
                         pre_softmax, else of logits

    sinkhorn             in training logits + log d1 of the token's sequence are compared, see ``sinkhorn.py``

Auxiliary losses, with p the scores of all experts (softmax, or sigmoids divided by their sum), w the loss weights of
the tokens, E experts, and c the tokens that chose each:

    load balancing   sum_t w_t sum_e (E c_e / sum c) p_te     at an even load the sum of w
                                                              (Switch, arXiv 2101.03961, eq. 4, divided by k)
    z                sum_t w_t logsumexp(logits_t)^2          (ST-MoE, arXiv 2202.08906)

Both are sums over tokens as the loss itself is, so contributions of ranks and micro-batches add up. c has no
gradient, tokens of weight 0 are left out, and it is counted over

    aux_loss             the micro-batches that all data-parallel ranks compute at the same time
    global_aux_loss      those, and what this step has computed before
    seq_aux_loss         the token's own sequence
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.experts.router import Scores, choose_experts, scores_of
from smp.kernels.registry import accumulation_dtype
from smp.kernels.token_layout import TokenLayout
from smp.layers.moe.sinkhorn import Sinkhorn
from smp.layers.parameter import REPLICATE, Constant, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import Group, reduce_from_group, sum_over
from smp.parallel.context import ParallelContext

ScoreFunction = Literal["softmax", "sigmoid"]
GroupScore = Literal["sum", "max"]
Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss"]


class Routing(NamedTuple):
    """The router's result: the experts of each token and their weights.

    Attributes:
        experts: int64 (tokens, k), in the order of falling logits (with expert bias, of what is compared).
        weights: fp32 (tokens, k).
        logits: fp32 (tokens, experts).
    """

    experts: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor


class Counted(NamedTuple):
    """Counts and scores of this rank's tokens, from which the balance is measured.

    Attributes:
        weights: fp32 (tokens [/p],), what each token's loss counts; a token of weight 0 does not count.
        seen: int64 (experts,), tokens of each expert in the micro-batches of this step before.
        sequences: int64 (tokens [/p],), which of the micro-batch's sequences each token is of; for ``seq_aux_loss``.
        num_sequences: of the micro-batch.
    """

    weights: torch.Tensor
    seen: torch.Tensor
    sequences: torch.Tensor | None = None
    num_sequences: int = 0


class Balance(NamedTuple):
    """The balance that the router measured in a micro-batch, and the tokens of each expert so far.

    Attributes:
        measures: fp32 (5,): the load-balancing and the z loss, the largest load, the entropy, the dropped share.
        seen: int64 (experts,), tokens of each expert in this step so far, of all data-parallel ranks.
    """

    measures: torch.Tensor
    seen: torch.Tensor


class Router(nn.Module):
    """Scores tokens, chooses their experts, and measures the balance.

    Args:
        hidden_size: of the tokens.
        num_experts, topk: number of experts, and how many of them a token gets.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` each rank routes its
            slice of the tokens.
        score_function, pre_softmax, scaling_factor: see above.
        bias_update_rate: u of the expert bias; None: there is none.
        num_groups, group_topk: G and g; None: no groups.
        group_score: what a group is worth, the sum of its k // g largest values or its largest.
        balancing: what loads are counted over.
        bias: logits have a trained bias.
        sinkhorn: balances choices in training; not with an expert bias or groups.
        init_std: standard deviation of the initial weights.
        kernels: what chooses experts.

    Raises:
        ValueError: when a token cannot get so many experts.
    """

    expert_bias: torch.Tensor | None

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
        bias_update_rate: float | None = None,
        num_groups: int | None = None,
        group_topk: int | None = None,
        group_score: GroupScore = "sum",
        balancing: Balancing = "aux_loss",
        bias: bool = False,
        sinkhorn: bool = False,
        init_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        if not 1 <= topk <= num_experts:
            raise ValueError(f"{topk} of {num_experts} experts cannot be chosen")
        context = ParallelContext.of(parallel)
        self.num_experts, self.topk = num_experts, topk
        self.score_function, self.scaling_factor, self.backend = score_function, scaling_factor, kernels.router
        self.scores: Scores = "pre_softmax" if score_function == "softmax" and pre_softmax else score_function
        self.bias_update_rate, self.num_groups, self.group_topk = bias_update_rate, num_groups, group_topk
        self.balancing = balancing
        # DeepSeek-V3: the k experts of a token come from g groups, k / g each, so a group is worth its k / g best.
        self.group_summed = topk // group_topk if group_topk is not None and group_score == "sum" else 1
        self.shared_by = context.shared_by
        # Under sequence parallelism TP ranks have different tokens: a count over all tokens includes them.
        slices = () if self.shared_by is None else (self.shared_by,)
        self.token_groups = (*slices, *context.data_groups)
        # The ranks that hold parts of one sequence: its balance is counted over these.
        self.sequence_groups = (*slices, *(() if context.cp_group is None else (context.cp_group,)))
        self.sinkhorn = Sinkhorn(self.shared_by, context.cp_group) if sinkhorn else None
        self.weight = tp_parameter((num_experts, hidden_size), REPLICATE, context.tp)
        self.bias = tp_parameter((num_experts,), REPLICATE, context.tp) if bias else None
        zero = Constant(0.0)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std), "bias": zero, "expert_bias": zero}
        moving = None if bias_update_rate is None else torch.zeros(num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", moving)

    def forward(self, x: torch.Tensor, layout: TokenLayout | None = None) -> Routing:
        """(tokens [/p], hidden) -> the routing of these tokens. Sinkhorn's needs ``layout`` in training."""
        weight = local(self.weight, x.dtype, summed_over=self.shared_by)
        wide = accumulation_dtype(x.dtype)
        bias = None if self.bias is None else local(self.bias, x.dtype, summed_over=self.shared_by).to(wide)
        # In fp32: two experts' logits may differ by less than bf16 resolves, and the choice would
        # then depend on how a product is cut into tiles.
        logits = F.linear(x.to(wide), weight.to(wide), bias)
        compared = None
        if self.num_groups is not None or (self.sinkhorn is not None and self.training):
            # Detached: a choice has no gradient, only the weights of what was chosen do.
            compared = self._compared(logits.detach(), layout)
        experts, weights = choose_experts(
            logits,
            self.topk,
            self.scores,
            self.scaling_factor,
            bias=self.expert_bias,
            compared=compared,
            backend=self.backend,
        )
        return Routing(experts, weights, logits)

    def _compared(self, logits: torch.Tensor, layout: TokenLayout | None = None) -> torch.Tensor:
        """Values (tokens, experts) of which the largest are chosen, with groups or sinkhorn."""
        if self.num_groups is not None:
            values = scores_of(logits, self.scores)
            if self.expert_bias is not None:
                values = values + self.expert_bias.to(values.dtype)
            return self._best_groups(values, self.num_groups)
        assert self.sinkhorn is not None and layout is not None, "which says where sequences begin"
        return logits + self.sinkhorn.bias(logits, layout)

    def _best_groups(self, values: torch.Tensor, groups: int) -> torch.Tensor:
        """``values`` with -inf outside of each token's best groups."""
        assert self.group_topk is not None, "given with num_groups"
        # (tokens, groups, experts of a group)
        grouped = values.view(-1, groups, self.num_experts // groups)
        worth = grouped.topk(self.group_summed, dim=-1).values.sum(-1)  # (tokens, groups)
        # A stable sort: of equal groups the first, on every device.
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : self.group_topk]
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(values)

    def balance(self, routing: Routing, counted: Counted, kept: torch.Tensor | None = None) -> Balance:
        """Both auxiliary losses without their coefficients; the largest load of an expert as a multiple of the mean,
        the entropy of the scores in nats, and the share of choices that are dropped, these times the tokens' weight and
        without gradient. Under sequence parallelism summed over its ranks, so that all TP ranks hold the same; a part
        of the sum over data-parallel ranks, as the loss is.

        Args:
            routing: of the tokens of this rank.
            counted: what is known of them.
            kept: bool (tokens [/p], k), which of their choices are not dropped; None: all.
        """
        logits, w = routing.logits, counted.weights.to(routing.logits.dtype)
        scores = logits.softmax(-1)
        if self.score_function == "sigmoid":
            scores = logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        # Padding and prompts, which have weight 0, are not counted.
        ones = (counted.weights != 0)[:, None].expand_as(routing.experts).long()
        # Collective, and exact: loads are of all tokens that the data-parallel ranks compute now.
        counts = self._count(routing.experts, ones, self.num_experts, self.token_groups)
        now, seen = _load(counts), counted.seen + counts
        if self.balancing == "seq_aux_loss":
            load = self._load_of_sequences(routing.experts, ones, counted)  # (tokens, experts)
        else:
            # (tokens, experts)
            load = (_load(seen) if self.balancing == "global_aux_loss" else now).expand_as(scores)
        # (tokens,), as all that follows
        z = logits.logsumexp(-1).square()
        entropy = torch.special.entr(scores.detach()).sum(-1)
        dropped = torch.zeros_like(w) if kept is None else (~kept).to(w.dtype).mean(-1)
        sums = ((scores * load.to(scores.dtype)).sum(-1) * w, z * w, now.max() * w, entropy * w, dropped * w)
        # Five sums in one tensor: one reduction, and one number for each layer to pass on.
        found = torch.stack([each.sum().to(logits.dtype) for each in sums]).float()
        if self.shared_by is not None:
            found = reduce_from_group(found, self.shared_by)
        return Balance(found, seen)

    def _load_of_sequences(self, experts: torch.Tensor, ones: torch.Tensor, counted: Counted) -> torch.Tensor:
        """The load in each token's sequence, (tokens, experts). Sequences are cut over context-parallel ranks."""
        assert counted.sequences is not None, "the model gives them with seq_aux_loss"
        # One histogram over (sequence, expert).
        cells = counted.sequences[:, None] * self.num_experts + experts
        size = counted.num_sequences * self.num_experts
        counts = self._count(cells, ones, size, self.sequence_groups).view(-1, self.num_experts)
        return _load(counts).index_select(0, counted.sequences)

    @staticmethod
    def _count(cells: torch.Tensor, ones: torch.Tensor, size: int, groups: tuple[Group, ...]) -> torch.Tensor:
        """How many of all ranks' choices fall into each of ``size`` cells. Integers are added up, so the ranks' order
        does not show."""
        return sum_over(ones.new_zeros(size).scatter_add_(0, cells.flatten(), ones.flatten()), groups)

    @torch.no_grad()
    def update_bias(self, seen: torch.Tensor, apply: torch.Tensor) -> None:
        """Move the expert bias by what a step's tokens of each expert say, int64 (experts,), if ``apply`` (0-dim)."""
        assert self.expert_bias is not None and self.bias_update_rate is not None
        missing = torch.sign(seen.sum() - self.num_experts * seen)  # whole numbers: exact, and the same everywhere
        self.expert_bias += self.bias_update_rate * missing * apply


def _load(counts: torch.Tensor) -> torch.Tensor:
    """Tokens of each expert (..., experts) as multiples of their mean over the experts, fp64."""
    counts = counts.double()
    return counts * counts.shape[-1] / counts.sum(-1, keepdim=True).clamp(min=1)
