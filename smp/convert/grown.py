"""Weights of a model that is a dense one with something added: :mod:`smp.convert.upcycle`,
:mod:`smp.convert.indexers`."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
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


class GrownWeights(Weights, ABC):
    """Base of weights that are partly ``dense``'s.

    Args:
        dense: weights of the model that grows.
        said: the flag that asks for it, for messages.
        added: settings that the model gets.
        source: from a tensor's name that of the dense tensor whose dtype it has.

    Raises:
        ConfigError: the model cannot have these settings.
    """

    def __init__(self, dense: Weights, said: str, added: Mapping[str, Any], source: Callable[[str], str]) -> None:
        # What is None is derived again: it may differ with what is added.
        given = {name: value for name, value in asdict(dense.config).items() if value is not None}
        try:
            self.config = resolved(**{**given, **added})
        except ConfigError as error:
            raise ConfigError(f"{said}: {error}") from None
        self.dense, self.notes = dense, list(dense.notes)
        kinds = {name: tensor.dtype for name, tensor in dense.tensors.items()}
        self.tensors = {p.name: Stored(p.shape, kinds[source(p.name)]) for p in weights_of(self.config)}

    def draw(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out`` with initial weights, keyed by the tensor's name and the region: any rank or file that asks gets
        the same numbers."""
        region = Region(tuple(offsets), tuple(out.shape))
        out.copy_(keyed_normal(_SEED, name, self.tensors[name].shape, region, self.config.init_method_std))

    def close(self) -> None:
        self.dense.close()
