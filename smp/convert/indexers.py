"""A model with latent attention and newly initialized indexers of DeepSeek's sparse attention.

That is where the dense warm-up begins (--dsa-indexer-warmup), which trains nothing else. Weights are drawn as a new
model's are, norms begin at 1.
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

_SEED = 1234  # any number will do


class Indexed(Weights):
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
        # None: default again, as derived settings may differ.
        given = {name: value for name, value in asdict(dense.config).items() if value is not None}
        rotated = dense.config.qk_pos_emb_head_dim
        chooses = {"experimental_attention_variant": "dsa", "dsa_indexer_topk": topk}
        # As wide as the rotated part at least, which the indexer rotates as well.
        chooses |= {"dsa_indexer_head_dim": max(128, rotated)}
        try:
            self.config = resolved(**{**given, **chooses})
        except ConfigError as error:
            raise ConfigError(f"{said}: {error}") from None
        self._dense, self.notes = dense, list(dense.notes)
        kinds = {name: tensor.dtype for name, tensor in dense.tensors.items()}
        self.tensors = {p.name: Stored(p.shape, kinds[_like(p.name)]) for p in weights_of(self.config)}

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if ".indexer." not in name:
            self._dense.read_into(name, offsets, out)
        elif ".key_norm." in name:
            out.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            # By the name of the tensor and its region: any rank or file that asks gets the same numbers.
            region = Region(tuple(offsets), tuple(out.shape))
            out.copy_(keyed_normal(_SEED, name, self.tensors[name].shape, region, self.config.init_method_std))

    def fingerprint(self) -> Any:
        return [self._dense.fingerprint(), "indexers", self.config.dsa_indexer_topk]

    def close(self) -> None:
        self._dense.close()


def _like(name: str) -> str:
    """The tensor from which a tensor takes its dtype."""
    before, found, _ = name.partition("indexer.")
    return f"{before}query_down.weight" if found else name
