"""Layouts that are tried by processes that share a card: at most four, each way of communication at least once."""

from __future__ import annotations

from typing import Any

from tests.parity import cases, context_cases, expert_cases, fp8_cases, offload_cases, pipeline_cases
from tests.parity.cases import Case, few, short

MOST = 4
"""Processes: each takes about a GB of the card by being there."""


def _ways(case: Case) -> set[Any]:
    """What a layout does between ranks, and when."""
    spread, problem = case.spread, case.problem
    return {
        ("tp", spread.tp > 1, spread.sp),
        ("shard", spread.shard > 1),
        ("replicate", spread.replicate > 1),
        ("schedule", spread.pp > 1 and spread.schedule),
        ("recompute", spread.recompute),
        ("exchange", spread.cp > 1 and spread.exchange),
        ("experts", problem.experts if problem.experts in ("mixtral", "sigmoid", "gpt-oss", "deepseek") else ""),
        ("host", spread.horizon > 0, spread.host_steps),
    }


def _small(found: list[Case]) -> list[Case]:
    return [short(case) for case in found if 1 < case.spread.world_size <= MOST and not case.spread.compile]


DENSE = few(_small([*cases.pairwise_cases(), *pipeline_cases.pipeline_cases()]), _ways)
EXPERTS = few(_small(expert_cases.fast_cases()), lambda case: {way for way in _ways(case) if way[0] != "recompute"})
CONTEXT = few(_small(context_cases.fast_cases()), lambda case: {way for way in _ways(case) if way[0] == "exchange"})
LIKE_ONE_RANK = list(dict.fromkeys([*DENSE, *EXPERTS, *CONTEXT]))
OFFLOADED = few(_small(offload_cases.fast_cases()), _ways)
"""With other bits than without offload it is wrong."""
GATHERED = _small(fp8_cases.gathering_cases())
"""Weights that travel in 8 bits: likewise."""
