"""Layouts with a pipeline: every schedule on 2 and 4 ranks, alone and together with every other way to split."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from smp.pipeline.schedules import SCHEDULES
from tests.parity.cases import MAX_WORLD, Case, Problem, Spread

_BESIDE: tuple[dict[str, Any], ...] = (
    {"tp": 2, "sp": True},
    {"shard": 2},
    {"replicate": 2},
    {"tp": 2, "shard": 2},
)
_PROBLEMS: tuple[dict[str, Any], ...] = (
    {"style": "llama", "layers": 5, "unequal": True, "clip": True},
    {"style": "gpt2", "layers": 3, "dropout": True},
    {"style": "llama", "layers": 6, "tied": True, "clip": True, "extra": "qknorm", "kv_heads": 2},
    {"style": "gpt2", "layers": 5, "tied": True, "unequal": True, "kv_heads": 1, "clip": True},
    {"style": "llama", "layers": 1, "dropout": True, "clip": True, "extra": "window"},
)
"""Layer counts that no schedule divides evenly; with 1 or 3 some stages are empty."""
_SPREADS: tuple[dict[str, Any], ...] = ({}, {"recompute": "full"}, {"reshard": True}, {"recompute": "selective"})


def pipeline_cases() -> list[Case]:
    """Every schedule x ranks x other splits; problems, recompute and resharding take turns."""
    chosen = itertools.product(SCHEDULES, (2, 4), _BESIDE)
    made = []
    for number, (schedule, pp, beside) in enumerate(chosen):
        problem, spread = _PROBLEMS[number % 5], _SPREADS[number % 3 if schedule == "gpipe" else number % 4]
        case = _case(problem, {"pp": pp, "schedule": schedule, "accumulation": (4, 8)[number % 2], **beside, **spread})
        if case.spread.world_size <= MAX_WORLD:
            made.append(case)
    return made


def special_cases() -> list[Case]:
    """What the set above does not meet: fewer micro-batches than ranks, placements by hand, compilation."""
    llama, tied = _PROBLEMS[0], {**_PROBLEMS[3], "kv_heads": 4}
    return [
        _case(llama, {"pp": 4, "schedule": "1f1b", "accumulation": 2}),
        _case(tied, {"pp": 4, "schedule": "zb-v", "accumulation": 3}),
        _case(tied, {"pp": 2, "schedule": "zb-h1", "accumulation": 1}),
        _case(tied, {"pp": 4, "schedule": "1f1b", "accumulation": 4, "placement": "E|t*5||L"}),
        _case(llama, {"pp": 2, "schedule": "interleaved", "accumulation": 4, "placement": "Ettt||tt|L", "shard": 2}),
        _case(llama, {"pp": 2, "schedule": "1f1b", "accumulation": 4, "compile": True}),
        _case(tied, {"pp": 2, "schedule": "interleaved", "accumulation": 4, "compile": True, "recompute": "selective"}),
    ]


def bf16_cases() -> list[Case]:
    """In bf16, where sums over micro-batches are kept in fp32."""
    llama, tied = _PROBLEMS[0], _PROBLEMS[2]
    return [
        _case(llama, {"pp": 2, "schedule": "zb-h1", "accumulation": 8, "shard": 2, "bf16": True}),
        _case(tied, {"pp": 2, "schedule": "zb-v", "accumulation": 4, "tp": 2, "sp": True, "bf16": True}),
        _case(tied, {"pp": 2, "schedule": "interleaved", "accumulation": 4, "reshard": True, "bf16": True}),
    ]


def exact_cases() -> list[tuple[Case, Case]]:
    """A pipeline alone, and one rank that takes the same micro-batches one after the other: equal to the last bit."""
    made = []
    for schedule, pp, style in itertools.product(SCHEDULES, (2, 4), ("llama", "gpt2")):
        case = _case({"style": style, "layers": 5}, {"pp": pp, "schedule": schedule, "accumulation": 8})
        made.append((case, Case(case.problem, Spread(accumulation=8))))
    return made


def sabotaged_cases() -> list[tuple[Case, str]]:
    """Bugs that pipelines have had, and the kind of error that must show them."""
    tied = {"style": "gpt2", "layers": 3, "tied": True}
    chosen = [
        ("tied_sum", "copies", _case(tied, {"pp": 2, "schedule": "1f1b", "accumulation": 4})),
        ("tied_norm", "norm", _case(tied, {"pp": 2, "schedule": "1f1b", "accumulation": 4})),
        ("drop_weights", "gradient", _case(tied, {"pp": 2, "schedule": "zb-h1", "accumulation": 4})),
        ("count_all_tokens", "loss", _case(tied, {"pp": 2, "schedule": "1f1b", "accumulation": 4})),
    ]
    return [(replace(case, sabotage=bug), error) for bug, error, case in chosen]


def _case(problem: dict[str, Any], spread: dict[str, Any]) -> Case:
    made = Spread(**spread)
    return Case(Problem(**problem, steps=5, micro_batches=made.data_parallel * made.accumulation), made)
