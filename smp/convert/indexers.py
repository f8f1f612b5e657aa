"""A model with latent attention and newly initialized indexers of DeepSeek's sparse attention.

That is where the dense warm-up begins (--dsa-indexer-warmup), which trains nothing else. Weights are drawn as a new
model's are, norms begin at 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smp.config import ConfigError
from smp.convert.grown import GrownWeights
from smp.convert.weights import Weights


class Indexed(GrownWeights):
    """``dense`` with an indexer in each layer.

    Args:
        dense: weights of a model with latent attention.
        topk: keys that a token is to see.

    Raises:
        ConfigError: the model has no latent attention with a latent of queries, or has indexers.
    """

    def __init__(self, dense: Weights, topk: int) -> None:
        said = f"--add-indexers {topk}"
        if dense.config.experimental_attention_variant is not None:
            raise ConfigError(f"{said}: the model has indexers already")
        if not dense.config.multi_latent_attention:
            raise ConfigError(f"{said}: the model has no latent attention (DeepSeek-V2, V3), beside which indexers are")
        chooses = {"experimental_attention_variant": "dsa", "dsa_indexer_topk": topk}
        # As wide as the rotated part at least, which the indexer rotates as well.
        chooses |= {"dsa_indexer_head_dim": max(128, dense.config.qk_pos_emb_head_dim)}
        super().__init__(dense, said, chooses, _like)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if ".indexer." not in name:
            self.dense.read_into(name, offsets, out)
        elif ".key_norm." in name:
            out.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            self.draw(name, offsets, out)

    def fingerprint(self) -> Any:
        return [self.dense.fingerprint(), "indexers", self.config.dsa_indexer_topk]


def _like(name: str) -> str:
    """The tensor from which a tensor takes its dtype."""
    before, found, _ = name.partition("indexer.")
    return f"{before}query_down.weight" if found else name
