"""A model's outputs in addition to its loss: auxiliary losses of routers and of multi-token prediction, and
metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from smp.config import ModelConfig
from smp.config.layer_pattern import attends, with_experts
from smp.config.rules.dsa import INDEXER_LOSS, indexer_coefficient
from smp.config.rules.moe import aux_losses
from smp.config.rules.mtp import MTP_LOSS, mtp_layers

EXPERT_LOAD = "expert load max/mean"
"""Largest number of tokens of an expert of a layer / the mean over its experts; the mean over layers."""
ROUTER_ENTROPY = "router entropy"
"""Entropy of the scores of a token's experts in nats, at most ln(experts); the mean over tokens and layers."""
DROPPED = "dropped share"
"""Share of the choices of experts that a capacity drops; the mean over tokens and layers."""
INDEXER_KL = "indexer KL"
"""Divergence of an indexer's scores from attention's probabilities, in nats; the mean over tokens and layers."""


@dataclass
class Found:
    """Measurements of the layers in a forward pass.

    Attributes:
        balance: of each layer with experts, fp32 (5,), see :class:`~smp.layers.moe.router.Balance`.
        indexers: of each layer with an indexer its loss, 0-dim.
    """

    balance: list[torch.Tensor] = field(default_factory=list)
    indexers: list[torch.Tensor] = field(default_factory=list)


def auxiliary_names(config: ModelConfig, *, adapters: bool = False) -> tuple[str, ...]:
    """Names of the auxiliary losses and metrics of :class:`ModelOutput` in training, each a part of a mean over the
    global batch. With ``adapters`` indexers are frozen, and measure nothing."""
    names: tuple[str, ...] = () if config.mtp_num_layers is None else (MTP_LOSS,)
    names += (INDEXER_LOSS, INDEXER_KL) if indexer_coefficient(config) and not adapters else ()
    if config.num_experts is None:
        return names
    dropped = () if config.moe_expert_capacity_factor is None else (DROPPED,)
    return (*names, *aux_losses(config), EXPERT_LOAD, ROUTER_ENTROPY, *dropped)


def auxiliary_outputs(config: ModelConfig, found: Found, mtp: torch.Tensor | None = None) -> dict[str, Any]:
    """Auxiliary losses and metrics of some layers' routers and indexers, and the loss of multi-token prediction, as a
    part of :class:`ModelOutput`."""
    losses = {} if mtp is None else {MTP_LOSS: mtp}
    metrics: dict[str, torch.Tensor] = {}
    # Summed over layers before anything else: few numbers leave the model. In fp64: which layers share a sum is a
    # matter of the layout, and what is logged, fp32 again, must not be.
    if found.indexers:
        total = torch.stack(found.indexers).double().sum()
        losses[INDEXER_LOSS] = indexer_coefficient(config) * total
        # Layers of multi-token prediction have an indexer as well.
        metrics[INDEXER_KL] = total.detach() / (sum(attends(config)) + len(mtp_layers(config)))
    if found.balance:
        total, coefficients = torch.stack(found.balance).double().sum(0), aux_losses(config)
        # In the order of ``Balance.measures``.
        kinds = ("load balancing loss", "z loss")
        losses |= {name: coefficients[name] * total[i] for i, name in enumerate(kinds) if name in coefficients}
        experts = with_experts(config)
        layers = sum(experts) + experts[-1] * len(mtp_layers(config))  # which are as the last one
        # Metrics keep no graph.
        means = total.detach() / layers
        metrics |= {EXPERT_LOAD: means[2], ROUTER_ENTROPY: means[3]}
        if config.moe_expert_capacity_factor is not None:
            metrics[DROPPED] = means[4]
    return {key: value for key, value in (("aux_losses", losses), ("metrics", metrics)) if value}
