"""Models with experts train the same wherever the experts are."""

from __future__ import annotations

import pytest

from tests.parity import expert_cases as cases
from tests.parity.cases import MAX_WORLD, Case, few, short
from tests.parity.lab import Lab, asked
from tests.parity.result import TOLERANCE, compare
from tests.parity.test_matrix import errors, lab_of, some_slow, within_rounding

COMPILED = cases.compiled_cases()
CHOSEN = [short(case) for case in cases.fast_cases()]
FAST = few(CHOSEN, cases.risky_pairs)
PAIRWISE = cases.pairwise_cases()
SLOW = cases.slow_cases()
BF16 = cases.bf16_cases()


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(asked(request), tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of([*PAIRWISE, *SLOW, *BF16, *COMPILED], tmp_path_factory.mktemp("slow"))


def test_the_set_covers_every_pair() -> None:
    wanted = set().union(*map(cases.pairs_of, cases.all_values()))
    assert wanted == set().union(*map(cases.pairs_of, cases.pairwise_values()))
    assert max(case.spread.world_size for case in PAIRWISE) == MAX_WORLD
    assert {case.problem.experts for case in FAST} == set(cases.FACTORS["experts"])


@pytest.mark.parametrize("case", list(dict.fromkeys(case.one_rank for case in CHOSEN)), ids=str)
def test_one_rank_equals_a_loop_over_experts(lab: Lab, case: Case) -> None:
    found = compare(lab.result(case), lab.reference(case))
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("case", some_slow(CHOSEN, FAST))
def test_spread_experts_train_like_those_of_one_rank(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PAIRWISE, *SLOW], ids=str)
def test_every_pair_trains_like_one_rank(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_models_train_like_one_rank(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_is_as_close_as_rounding_allows(slow_lab: Lab, case: Case) -> None:
    within_rounding(slow_lab, case, BF16)
