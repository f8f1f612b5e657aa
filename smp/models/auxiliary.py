"""What a model measures besides its loss: auxiliary losses of routers and of multi-token prediction, and metrics."""

from __future__ import annotations

from typing import Any

import torch

from smp.config import ModelConfig
from smp.config.layer_pattern import with_experts
from smp.config.rules.moe import aux_losses
from smp.config.rules.mtp import MTP_LOSS, mtp_layers

EXPERT_LOAD = "expert load max/mean"
"""Tokens of the expert of a layer that has most, relative to the mean of its experts; the mean over layers."""
ROUTER_ENTROPY = "router entropy"
"""Entropy of the scores of a token's experts in nats, at most ln(experts); the mean over tokens and layers."""
DROPPED = "dropped share"
"""Share of the choices of experts that did not fit; the mean over tokens and layers."""


def auxiliary_names(config: ModelConfig) -> tuple[str, ...]:
    """What a model measures besides its loss in training: auxiliary losses and metrics of :class:`ModelOutput`, each a
    part of a mean over the global batch."""
    mtp = () if config.mtp_num_layers is None else (MTP_LOSS,)
    if config.num_experts is None:
        return mtp
    dropped = () if config.moe_expert_capacity_factor is None else (DROPPED,)
    return (*mtp, *aux_losses(config), EXPERT_LOAD, ROUTER_ENTROPY, *dropped)


def auxiliary_outputs(
    config: ModelConfig, balance: list[torch.Tensor], mtp: torch.Tensor | None = None
) -> dict[str, Any]:
    """Auxiliary losses and metrics of some layers' routers, and the loss of multi-token prediction, as a part of
    :class:`ModelOutput`."""
    ahead = {} if mtp is None else {MTP_LOSS: mtp}
    if not balance:
        return {"aux_losses": ahead} if ahead else {}
    # Summed over layers before anything else: few numbers leave the model. In fp64: which layers share a sum is a
    # matter of the layout, and what is logged, fp32 again, must not be.
    total, coefficients = torch.stack(balance).double().sum(0), aux_losses(config)
    kinds = ("load balancing loss", "z loss")
    losses = {name: coefficients[name] * total[i] for i, name in enumerate(kinds) if name in coefficients}
    experts = with_experts(config)
    layers = sum(experts) + experts[-1] * len(mtp_layers(config))  # which are as the last one
    # Metrics keep no graph.
    means = total.detach() / layers
    metrics = {EXPERT_LOAD: means[2], ROUTER_ENTROPY: means[3]}
    if config.moe_expert_capacity_factor is not None:
        metrics[DROPPED] = means[4]
    return {"aux_losses": ahead | losses, "metrics": metrics}
