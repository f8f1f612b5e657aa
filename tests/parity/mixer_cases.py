"""Every kind of mixer in every layout, ten steps each: the product that docs/hybrids.md promises. Few cells are in the
fast suite, with two steps (:mod:`tests.parity.family_cases`)."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import Case, Problem, Spread

MIXERS: dict[str, dict[str, Any]] = {
    **{"hybrid": {}, "olmo hybrid": {"kv_heads": 4}, "kimi": {"kv_heads": 4}, "mamba": {}, "falcon h1": {}},
    # Without clipping nemotron's tenth step is one rank's rounding, 1.4e-5 from fp64.
    **{"nemotron": {"layers": 4, "clip": True}, "dsa": {}},
}
"""Problems, by the name of the architecture."""
EXPERTS: dict[str, dict[str, Any]] = {
    **{"hybrid": {"experts": "qwen2"}, "olmo hybrid": {"experts": "qwen2"}, "kimi": {"experts": "sigmoid"}},
    **{"mamba": {"experts": "qwen2"}, "falcon h1": {"extra": "falcon h1 experts", "experts": "qwen2"}},
    **{"nemotron": {"extra": "nemotron experts", "experts": "squared relu"}, "dsa": {"experts": "deepseek"}},
}
"""What is different where a layout has ranks of experts."""

_PIPELINE: dict[str, Any] = {"pp": 2, "accumulation": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2 sp": {"tp": 2, "sp": True, "packed": True},
    "tp 4": {"tp": 4},
    "pp 2, 1f1b": {**_PIPELINE, "schedule": "1f1b"},
    "pp 2, interleaved": {**_PIPELINE, "schedule": "interleaved", "packed": True},
    "pp 2, zb-v": {**_PIPELINE, "schedule": "zb-v"},
    **{
        f"cp {cp}, {way}{', packed' if packed else ''}": {"cp": cp, "exchange": exchange, "packed": packed}
        for cp in (2, 4)
        for way, exchange in (("states", "p2p"), ("heads", "a2a"))
        for packed in (False, True)
    },
    "ep 2": {"shard": 2, "ep": 2},
    "shard 2 x replicate 2": {"shard": 2, "replicate": 2},
    "selective recompute": {"recompute": "selective", "packed": True},
    "full recompute": {"recompute": "full"},
    "compile": {"compile": True, "packed": True},
}
"""Of adapters see tests/training/test_finetune_hybrids.py."""


def case_of(mixer: str, layout: str) -> Case | None:
    """The case of a cell; None: it is refused."""
    values = dict(LAYOUTS[layout])
    packed, spread = values.pop("packed", False), Spread(**values)
    if spread.compile and mixer == "dsa":  # torch's C++ code of the chosen rows does not compile
        return None
    made: dict[str, Any] = {"kv_heads": 2, "length": 16 if spread.cp > 1 else 15, "steps": 10, "unequal": True}
    made |= {"micro_batch": 1 if spread.pp > 1 else 2, "packed": packed, "extra": mixer} | MIXERS[mixer]
    made |= {"layers": 4} if spread.pp > 1 else {}
    made |= EXPERTS[mixer] if spread.ep > 1 else {}
    return Case(Problem(**made, micro_batches=spread.data_parallel * spread.accumulation), spread)


def cells() -> dict[tuple[str, str], Case]:
    """All of the product that can be."""
    found = {(mixer, layout): case_of(mixer, layout) for mixer in MIXERS for layout in LAYOUTS}
    return {cell: case for cell, case in found.items() if case is not None}
