"""Layouts with a pipeline: every schedule on 2 and 4 ranks, alone and together with every other way to split."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from smp.pipeline.placement import balance
from smp.pipeline.schedules import SCHEDULES
from tests.parity.cases import MAX_WORLD, Case, Problem, Spread, cost
from tests.pipeline.formulas import format_layout

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

FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(SCHEDULES),
    "pp": (2, 4),
    "beside": tuple(range(len(_BESIDE))),
    "problem": tuple(range(len(_PROBLEMS))),
    "recompute": ("none", "selective", "full"),
    "reshard": (False, True),
    "accumulation": (4, 8),
}
"""The matrix; "beside" and "problem" are places in the tuples above."""

_CROSSED = tuple(FACTORS)[:3]
_Values = dict[str, Any]
_Group = tuple[tuple[str, Any], ...]


def pipeline_values() -> list[_Values]:
    """Every schedule x other splits, then what is left of all pairs of values; the same on every call.

    Greedy: each takes the values that cover most new pairs, then most new triples, for what the case costs. Ties are
    drawn, and so is the order in which they take, so that no factor follows another.
    """
    draw, made = random.Random(1), list[_Values]()
    every = [values for values in map(_named, _product(FACTORS)) if _fits(values)]
    price = {tuple(values.values()): cost(_case_of(values)) ** 0.3 for values in every}  # once: there are thousands
    left, triples = valid_groups(2), set[_Group]()
    cells = list(itertools.product(FACTORS["schedule"], FACTORS["beside"]))
    wanted = draw.sample(cells, len(cells))
    while left:
        free = every if not wanted else [v for v in every if (v["schedule"], v["beside"]) == wanted[0]]
        chosen = max(
            free,
            key=lambda v: (*(new / price[tuple(v.values())] for new in _news(v, left, triples)), draw.random()),
        )
        left -= groups_of(chosen, 2)
        triples |= groups_of(chosen, 3)
        made.append(chosen)
        wanted = wanted[1:]
    return sorted(made, key=lambda values: cells.index((values["schedule"], values["beside"])))


def _news(values: _Values, left: set[_Group], triples: set[_Group]) -> tuple[int, int]:
    """How many pairs and triples it has that no case before has."""
    return len(groups_of(values, 2) & left), len(groups_of(values, 3) - triples)


def _named(values: tuple[Any, ...]) -> _Values:
    return dict(zip(FACTORS, values, strict=True))


def _product(names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*(FACTORS[name] for name in names))


def _fits(values: _Values) -> bool:
    return Spread(pp=values["pp"], **_BESIDE[values["beside"]]).world_size <= MAX_WORLD


def valid_groups(size: int) -> set[_Group]:
    """Every pair (2) or triple (3) of values of different factors that some layout has."""
    return {group for values in map(_named, _product(FACTORS)) if _fits(values) for group in groups_of(values, size)}


def groups_of(values: _Values, size: int) -> set[_Group]:
    """The pairs (2) or triples (3) of factor values of a case."""
    return set(itertools.combinations(values.items(), size))


def pipeline_cases() -> list[Case]:
    """The fast set: all pairs of the factors, and half of the triples."""
    return [_case_of(values) for values in pipeline_values()]


def product_cases() -> list[Case]:
    """Every schedule x ranks x other splits x tied or not x resharding; the other factors are drawn."""
    draw = random.Random(0)
    names = {tied: [i for i, p in enumerate(_PROBLEMS) if p.get("tied", False) == tied] for tied in (False, True)}
    made = []
    for crossed, tied, reshard in itertools.product(_product(_CROSSED), names, FACTORS["reshard"]):
        drawn = (
            draw.choice(names[tied]),
            draw.choice(FACTORS["recompute"]),
            reshard,
            draw.choice(FACTORS["accumulation"]),
        )
        values = _named((*crossed, *drawn))
        if _fits(values):
            made.append(_case_of(values))
    return made


def _case_of(values: _Values) -> Case:
    spread = {name: value for name, value in values.items() if name not in ("beside", "problem")}
    return _case(_PROBLEMS[values["problem"]], spread | _BESIDE[values["beside"]])


def risky_pairs(case: Case) -> set[Any]:
    """What the fast suite has one case of: every schedule beside tensor parallelism, sharding, replicas, recompute and
    resharding, and on four ranks; every problem; placements by hand, and too few micro-batches."""
    p, s = case.problem, case.spread
    beside = {"tp": s.tp > 1, "shard": s.shard > 1, "replicate": s.replicate > 1, "recompute": s.recompute}
    met = {(s.schedule, name, value) for name, value in beside.items() if value} | {(s.schedule, s.reshard), s.pp}
    few_micro_batches = s.accumulation < s.pp
    return met | {replace(p, steps=0, micro_batches=0), (s.pp, s.tp > 1), s.placement, few_micro_batches}


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
    for schedule, (pp, style) in itertools.product(SCHEDULES, ((2, "llama"), (4, "gpt2"))):
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
        ("swap_sends", "loss", _case(tied, {"pp": 2, "schedule": "gpipe", "accumulation": 4})),
    ]
    return [(replace(case, sabotage=bug), error) for bug, error, case in chosen]


def _case(problem: _Values, spread: _Values) -> Case:
    made = Spread(**spread)
    if made.placement is None and (stages := made.pp * _chunks(made)) > problem["layers"] + 2:
        made = replace(made, placement=format_layout(balance([1] * problem["layers"], stages)))  # with empty stages
    return Case(Problem(**problem, steps=5, micro_batches=made.data_parallel * made.accumulation), made)


def _chunks(spread: Spread) -> int:
    return 1 if spread.schedule is None else SCHEDULES[spread.schedule].CHUNKS
