"""Finds optimizers with a model's parameters: those built before ``smp.transform``, or that cannot train parts."""

from __future__ import annotations

import gc

import torch
from torch import nn

from smp.config.schema import ConfigError


def refuse_built(model: nn.Module) -> None:
    """Refuse an optimizer that has the parameters which are about to be replaced: it would train nothing, without an
    error.

    Raises:
        ConfigError: with its class.
    """
    if _classes_with(model):
        gc.collect()  # a dropped optimizer lives on in reference cycles
        if kinds := _classes_with(model):
            raise ConfigError(
                f"{kinds[0].__name__} was built with this model's parameters, which transform replaces: build the "
                "optimizer after transform and fully_shard"
            )


def check(model: nn.Module) -> None:
    """Check, in the first forward pass of training, that optimizers of a transformed model can train it. One that is
    not found then (built later, or with the parameters of a model that is one unit of ``fully_shard``, gathered by now)
    fails at its own first step with torch's error about placements.

    Raises:
        ConfigError: for Adafactor and subclasses of it.
    """
    # By name: torch and transformers have one each.
    if any(kind.__name__ == "Adafactor" for found in _classes_with(model) for kind in found.__mro__):
        raise ConfigError(
            "Adafactor divides by means over the rows and columns of whole matrices, of which each rank has a part, "
            "and fails on DTensors, torch's and transformers' alike: train a transformed model with torch.optim.AdamW"
        )


def _classes_with(model: nn.Module) -> list[type]:
    """Classes of living optimizers that have one of the model's parameters."""
    parameters = {id(parameter) for parameter in model.parameters()}
    return [
        type(thing)
        # The garbage collector knows all living objects: a script passes its optimizer nowhere.
        for thing in gc.get_objects()
        # type(), not isinstance(): objects may fake __class__, and proxies would be resolved by it.
        if issubclass(type(thing), torch.optim.Optimizer)
        for group in getattr(thing, "param_groups", ())
        if any(id(parameter) in parameters for parameter in group["params"])
    ]
