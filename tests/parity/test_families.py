"""Families with scales, caps, norms and layers of their own train the same in every layout, and like plain torch."""

from __future__ import annotations

import pytest

from tests.parity import family_cases as cases
from tests.parity.cases import Case
from tests.parity.lab import Lab
from tests.parity.result import TOLERANCE, compare
from tests.parity.test_matrix import errors, lab_of, within_rounding

FAST = cases.fast_cases()
SLOW = [*cases.slow_cases(), *cases.compiled_cases()]
BF16 = cases.bf16_cases()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(FAST, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of([*SLOW, *BF16], tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("case", list(dict.fromkeys(case.one_rank for case in FAST)), ids=str)
def test_one_rank_equals_plain_torch(lab: Lab, case: Case) -> None:
    found = compare(lab.result(case), lab.reference(case))
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("case", FAST, ids=str)
def test_layouts_train_like_one_rank(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_more_layouts_train_like_one_rank(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(dict.fromkeys(case.one_rank_fp32 for case in SLOW)), ids=str)
def test_more_problems_equal_plain_torch(slow_lab: Lab, case: Case) -> None:
    found = compare(slow_lab.result(case), slow_lab.reference(case))
    assert found.worst <= TOLERANCE, found


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_is_as_close_as_rounding_allows(slow_lab: Lab, case: Case) -> None:
    within_rounding(slow_lab, case, BF16)
