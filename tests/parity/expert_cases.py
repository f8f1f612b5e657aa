"""Layouts of models with experts: expert parallelism beside every other way to split, for every kind of router."""

from __future__ import annotations

import itertools
from typing import Any

from smp.pipeline.schedules import SCHEDULES
from tests.parity.cases import MAX_WORLD, Case, Problem, Spread, cover

_Values = dict[str, Any]
_Pair = tuple[tuple[str, Any], ...]

_BESIDE: dict[str, _Values] = {
    "alone": {},
    "tp": {"tp": 2},
    "tp and sp": {"tp": 2, "sp": True},
    "tp and etp 1": {"tp": 2, "sp": True, "etp": 1},
    "cp": {"cp": 2},
    "replicate": {"replicate": 2},
    **{name: {"pp": 2, "schedule": name, "accumulation": 4} for name in SCHEDULES},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 4),
    "shard": (1, 2, 4),
    "beside": tuple(_BESIDE),
    "experts": (
        "mixtral",
        "pre-softmax",
        "sigmoid",
        "top-1",
        "deepseek",
        "qwen2",
        "latent",
        "capacity",
        "gpt-oss",
        "llama4",
        "sinkhorn",
        "padded",
        "squared relu",
        "biased gelu",
    ),
    "accumulation": (1, 3),
    "recompute": ("none", "selective", "full"),
}


def fits(values: _Values) -> bool:
    """Whether a (partial) choice of values is a layout: experts are split over ranks that shard weights."""
    degrees: _Values = {"tp": 1, "cp": 1, "replicate": 1, "pp": 1, **_BESIDE[values.get("beside", "alone")]}
    ep = values.get("ep", 1)
    shard, tp, cp = values.get("shard", ep), degrees["tp"], degrees["cp"]
    world = tp * cp * degrees["replicate"] * degrees["pp"] * shard
    return bool(world <= MAX_WORLD and shard * cp * tp // degrees.get("etp", tp) % ep == 0)


def expert_case(values: _Values, **more: Any) -> Case:
    """The case with these values of factors; ``more`` are fields of its layout or its problem."""
    beside = {"accumulation": values.get("accumulation", 1)} | _BESIDE[values["beside"]]
    in_problem = {name: value for name, value in more.items() if name in Problem.__dataclass_fields__}
    spread = Spread(
        ep=values["ep"],
        shard=values["shard"],
        recompute=values.get("recompute", "none"),
        **beside | {name: value for name, value in more.items() if name not in in_problem},
    )
    problem: _Values = {"kv_heads": 2, "length": 16 if spread.cp > 1 else 15, "steps": 2, "layers": 2}
    if spread.schedule in ("interleaved", "zb-v"):
        problem["layers"] = 4
    problem |= {"micro_batch": 2, "unequal": True, "experts": values["experts"]} | in_problem
    return Case(Problem(micro_batches=spread.data_parallel * spread.accumulation, **problem), spread)


def pairs_of(values: _Values) -> set[_Pair]:
    """The pairs that a choice of values covers."""
    return set(itertools.combinations([(name, values[name]) for name in FACTORS], 2))


def all_values() -> list[_Values]:
    """Every layout. A pipeline has its own number of micro-batches."""
    chosen = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [v for v in chosen if fits(v) and not ("pp" in _BESIDE[v["beside"]] and v["accumulation"] > 1)]


def pairwise_values() -> list[_Values]:
    """A small set in which every pair occurs that some layout has."""
    return cover(all_values(), pairs_of, expert_case, seed=5)


def pairwise_cases() -> list[Case]:
    """Of :func:`pairwise_values`."""
    return [expert_case(values) for values in pairwise_values()]


def _row(
    ep: int,
    shard: int,
    experts: str,
    beside: str = "alone",
    recompute: str = "none",
    accumulation: int = 1,
    **more: Any,
) -> Case:
    values = {"ep": ep, "shard": shard, "experts": experts, "beside": beside, "recompute": recompute}
    return expert_case(values | {"accumulation": accumulation}, **more)


def fast_cases() -> list[Case]:
    """A few that meet every kind of split and every kind of router."""
    return [
        _row(1, 1, "pre-softmax", "tp and sp"),
        _row(2, 2, "mixtral", "tp and sp", "full", clip=True),
        _row(2, 2, "sigmoid", "tp", accumulation=3),
        _row(2, 4, "pre-softmax", "alone", "selective"),
        _row(4, 4, "mixtral", "alone", accumulation=3, clip=True),
        _row(2, 2, "sigmoid", "zb-h1"),
        _row(2, 2, "mixtral", "replicate", dropout=True),
        _row(2, 1, "top-1", "cp", "full"),
        _row(2, 2, "deepseek", "tp and sp", "full"),
        _row(2, 1, "deepseek", "cp"),
        _row(2, 2, "qwen2", "tp and sp", "selective", accumulation=3),
        _row(1, 1, "qwen2", "1f1b"),
        _row(2, 2, "latent", "tp and sp", "selective", dropout=True),
        _row(1, 2, "latent", "tp", accumulation=3),
        _row(2, 1, "latent", "cp", "full"),
        _row(1, 1, "latent", "zb-v"),
        _row(2, 1, "capacity", "cp", "full", packed=True),
        _row(2, 2, "capacity", "tp and sp", accumulation=3),
        _row(2, 2, "gpt-oss", "tp and sp", "selective", accumulation=3),
        _row(2, 1, "gpt-oss", "cp", "full"),
        _row(1, 1, "gpt-oss", "cp", exchange="a2a", packed=True),
        _row(2, 2, "llama4", "tp and sp", "selective", accumulation=3),
        _row(2, 1, "llama4", "cp", "full", packed=True),
        _row(2, 1, "sinkhorn", "cp", "full", packed=True),
        _row(2, 2, "sinkhorn", "tp and sp", accumulation=3),
        _row(2, 1, "padded", "cp", "full"),
        _row(2, 2, "squared relu", "tp and sp", "selective", accumulation=3),
        _row(2, 1, "biased gelu", "cp", "full"),
        _row(2, 1, "capacity", "tp and etp 1", "full", clip=True),
        _row(2, 2, "gpt-oss", "tp and etp 1", accumulation=3),
        _row(2, 2, "deepseek", "tp and sp", "full", mtp=2, clip=True),
        _row(1, 1, "latent", "zb-v", mtp=1),
        _row(2, 1, "sigmoid", "cp", accumulation=3, mtp=1, packed=True),
        _row(2, 1, "llama4", "cp", "full", mtp=1, packed=True),
    ]


def risky_pairs(case: Case) -> set[Any]:
    """What the fast suite has one case of: every kind of layer whole and split over ranks, every kind of split, and
    recompute, accumulation, further tokens and packing where they meet a split."""
    p, s = case.problem, case.spread
    split = (s.tp, s.sp, s.etp, s.cp, s.exchange, s.schedule, s.replicate, s.shard > 1)
    met = {(p.experts, s.ep > 1), split}
    met |= {(s.ep > 1, s.recompute), (s.ep > 1, s.accumulation > 1), s.ep}
    return met | {(p.mtp > 0, s.pp > 1, s.cp > 1), p.packed, p.clip, p.dropout}


def slow_cases() -> list[Case]:
    """Attention sinks and chunks where the pairs have none, and experts cut over some of the TP ranks or one, beside
    what the pairs have no more processes for."""
    return [
        _row(1, 1, "mixtral", "tp and etp 1", clip=True),
        _row(4, 2, "mixtral", "tp and etp 1", "full", dropout=True),
        _row(2, 1, "qwen2", "tp and sp", "selective", tp=4, etp=2, clip=True),
        _row(2, 1, "padded", "tp and etp 1", cp=2, packed=True),
        _row(4, 1, "capacity", "tp and etp 1", "full", cp=2),
        _row(2, 1, "latent", "zb-v", tp=2, sp=True, etp=1),
        _row(4, 2, "gpt-oss", "1f1b", tp=2, sp=True, etp=1, clip=True),
        _row(2, 1, "sinkhorn", "tp and etp 1", replicate=2),
        _row(2, 1, "sigmoid", "tp and etp 1", fp8="tensorwise"),
        _row(4, 4, "sigmoid", "alone", "selective", 3, mtp=2, packed=True),
        _row(2, 2, "mixtral", "replicate", mtp=1, tied=True),
        _row(2, 2, "gpt-oss", "1f1b", mtp=2, clip=True),
        _row(1, 2, "qwen2", "interleaved", mtp=1, tied=True),
        _row(2, 2, "capacity", "tp", "full", mtp=1),
        _row(2, 2, "llama4", "tp and etp 1", "selective", 3, mtp=2),
        _row(2, 2, "llama4", "zb-v", mtp=1),
        _row(2, 1, "latent", "tp and etp 1", mtp=2, cp=2),
        _row(2, 2, "top-1", "zb-h1", "full", tp=2, sp=True, mtp=1),
        *(_row(1, 1, "llama4", "cp", exchange=kind, dropout=True) for kind in ("all_gather", "a2a")),
        _row(2, 2, "llama4", "zb-v", dropout=True),
        _row(1, 1, "gpt-oss", "cp", exchange="all_gather", dropout=True),
        _row(2, 2, "gpt-oss", "cp", "selective", exchange="all_gather"),
        _row(2, 2, "gpt-oss", "zb-v", dropout=True),
    ]


def bf16_cases() -> list[Case]:
    """In bf16, where no token of this problem has logits so nearly equal that another rounding sends it elsewhere."""
    return [
        _row(4, 4, "sigmoid", "alone", "full", bf16=True),
        _row(2, 2, "sigmoid", "alone", bf16=True, compile=True),
    ]


def compiled_cases() -> list[Case]:
    """Under ``--compile``, of which the numbers of rows of experts on several ranks are sizes that graphs read."""
    return [
        _row(1, 1, "qwen2", "tp and sp", compile=True),
        _row(1, 2, "deepseek", "alone", "selective", 3, compile=True),
        _row(1, 1, "sigmoid", "1f1b", compile=True),
        _row(1, 2, "mixtral", "tp", "full", clip=True, compile=True),
        _row(1, 1, "pre-softmax", "cp", dropout=True, compile=True),
        _row(1, 1, "gpt-oss", "tp and sp", compile=True),
        _row(1, 2, "padded", "alone", compile=True),
        _row(1, 1, "llama4", "tp and sp", compile=True),
        _row(1, 1, "llama4", "cp", compile=True),
        _row(2, 2, "qwen2", "alone", compile=True),
        _row(2, 2, "deepseek", "alone", "selective", 3, compile=True),
        _row(2, 2, "mixtral", "tp and sp", "full", clip=True, compile=True),
        _row(2, 1, "gpt-oss", "tp and etp 1", "selective", compile=True),
        _row(2, 1, "qwen2", "cp", compile=True),
        _row(2, 2, "padded", "alone", "full", 3, compile=True),
        _row(2, 2, "llama4", "1f1b", "full", mtp=1, compile=True),
        _row(2, 2, "mixtral", "interleaved", compile=True),
        _row(2, 2, "sigmoid", "replicate", clip=True, compile=True),
        *(_row(2, 2, "sigmoid", fp8=recipe, compile=True) for recipe in ("tensorwise", "rowwise", "delayed")),
    ]
