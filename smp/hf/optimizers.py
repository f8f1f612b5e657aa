"""Optimizers of the process that have a model's parameters: built before ``smp.transform``, or unable to take parts."""

from __future__ import annotations

import gc

import torch
from torch import nn

from smp.config.schema import ConfigError


def refuse_built(model: nn.Module) -> None:
    """An optimizer that has the parameters which are about to be replaced would train nothing, and say nothing.

    Raises:
        ConfigError: with its class.
    """
    if _classes_with(model):
        gc.collect()  # a dropped optimizer lives on in reference cycles
        if kinds := _classes_with(model):
            raise ConfigError(
                f"{kinds[0]} was built with this model's parameters, which transform replaces: build the optimizer "
                "after transform and fully_shard"
            )


def check(model: nn.Module) -> None:
    """Those of a transformed model, at its first step of training, can train it.

    Raises:
        ConfigError: for Adafactor.
    """
    if "Adafactor" in _classes_with(model):
        raise ConfigError(
            "Adafactor divides by means over the rows and columns of whole matrices, of which each rank has a part, "
            "and fails on DTensors, torch's and transformers' alike: train a transformed model with torch.optim.AdamW"
        )


def _classes_with(model: nn.Module) -> list[str]:
    """The classes of living optimizers that have one of its parameters."""
    parameters = {id(parameter) for parameter in model.parameters()}
    return [
        type(thing).__name__
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.optim.Optimizer)
        for group in getattr(thing, "param_groups", ())
        if any(id(parameter) in parameters for parameter in group["params"])
    ]
