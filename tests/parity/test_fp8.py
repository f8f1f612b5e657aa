"""FP8 trains in every layout as on one rank: the same scales and the same rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity import fp8_cases as cases
from tests.parity.cases import Case
from tests.parity.lab import Lab
from tests.parity.result import TOLERANCE
from tests.parity.test_matrix import errors

FAST = cases.fast_cases()
SABOTAGED = cases.sabotaged_cases()
PAIRWISE = cases.pairwise_cases()
COMPILED = cases.compiled_cases()
GATHERING = cases.gathering_cases()


def without_gather(case: Case) -> Case:
    return replace(case, spread=replace(case.spread, fp8_gather=False))


def lab_of(layouts: list[Case], folder: object) -> Lab:
    return Lab([*layouts, *(case.one_rank for case in layouts)], folder)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of([*FAST, *SABOTAGED, *map(without_gather, GATHERING)], tmp_path_factory.mktemp("fast"))


@pytest.mark.parametrize("case", FAST, ids=str)
def test_fp8_trains_like_one_rank(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", GATHERING, ids=str)
def test_a_gather_of_8_bits_changes_none(lab: Lab, case: Case) -> None:
    """Weights are rounded before they travel or where they are used: to the same numbers."""
    got, want = lab.result(case), lab.result(without_gather(case))
    assert got.losses == want.losses and got.norms == want.norms
    assert all(torch.equal(got.final[name], tensor) for name, tensor in want.final.items())


@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_a_wrong_scale_is_seen(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst > 100 * TOLERANCE, errors(lab, case)


def test_the_set_covers_every_pair() -> None:
    wanted = set().union(*map(cases.pairs_of, cases.all_values()))
    assert wanted == set().union(*map(cases.pairs_of, cases.pairwise_values()))


@pytest.fixture(scope="module")
def slow_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of([*PAIRWISE, *COMPILED], tmp_path_factory.mktemp("slow"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PAIRWISE, *COMPILED], ids=str)
def test_every_pair_trains_like_one_rank(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)
