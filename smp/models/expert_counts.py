"""How many tokens each expert got in a step, counted over its micro-batches: balances over the global batch, and the
bias of experts, need all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from smp.config.layer_specs import ExpertsSpec, LayerSpec
from smp.layers.block import TransformerBlock
from smp.layers.moe import Counted, MoE
from smp.layers.moe.router import Balance
from smp.models.tokens import Tokens


class ExpertCounts:
    """The counts of one model on one rank.

    Args:
        specs: of its layers; all layers with experts have the same number of them.
    """

    def __init__(self, specs: tuple[LayerSpec, ...]) -> None:
        self.spec = next((s.feed_forward for s in specs if isinstance(s.feed_forward, ExpertsSpec)), None)
        self.seen: dict[int, torch.Tensor] = {}  # by layer, tokens of each expert in this step so far

    def of(self, tokens: Tokens, weights: torch.Tensor) -> Counted | None:
        """The routers' input for measuring balance, from loss weights (batch, length); padding does not count."""
        if self.spec is None:
            return None
        # For layers that have counted nothing in this step yet, see :meth:`before`.
        seen = torch.zeros(self.spec.count, dtype=torch.int64, device=weights.device)
        counted = Counted(tokens.own(weights), seen)
        if self.spec.balancing != "seq_aux_loss":
            return counted
        # Which sequence each token belongs to: that balance is within sequences.
        rows = torch.arange(len(weights), device=weights.device)[:, None].expand_as(weights)
        return counted._replace(sequences=tokens.own(rows), num_sequences=len(weights))

    def before(self, layer: int, counted: Counted | None) -> Counted | None:
        """``counted`` with the tokens that each of the layer's experts got in this step so far."""
        # An argument of the block and not a state of its router: recompute calls the block with the
        # same arguments, and gets the same balance.
        return None if counted is None else counted._replace(seen=self.seen.get(layer, counted.seen))

    def after(self, layer: int, measured: Balance | None) -> list[torch.Tensor]:
        """Store the counts of a layer; returns the measures of its router."""
        if measured is None:
            return []
        self.seen[layer] = measured.seen
        return [measured.measures]

    def end_step(self, layers: Mapping[str, Any], applied: torch.Tensor) -> None:
        """Update the experts' biases from the counts, unless the step was skipped, and reset the counts."""
        # Once for a step, over all its micro-batches, as an optimizer moves weights.
        for layer, seen in self.seen.items():
            mlp = cast(TransformerBlock, layers[str(layer)]).mlp
            assert isinstance(mlp, MoE), "only they count"
            router = mlp.router
            # A frozen router keeps its bias too: adapters leave the base model as it is.
            if router.expert_bias is not None and router.weight.requires_grad:
                router.update_bias(seen, applied)
        self.seen.clear()
