"""Sequences that are cut over processes train like whole ones, with every exchange, beside every other way to split."""

from __future__ import annotations

import pytest

from tests.parity import context_cases as cases
from tests.parity.cases import MAX_WORLD, Case, short
from tests.parity.lab import Lab
from tests.parity.result import TOLERANCE, compare
from tests.parity.test_matrix import errors, lab_of, within_rounding

FAST = [short(case) for case in cases.fast_cases()]
SABOTAGED = [(short(case), error) for case, error in cases.sabotaged_cases()]
PAIRWISE = cases.pairwise_cases()
BF16 = cases.bf16_cases()
COMPILED = cases.compiled_cases()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of([*FAST, *(case for case, _ in SABOTAGED)], tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of([*PAIRWISE, *BF16, *COMPILED], tmp_path_factory.mktemp("slow"))


def test_the_set_covers_every_pair() -> None:
    wanted = set().union(*map(cases.pairs_of, cases.all_values()))
    assert wanted == set().union(*map(cases.pairs_of, cases.pairwise_values()))
    assert max(case.spread.world_size for case in PAIRWISE) == MAX_WORLD
    assert {case.spread.exchange for case in FAST} == set(cases.FACTORS["exchange"])


@pytest.mark.parametrize("case", FAST, ids=str)
def test_cut_sequences_train_like_whole_ones(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", list(dict.fromkeys(case.one_rank for case in FAST)), ids=str)
def test_one_rank_equals_plain_torch(lab: Lab, case: Case) -> None:
    found = compare(lab.result(case), lab.reference(case))
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize(("case", "error"), SABOTAGED, ids=str)
def test_a_bug_is_seen(lab: Lab, case: Case, error: str) -> None:
    assert getattr(errors(lab, case), error) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_every_pair_trains_like_whole_sequences(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_is_as_close_as_rounding_allows(slow_lab: Lab, case: Case) -> None:
    within_rounding(slow_lab, case, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_cuts_train_like_whole_sequences(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)
