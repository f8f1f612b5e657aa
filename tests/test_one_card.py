"""Processes that share a card: what their collectives give, that nothing is there before it was waited for, and what
``tests/gpu/test_layouts.py`` tries on one, without it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.distributed import run_distributed
from tests.gpu.test_layouts import beside, lab_of
from tests.one_card import OneCardGroup, device_of
from tests.parity.cases import Case
from tests.parity.lab import Lab, asked
from tests.parity.one_card_cases import GATHERED, LIKE_ONE_RANK, OFFLOADED
from tests.parity.result import TOLERANCE
from tests.parity.test_matrix import errors
from tests.parity.test_offload import differing


def collectives(rank: int, world: int) -> dict[str, tuple[list[float], list[float]]]:
    """By name (before it was waited for, after)."""
    device = device_of("one card", rank)
    own = torch.arange(4.0, device=device) + 10 * rank
    found: dict[str, tuple[list[float], list[float]]] = {}

    gate = threading.Event()
    OneCardGroup.arrive = staticmethod(gate.wait)  # type: ignore[method-assign, assignment]

    def run(name: str, output: torch.Tensor, start: Callable[[], Any]) -> None:
        gate.clear()
        work = start()
        early = output.tolist()
        gate.set()
        work.wait()
        found[name] = early, output.tolist()

    summed = own.clone()
    run("all-reduce", summed, lambda: dist.all_reduce(summed, async_op=True))
    whole, part = torch.zeros(4 * world, device=device), torch.zeros(2, device=device)
    run("all-gather", whole, lambda: dist.all_gather_into_tensor(whole, own, async_op=True))
    run("reduce-scatter", part, lambda: dist.reduce_scatter_tensor(part, own, async_op=True))
    swapped = torch.zeros(4, device=device)
    run("all-to-all", swapped, lambda: dist.all_to_all_single(swapped, own, async_op=True))
    got = torch.zeros(4, device=device)
    sending = dist.isend(own, 1 - rank)
    run("message", got, lambda: dist.irecv(got, 1 - rank))
    assert sending is not None
    sending.wait()
    first = own.clone()
    run("broadcast", first, lambda: dist.broadcast(first, 0, async_op=True))
    plain = functional.all_gather_tensor(own, 0, dist.group.WORLD)
    found["functional"] = [], plain.tolist()
    host = torch.tensor([float(rank)])
    dist.all_reduce(host)
    found["host"] = [], host.tolist()
    return found


def test_collectives_give_what_nccls_give_and_not_before() -> None:
    both = run_distributed(collectives, 2, device="one card")
    for rank, found in enumerate(both):
        own, other = ([float(i + 10 * r) for i in range(4)] for r in (rank, 1 - rank))
        everything = [float(i + 10 * r) for r in range(2) for i in range(4)]
        sums = [a + b for a, b in zip(own, other, strict=True)]
        exchanged = everything[:2] + everything[4:6] if rank == 0 else everything[2:4] + everything[6:]
        wanted = {
            "all-reduce": (own, sums),
            "all-gather": ([0.0] * 8, everything),
            "reduce-scatter": ([0.0] * 2, sums[2 * rank : 2 * rank + 2]),
            "all-to-all": ([0.0] * 4, exchanged),
            "message": ([0.0] * 4, other),
            "broadcast": (own, everything[:4]),
            "functional": ([], everything),
            "host": ([], [1.0]),
        }
        assert found == wanted


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(asked(request), tmp_path_factory.mktemp("one_card"))


def few_fast(layouts: list[Case], *fast: int) -> list[Any]:
    """All but those with these places are slow."""
    marks = [[] if i in fast else [pytest.mark.slow] for i in range(len(layouts))]
    return [pytest.param(case, id=str(case), marks=mark) for case, mark in zip(layouts, marks, strict=True)]


@pytest.mark.parametrize("case", few_fast(LIKE_ONE_RANK, 1, 9))
def test_a_layout_equals_one_process(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", few_fast(OFFLOADED, 7))
def test_offload_changes_no_bit(lab: Lab, case: Case) -> None:
    assert differing(lab, case) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", GATHERED, ids=str)
def test_a_gather_of_8_bits_changes_none(lab: Lab, case: Case) -> None:
    got, want = lab.result(case), lab.result(beside(case))
    assert got.losses == want.losses and got.norms == want.norms
