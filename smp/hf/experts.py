"""The experts of Hugging Face's mixture-of-experts models, cut by experts.

transformers gives all these blocks one interface, ``experts(hidden_states, top_k_index, top_k_weights)``, on a module
whose parameters are stacked, (experts, ...). Each rank has some of the experts, and the class's own forward computes
rows of tokens with them:

====================  =============================================================================================
ranks of              what they do
====================  =============================================================================================
expert parallelism    have different tokens: rows travel to the ranks of their experts, and back
tensor parallelism    have the same tokens: each computes what its experts add to them, the sum is all-reduced
====================  =============================================================================================

JetMoE has an interface of its own: ``experts(inputs, expert_size)`` is one matrix of each expert, for rows that are
sorted by expert. Only tensor-parallel ranks have some of these each (:func:`sorted_rows`).

With both, the experts are cut over expert parallelism first. The router stays Hugging Face's and computes on its own
tokens, so a transformed model chooses the experts that it chose before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp.config.command_line.fields import did_you_mean
from smp.config.schema import ConfigError
from smp.hf.planning.rows import SORTED_IN, SORTED_OUT
from smp.layers.moe.dispatch import Dispatch
from smp.parallel.collectives import Group, copy_to_group, reduce_from_group

# transformers' names of the arguments of ``experts(...)``; a module is recognised by them.
_INTERFACE = ["hidden_states", "top_k_index", "top_k_weights"]
_INTERFACES = (_INTERFACE, ["hidden_states", "router_indices", "routing_weights"])  # GPT-OSS has other words for it
_SORTED = ["inputs", "expert_size"]
_BALANCING = (None, "none", "aux_loss")
_ONLY = {"smp_moe": True, "moe_z_loss_coeff": 0.0, "global_token_shuffle": False, "moe_all_to_all_dispatcher": True}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """SMP v2's ``MoEConfig`` for ``transform(config=)``. Its defaults change nothing: the router is Hugging Face's.

    Attributes:
        smp_moe: True: there is one implementation.
        moe_load_balancing: None, as the model's config says; "aux_loss" or "none", Hugging Face's own loss of the
            router or none, over each data rank's tokens. SMP v2's "sinkhorn" and "balanced" choose other experts.
        moe_aux_loss_coeff: of "aux_loss".
        moe_z_loss_coeff: 0: Hugging Face's routers have no such loss.
        global_token_shuffle: False.
        moe_all_to_all_dispatcher: True.
        random_seed, use_cpu_initialization: nothing is drawn here, so they change nothing.

    Raises:
        ConfigError: for what Hugging Face's routers do not do.
    """

    smp_moe: bool = True
    moe_load_balancing: str | None = None
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.0
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    random_seed: int = 12345
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        kind = self.moe_load_balancing
        if kind not in _BALANCING:
            hint = did_you_mean(str(kind), ("none", "aux_loss"))
            raise ConfigError(
                f"MoEConfig(moe_load_balancing={kind!r}): the router stays Hugging Face's: 'none' or 'aux_loss'{hint}"
            )
        for name, only in _ONLY.items():
            if getattr(self, name) != only:
                raise ConfigError(f"MoEConfig({name}={getattr(self, name)!r}): only {only!r} works")


def check_config(model: Any, config: Any) -> None:
    """Check that ``config`` fits ``model``.

    Raises:
        ConfigError: it is no MoEConfig; the model has no experts, or not the loss that is asked for.
    """
    if config is None:
        return
    if not isinstance(config, MoEConfig):
        raise ConfigError(f"transform(config={type(config).__name__}): a smp.MoEConfig, or None")
    if config.moe_load_balancing == "aux_loss" and not hasattr(model, "router_aux_loss_coef"):
        raise ConfigError(f"moe_load_balancing 'aux_loss': {type(model).__name__} has no auxiliary loss")
    kinds = (f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())
    if not any("expert" in kind for kind in kinds):
        raise ConfigError(f"transform(config=MoEConfig(...)): {type(model).__name__} has no experts")


def apply_config(model: Any, config: MoEConfig | None) -> None:
    """Switch the model's own auxiliary loss on or off, if asked for."""
    kind = None if config is None else config.moe_load_balancing
    if config is None or kind is None or not hasattr(model, "router_aux_loss_coef"):
        return
    # Read by the model's forward pass: router logits are returned only for the loss.
    model.config.output_router_logits = kind == "aux_loss"
    model.router_aux_loss_coef = config.moe_aux_loss_coeff


def dense(module: nn.Module) -> bool:
    """Whether each expert computes all rows it is given, already sorted by experts: ``experts(hidden_states)`` (Llama
    4)."""
    return _kind(module) == _INTERFACE[:1]


def are_experts(module: nn.Module, ranks: int) -> bool:
    """Whether ``module`` has the interface and its experts can be divided by ``ranks``."""
    try:
        return not dense(module) and own_experts("", module, ranks, "") > 0
    except ConfigError:
        return False


def _kind(module: nn.Module) -> list[str] | None:
    """The argument names of its forward pass if they are those of experts, else None."""
    # [1:]: without self.
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    found = next((known for known in _INTERFACES if arguments[:3] == known), None)
    return arguments if arguments == _INTERFACE[:1] else found


def own_experts(name: str, module: nn.Module, ranks: int, degrees: str) -> int:
    """How many of the experts of ``module`` each of ``ranks`` gets.

    Raises:
        ConfigError: the module is not as the interface says, or the ranks do not divide its experts.
    """
    total = getattr(module, "num_experts", None)
    # Every parameter must have the experts first: cutting dimension 0 then cuts by experts.
    stacked = [p.shape[:1] == (total,) for p in module.parameters(recurse=False)]
    below = any(True for child in module.children() for _ in child.parameters())
    matrices = any(p.ndim > 2 for p in module.parameters(recurse=False))
    if _kind(module) is None or not isinstance(total, int) or not matrices or not all(stacked) or below:
        raise ConfigError(
            f"{name}: {type(module).__name__} has not the interface experts({', '.join(_INTERFACE)}) with weights of "
            "num_experts stacked"
        )
    if total % ranks:
        raise ConfigError(f"{name}: {total} experts are not divisible by {degrees}")
    return total // ranks


def own_sorted_experts(name: str, module: nn.Module, ranks: int) -> int:
    """How many matrices of ``experts(inputs, expert_size)`` each of ``ranks`` gets.

    Raises:
        ConfigError: the module is not as the interface says, or the ranks do not divide its experts.
    """
    total = getattr(module, "num_experts", None)
    shapes = [tuple(p.shape[:1]) for p in module.parameters()]
    named = list(inspect.signature(type(module).forward).parameters)[1:]
    if named != _SORTED or not isinstance(total, int) or set(shapes) != {(total,)}:
        raise ConfigError(f"{name}: {type(module).__name__} has not the interface experts({', '.join(_SORTED)})")
    if total % ranks:
        raise ConfigError(f"{name}: {total} experts are not divisible by tensor_parallel_degree {ranks}")
    return total // ranks


def sorted_rows(
    compute: Callable[..., torch.Tensor], x: torch.Tensor, counts: list[int], own: int, style: str, tp: Group
) -> torch.Tensor:
    """Rows, sorted by expert, through matrices of experts that are spread over tensor-parallel ranks.

    Args:
        compute: the interface, for this rank's experts.
        x: (rows, in), the same on all ranks; of ``sorted_experts_out`` (rows of this rank's experts, in).
        counts: rows of each expert.
        own: number of experts that this rank has.
        style: one of ``SORTED_EXPERTS``.

    Returns:
        (rows, out), or of ``sorted_experts_in`` (rows of this rank's experts, out).
    """
    first = own * tp.rank
    mine = counts[first : first + own]
    before, number = sum(counts[:first]), sum(mine)
    if style != SORTED_OUT:
        # Each rank gives the gradient of some rows: the copy's backward sums them.
        x = copy_to_group(x, tp).narrow(0, before, number)
    made = compute(x, mine)
    if style == SORTED_IN:
        return made
    # Zeros stand for rows of other ranks' experts.
    return reduce_from_group(F.pad(made, (0, 0, before, sum(counts) - before - number)), tp)


def combined(
    compute: Callable[..., torch.Tensor],
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    own: int,
    tp: Group,
    ep: Group | None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs, experts being spread over all ranks.

    Args:
        compute: the interface, for this rank's experts.
        x: (tokens, hidden).
        chosen: int64 (tokens, k), numbers of experts.
        weights: (tokens, k), of what they make.
        own: number of experts that this rank has.
        tp: ranks with the same tokens.
        ep: ranks with different ones; None: no other rank has any.

    Returns:
        (tokens, hidden).
    """
    # Identity forwards; the backward sums over tp, since each rank computes only its own experts'
    # part of these gradients.
    x, weights = copy_to_group(x, tp), copy_to_group(weights, tp)
    dispatch = Dispatch.of(chosen, own * tp.size * (1 if ep is None else ep.size), ep)
    rows = dispatch.to_experts(x)  # (n, hidden), by experts; those of one place in ep are neighbours over tp
    counts = dispatch.counts.tolist()
    first = own * tp.rank
    # Of the rows of this place in ep only those of this tp rank's experts are computed here.
    before, number = sum(counts[:first]), sum(counts[first : first + own])
    # Number of each row's expert on this rank, 0 .. own - 1.
    kinds = torch.arange(own, device=x.device).repeat_interleave(dispatch.counts[first : first + own])
    made = _computed(compute, rows.narrow(0, before, number), kinds)
    # Zero rows for the others, so that the sum over tp is complete: each row is computed by one
    # rank.
    made = F.pad(made, (0, 0, before, len(rows) - before - number))
    # Weights in fp32: the k products of a token are summed in it.
    return reduce_from_group(dispatch.from_experts(made, weights.float()), tp).to(x.dtype)


def _computed(compute: Callable[..., torch.Tensor], rows: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Rows (n, hidden) through this rank's experts; ``kinds`` (n,) are numbers of experts."""
    # Of no row at all a gradient is zero, not none: ranks must agree on what they reduce.
    missing = 0 if len(rows) else 1
    rows, kinds = F.pad(rows, (0, 0, 0, missing)), F.pad(kinds, (0, missing))
    # One expert with weight 1 for each row: routing weights are applied after the rows have
    # travelled back.
    made = compute(rows, kinds[:, None], rows.new_ones(len(rows), 1))
    return made[: len(rows) - missing]


# Identity whose gradient is multiplied by a factor.
class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def averaged(part: torch.Tensor, ep: Group | None) -> torch.Tensor:
    """A parameter of experts whose gradient is averaged over ``ep``: rows came from all of its ranks, and FSDP averages
    only over the other data ranks."""
    return part if ep is None else _Scaled.apply(part, 1 / ep.size)
