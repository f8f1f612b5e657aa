"""Layouts in FP8: every recipe beside every way to split, for dense and gated models and for experts.

The model is in fp64 but for its 8-bit products, so that no layout rounds a number to another one of 8 bits.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from tests.parity.cases import Case, Problem, Spread, cover

_Values = dict[str, Any]
_Pair = tuple[tuple[str, Any], ...]

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
IN_BLOCKS = ("blockwise", "mxfp8", "nvfp4")
_BESIDE: dict[str, _Values] = {
    "tp": {"tp": 2},
    "tp and sp": {"tp": 2, "sp": True},
    "shard": {"shard": 2},
    "replicate": {"replicate": 2},
    "hybrid": {"shard": 2, "replicate": 2},
    "accumulation": {"accumulation": 4},
    "p2p": {"cp": 2, "exchange": "p2p"},
    "a2a": {"cp": 2, "exchange": "a2a"},
    "1f1b": {"pp": 2, "schedule": "1f1b", "accumulation": 4},
    "zb-h1": {"pp": 2, "schedule": "zb-h1", "accumulation": 4},
    "zb-v": {"pp": 2, "schedule": "zb-v", "accumulation": 4},
    "zb-h1, tp and sp": {"pp": 2, "schedule": "zb-h1", "accumulation": 4, "tp": 2, "sp": True},
    "shard, tp and sp": {"shard": 2, "tp": 2, "sp": True, "accumulation": 2},
    "experts of two ranks": {"shard": 2, "ep": 2},
    "experts of two ranks, tp and sp": {"shard": 2, "ep": 2, "tp": 2, "sp": True},
}
_PROBLEMS: dict[str, _Values] = {
    "gated": {"style": "llama", "unequal": True, "clip": True},
    "grouped": {"style": "llama", "kv_heads": 2, "extra": "qknorm"},
    "plain": {"style": "gpt2", "tied": True},
    "dropout": {"style": "gpt2", "dropout": True, "unequal": True},
    "experts": {"style": "llama", "experts": "mixtral", "unequal": True},
    "shared experts": {"style": "llama", "experts": "qwen2", "kv_heads": 2},
}
_LATENT: _Values = {"style": "llama", "experts": "latent", "clip": True}
"""Latent attention, with experts in the first layer and without in the second."""
FACTORS: dict[str, tuple[Any, ...]] = {
    "recipe": RECIPES,
    "beside": tuple(_BESIDE),
    "recompute": ("none", "selective", "full"),
    "problem": tuple(_PROBLEMS),
}


def fp8_case(values: _Values, **more: Any) -> Case:
    """The case with these values of factors; ``more`` are fields of its layout."""
    spread = Spread(recompute=values.get("recompute", "none"), **{**_BESIDE[values["beside"]], **more})
    blocks = values["recipe"] in IN_BLOCKS
    chosen = dict((_PROBLEMS | {"latent": _LATENT})[values.get("problem", "gated")])
    made = Problem(
        fp8=values["recipe"],
        steps=3,
        heads=4,
        kv_heads=2 if blocks else chosen.pop("kv_heads", 4),
        length=(256 if spread.cp > 1 else 128) * spread.cp if blocks else 16,
        layers=4 if spread.schedule == "zb-v" else 2,
        micro_batch=1 if blocks or spread.pp > 1 else 2,
        micro_batches=spread.data_parallel * spread.accumulation,
        **{name: value for name, value in chosen.items() if name != "kv_heads"},
    )
    return Case(made, spread)


def pairs_of(values: _Values) -> set[_Pair]:
    """The pairs that a choice of values covers."""
    return set(itertools.combinations([(name, values[name]) for name in FACTORS], 2))


def fits(values: _Values) -> bool:
    """Whether a choice of values is a run: an expert has no blocks of 128 tokens, and only experts are spread."""
    if "experts" in values["problem"]:
        return values["recipe"] not in IN_BLOCKS
    return "ep" not in _BESIDE[values["beside"]]


def all_values() -> list[_Values]:
    """Every layout."""
    chosen = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [values for values in chosen if fits(values)]


def pairwise_values() -> list[_Values]:
    """A small set in which every pair occurs that some layout has."""
    return cover(all_values(), pairs_of, fp8_case, seed=3)


def pairwise_cases() -> list[Case]:
    """Of :func:`pairwise_values`."""
    return [fp8_case(values) for values in pairwise_values()]


def _row(recipe: str, beside: str, recompute: str = "none", problem: str = "gated", **more: Any) -> Case:
    values = {"recipe": recipe, "beside": beside, "recompute": recompute, "problem": problem}
    return fp8_case(values, **more)


def fast_cases() -> list[Case]:
    """A few on two ranks that meet every recipe, every kind of split and every kind of recompute."""
    return [
        _row("delayed", "tp and sp", "full"),
        _row("tensorwise", "tp and sp", "selective", "grouped"),
        _row("rowwise", "tp and sp"),
        _row("rowwise", "tp", "selective", "plain"),
        _row("delayed", "zb-h1", "none", "plain"),
        _row("tensorwise", "shard", "full", "dropout"),
        _row("rowwise", "a2a"),
        _row("tensorwise", "1f1b"),
        _row("delayed", "replicate", "none", "grouped"),
        _row("blockwise", "tp and sp", "selective"),
        _row("mxfp8", "tp and sp", "full"),
        _row("nvfp4", "tp and sp", "selective"),
        _row("delayed", "p2p"),
        _row("tensorwise", "experts of two ranks", "full", "experts"),
        _row("delayed", "experts of two ranks", "selective", "shared experts"),
        _row("rowwise", "tp and sp", "none", "shared experts"),
        _row("delayed", "tp and sp", "full", "experts", etp=1, ep=2),
        _row("delayed", "tp and sp", "none", "shared experts", etp=1),
        _row("tensorwise", "tp and sp", "full", "latent"),
        _row("rowwise", "tp and sp", "selective", "latent"),
        _row("delayed", "tp", "none", "latent"),
        *gathering_cases(),
    ]


def gathering_cases() -> list[Case]:
    """Weights that are gathered as 8-bit numbers."""
    return [
        _row("delayed", "shard", "none", "plain", fp8_gather=True),
        _row("tensorwise", "shard", "full", fp8_gather=True),
        _row("tensorwise", "experts of two ranks", "none", "experts", fp8_gather=True),
        _row("delayed", "experts of two ranks", "none", "experts", fp8_gather=True),
    ]


def compiled_cases() -> list[Case]:
    """Under ``--compile``."""
    return [
        _row("delayed", "tp and sp", compile=True),
        _row("tensorwise", "shard", "full", compile=True, fp8_gather=True),
        _row("rowwise", "tp", "selective", "plain", compile=True),
        _row("blockwise", "tp and sp", compile=True),
        _row("delayed", "experts of two ranks", "none", "experts", compile=True),
        _row("tensorwise", "tp and sp", "full", "shared experts", compile=True),
        _row("rowwise", "experts of two ranks", "selective", "experts", compile=True),
    ]


def sabotaged_cases() -> list[Case]:
    """Wrong scales: of a part of the tensor, of another rank, stale."""
    chosen = [
        ("own_maximum", _row("tensorwise", "tp and sp")),
        ("first_maximum", _row("tensorwise", "shard")),
        ("first_maximum", _row("rowwise", "tp")),
        ("first_maximum", _row("tensorwise", "experts of two ranks", problem="experts")),
        ("stale_scale", _row("tensorwise", "tp")),
        ("own_history", _row("delayed", "tp and sp")),
    ]
    stale = _row("delayed", "tp", "full")
    longer = replace(stale, problem=replace(stale.problem, steps=6))  # for maxima to grow
    return [replace(case, sabotage=bug) for bug, case in [*chosen, ("stale_history", longer)]]
