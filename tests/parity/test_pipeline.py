"""Every schedule trains like one rank, and alone to the last bit."""

from __future__ import annotations

import pytest
import torch

from tests.parity import pipeline_cases as cases
from tests.parity.cases import Case, few, short
from tests.parity.lab import Lab, asked
from tests.parity.result import TOLERANCE
from tests.parity.test_matrix import errors, lab_of, some_slow, within_rounding

ALL = [short(case) for case in [*cases.pipeline_cases(), *cases.special_cases()]]
COMPILED = [case for case in ALL if case.spread.compile]
PIPELINES = [case for case in ALL if not case.spread.compile]
BF16 = cases.bf16_cases()
EXACT = [(short(case), short(one_rank)) for case, one_rank in cases.exact_cases()]
SABOTAGED = [(short(case), error) for case, error in cases.sabotaged_cases()]
FAST = few(PIPELINES, cases.risky_pairs)
PRODUCT = list(dict.fromkeys(cases.product_cases()))


@pytest.fixture(scope="module")
def slow_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab([*PRODUCT, *(case.one_rank for case in PRODUCT)], tmp_path_factory.mktemp("product"))


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    bounds = [case.one_rank for case in BF16]
    return lab_of([*asked(request), *bounds], tmp_path_factory.mktemp("pipeline"))


def test_the_set_covers_every_pair_and_half_of_the_triples() -> None:
    values = cases.pipeline_values()
    for size, share in ((2, 1), (3, 0.5)):
        covered = {group for chosen in values for group in cases.groups_of(chosen, size)}
        assert len(covered) >= share * len(cases.valid_groups(size))
    spreads = [case.spread for case in cases.pipeline_cases()]
    assert any(s.reshard and s.shard > 1 for s in spreads)
    split = [s for s in spreads if s.schedule in ("zb-h1", "zb-v") and s.sp]
    assert {s.recompute for s in split} == {"none", "selective", "full"} and {s.reshard for s in split} == {False, True}


@pytest.mark.parametrize("case", [*some_slow(PIPELINES, FAST), *some_slow(COMPILED, COMPILED[:1])])
def test_a_pipeline_equals_one_rank(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_is_as_close_as_rounding_allows(lab: Lab, case: Case) -> None:
    within_rounding(lab, case, BF16)


@pytest.mark.parametrize(
    ("case", "one_rank"),
    [
        pytest.param(case, one_rank, id=str(case), marks=[pytest.mark.slow] if case.spread.pp == 4 else [])
        for case, one_rank in EXACT
    ],
)
def test_a_pipeline_alone_is_accumulation_to_the_last_bit(lab: Lab, case: Case, one_rank: Case) -> None:
    got, expected = lab.result(case), lab.result(one_rank)
    assert got.losses == expected.losses
    for name, tensor in expected.final.items():
        assert torch.equal(got.final[name], tensor), name


@pytest.mark.parametrize(("case", "error"), SABOTAGED, ids=str)
def test_a_bug_is_seen(lab: Lab, case: Case, error: str) -> None:
    if error == "copies":
        with pytest.raises(AssertionError, match="copies of .* differ between ranks"):
            lab.result(case)
    else:
        assert getattr(errors(lab, case), error) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_the_product_of_pipelines(slow_lab: Lab, case: Case) -> None:
    assert errors(slow_lab, case).worst <= TOLERANCE, errors(slow_lab, case)
