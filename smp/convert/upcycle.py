"""A dense model's weights as those of a mixture of experts that computes the same (sparse upcycling, arXiv 2212.05055).

Every expert is a copy of the dense MLP. The weights of a token's experts sum to 1, whatever the router says, so the
model computes what the dense one does. Its routers' first weights are drawn, so experts get different tokens and part
from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smp.config import ConfigError
from smp.convert.grown import GrownWeights
from smp.convert.weights import Weights


class Upcycled(GrownWeights):
    """``dense`` with copies of each MLP as experts.

    Args:
        dense: weights of a model without experts.
        num_experts, topk: experts of a layer, and of a token.

    Raises:
        ConfigError: the model has experts already, or MLPs that experts cannot be.
    """

    def __init__(self, dense: Weights, num_experts: int, topk: int) -> None:
        if dense.config.num_experts is not None:
            raise ConfigError(f"--upcycle {num_experts}: the model has {dense.config.num_experts} experts already")
        # The experts are as wide as the dense MLP, which they copy.
        width = dense.config.ffn_hidden_size
        experts = {"num_experts": num_experts, "moe_router_topk": topk, "moe_ffn_hidden_size": width}
        super().__init__(dense, f"--upcycle {num_experts}", experts, _source)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if name.endswith(".router.weight"):
            self.draw(name, offsets, out)
        elif name.endswith(".router.bias"):
            out.zero_()
        elif ".experts." in name:
            self.dense.read_into(_source(name), offsets[1:], out[0])
            # Read once, and copied to the other experts.
            out[1:] = out[0]
        else:
            self.dense.read_into(name, offsets, out)

    def fingerprint(self) -> Any:
        return [self.dense.fingerprint(), self.config.num_experts, self.config.moe_router_topk]


def _source(name: str) -> str:
    """The dense tensor that a tensor is copied from, or whose dtype a router takes."""
    return name.replace(".mlp.experts.", ".mlp.").replace(".mlp.router.", ".mlp.up.")
