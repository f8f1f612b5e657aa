"""Layouts with context parallelism: every exchange on 2, 3 and 4 parts of the sequences, beside every other way to
split, for every kind of attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from smp.pipeline.schedules import SCHEDULES
from tests.parity.cases import MAX_WORLD, Case, Problem, Spread, cover

_Values = dict[str, Any]
_Pair = tuple[tuple[str, Any], ...]

_BESIDE: dict[str, _Values] = {
    "alone": {},
    "tp": {"tp": 2, "sp": True},
    "shard": {"shard": 2},
    "replicate": {"replicate": 2},
    **{name: {"pp": 2, "schedule": name, "accumulation": 4} for name in SCHEDULES},
}
_PROBLEMS: dict[str, _Values] = {
    "grouped": {"style": "llama", "groups": 2, "unequal": True, "clip": True},
    "one key head": {"style": "llama", "groups": 1},
    "window": {"style": "llama", "extra": "window", "unequal": True},
    "documents": {"style": "llama", "groups": 2, "packed": True, "unequal": True},
    "documents and window": {"style": "gpt2", "packed": True, "extra": "window"},
    "qk-norm": {"style": "llama", "extra": "qknorm", "clip": True},
    "dropout": {"style": "gpt2", "dropout": True},
    "documents and dropout": {"style": "llama", "packed": True, "dropout": True},
    "tied": {"style": "gpt2", "tied": True, "clip": True, "groups": 2},
}
"""``groups`` is the number of key/value heads; by default each query head has its own."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "cp": (2, 3, 4),
    "exchange": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "beside": tuple(_BESIDE),
    "problem": tuple(_PROBLEMS),
    "recompute": ("none", "selective", "full"),
}
LENGTH = 24
"""Divisible by twice 2, 3 and 4."""


def fits(values: _Values) -> bool:
    """Whether a (partial) choice of values is a layout: at most 8 ranks, and two by two of them for both exchanges."""
    size = 1
    for degree in ("tp", "shard", "replicate", "pp"):
        size *= _BESIDE[values.get("beside", "alone")].get(degree, 1)
    both = values.get("exchange") == "a2a+p2p"
    return size * values.get("cp", 4 if both else 2) <= MAX_WORLD and not (both and values.get("cp", 4) != 4)


def context_case(values: _Values, **more: Any) -> Case:
    """The case with these values of factors; ``more`` are fields of its layout."""
    problem, beside = dict(_PROBLEMS[values["problem"]]), _BESIDE[values["beside"]]
    spread = Spread(
        cp=values["cp"], exchange=values["exchange"], recompute=values.get("recompute", "none"), **beside, **more
    )
    heads = 6 if spread.cp == 3 else 8 if spread.cp * spread.tp == 8 else 4
    made = Problem(
        heads=heads,
        kv_heads=problem.pop("groups", heads),
        length=LENGTH,
        steps=4,
        layers=3 if spread.pp > 1 else 2,
        micro_batch=1 if spread.pp > 1 else 2,
        micro_batches=spread.data_parallel * spread.accumulation,
        **problem,
    )
    if spread.schedule in ("interleaved", "zb-v"):
        made = replace(made, layers=4)
    return Case(made, spread)


def pairs_of(values: _Values) -> set[_Pair]:
    """The pairs that a choice of values covers."""
    return set(itertools.combinations([(name, values[name]) for name in FACTORS], 2))


def all_values() -> list[_Values]:
    """Every layout."""
    chosen = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [values for values in chosen if fits(values)]


def pairwise_values() -> list[_Values]:
    """A small set in which every pair occurs that some layout has."""
    return cover(all_values(), pairs_of, context_case, seed=3)


def pairwise_cases() -> list[Case]:
    """Of :func:`pairwise_values`."""
    return [context_case(values) for values in pairwise_values()]


def _row(cp: int, exchange: str, problem: str, beside: str = "alone", recompute: str = "none", **more: Any) -> Case:
    values = {"cp": cp, "exchange": exchange, "problem": problem, "beside": beside, "recompute": recompute}
    return context_case(values, **more)


def fast_cases() -> list[Case]:
    """A few that meet every exchange, every kind of split and every kind of attention."""
    return [
        _row(2, "p2p", "grouped", "tp"),
        _row(2, "all_gather", "documents", "1f1b"),
        _row(4, "a2a", "one key head", "alone", "full"),
        _row(4, "a2a+p2p", "documents and window", "alone", "selective"),
        _row(2, "p2p", "documents and dropout", "shard"),
        _row(3, "p2p", "window", "alone"),
        _row(2, "all_gather", "qk-norm", "zb-v", "full"),
        _row(2, "a2a", "tied", "replicate"),
        _row(2, "p2p", "tied", "zb-h1", "selective"),
    ]


def bf16_cases() -> list[Case]:
    """In bf16."""
    return [
        _row(2, "p2p", "grouped", "tp", bf16=True),
        _row(2, "all_gather", "documents", "shard", bf16=True),
        _row(4, "a2a", "qk-norm", "alone", "full", bf16=True),
        _row(4, "a2a+p2p", "window", "alone", bf16=True),
        _row(3, "p2p", "tied", "1f1b", bf16=True),
    ]


def compiled_cases() -> list[Case]:
    """Under ``--compile``."""
    return [
        _row(2, "p2p", "grouped", "tp", compile=True),
        _row(2, "all_gather", "qk-norm", "alone", "selective", compile=True),
        _row(2, "a2a", "documents", "tp", compile=True),
        _row(2, "a2a", "window", "1f1b", compile=True),
        _row(4, "a2a+p2p", "tied", "alone", "full", compile=True),
    ]


def sabotaged_cases() -> list[tuple[Case, str]]:
    """Bugs that context parallelism has had elsewhere, and the kind of error that must show them."""
    chosen = [("count_all_parts", "loss", "grouped"), ("local_positions", "loss", "grouped")]
    return [(replace(_row(2, "p2p", problem), sabotage=bug), error) for bug, error, problem in chosen]
