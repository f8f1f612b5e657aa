"""A dense model's weights as those of a mixture of experts that computes the same (sparse upcycling, arXiv 2212.05055).

Every expert is a copy of the dense MLP. The weights of a token's experts sum to 1, whatever the router says, so the
model computes what the dense one does. Its routers' first weights are drawn, so experts get different tokens and part
from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from smp.config import ConfigError
from smp.convert.huggingface.config import resolved
from smp.convert.store import Stored
from smp.convert.weights import Weights
from smp.models.inventory import weights_of
from smp.parallel.region import Region
from smp.parallel.rng import keyed_normal

_SEED = 1234  # of the routers; any number will do


class Upcycled(Weights):
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
        given = {name: value for name, value in asdict(dense.config).items() if value is not None}
        # The experts are as wide as the dense MLP, which they copy.
        experts = {"num_experts": num_experts, "moe_router_topk": topk, "moe_ffn_hidden_size": given["ffn_hidden_size"]}
        try:
            self.config = resolved(**{**given, **experts})
        except ConfigError as error:
            raise ConfigError(f"--upcycle {num_experts}: {error}") from None
        self._dense, self.notes = dense, list(dense.notes)
        kinds = {name: tensor.dtype for name, tensor in dense.tensors.items()}
        self.tensors = {p.name: Stored(p.shape, kinds[_source(p.name)]) for p in weights_of(self.config)}

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if name.endswith(".router.weight"):
            region = Region(tuple(offsets), tuple(out.shape))
            # By the name of the router and its region: any rank or file that asks gets the same numbers.
            out.copy_(keyed_normal(_SEED, name, self.tensors[name].shape, region, self.config.init_method_std))
        elif name.endswith(".router.bias"):
            out.zero_()
        elif ".experts." in name:
            self._dense.read_into(_source(name), offsets[1:], out[0])
            # Read once, and copied to the other experts.
            out[1:] = out[0]
        else:
            self._dense.read_into(name, offsets, out)

    def fingerprint(self) -> Any:
        return [self._dense.fingerprint(), self.config.num_experts, self.config.moe_router_topk]

    def close(self) -> None:
        self._dense.close()


def _source(name: str) -> str:
    """The dense tensor that a tensor is copied from, or whose dtype a router takes."""
    return name.replace(".mlp.experts.", ".mlp.").replace(".mlp.router.", ".mlp.up.")
