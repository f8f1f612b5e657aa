"""Whether first values that are drawn one by one have the distributions of a model that is built on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch

from smp.hf.loading.first_values import FirstValues
from tests.hf.families import pattern

SEEDS, MOST_SEEDS, ENOUGH = 6, 60, 400
"""Of models that are compared, more where a parameter has so few numbers in one (decays of a head) that their
distribution would not show: 400 numbers see one that is 0.18 away."""


def beyond_chance(model_class: Any, config: Any) -> list[str]:
    """Names of parameters, one of each kind, whose numbers are further from those of ``model_class(config)`` than
    chance allows: 2.6 instead of 1.6 for five in a hundred, so none of hundreds is by chance.

    Raises:
        ConfigError: a parameter cannot be drawn.
    """
    with torch.device("meta"):
        values = FirstValues(model_class(copy.deepcopy(config)))
    built = [_built(model_class, config, seed) for seed in range(SEEDS)]
    kinds: dict[str, list[str]] = {}
    for name in built[0]:
        kinds.setdefault(pattern(name), []).append(name)
    found = []
    for names in kinds.values():
        seeds = _seeds_for(names, built)
        built += [_built(model_class, config, seed) for seed in range(len(built), seeds)]
        wanted = torch.cat([model[name].float().flatten() for model in built[:seeds] for name in names])
        drawn = torch.cat([values.draw(name, seed).float().flatten() for seed in range(seeds) for name in names])
        if distance(drawn, wanted) > bound(len(wanted)):
            found.append(names[-1])
    return found


def bound(numbers: int) -> float:
    """Of the distance of two sets of so many numbers each."""
    return float(2.6 * (2 / numbers) ** 0.5)


def _seeds_for(names: list[str], built: list[dict[str, torch.Tensor]]) -> int:
    """How many models give enough numbers of one kind of parameter, where it is drawn at all."""
    if all(torch.equal(built[0][name], built[1][name]) for name in names):
        return SEEDS
    each = sum(built[0][name].numel() for name in names)
    return min(MOST_SEEDS, max(SEEDS, -(-ENOUGH // each)))


def _built(model_class: Any, config: Any, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: p.detach() for name, p in model_class(copy.deepcopy(config)).named_parameters()}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two distributions (Kolmogorov and Smirnov)."""
    one, other = one.sort().values, other.sort().values
    every = torch.cat((one, other)).sort().values
    shares = [torch.searchsorted(x, every, right=True) / len(x) for x in (one, other)]
    return float((shares[0] - shares[1]).abs().max())
