"""Every layout trains like one process, and one process like plain torch in float64.

Compared are the losses, gradient norms and gradients of two steps, the final weights, and bit for bit the initial ones.
Of the pairs the fast suite has those of ``risky_pairs``. ``make parity`` trains ten steps and writes the errors of all
cases to docs/parity.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.parity import cases
from tests.parity.cases import CLIP, FACTORS, Case, case_of, few, fits, risky_pairs, short
from tests.parity.lab import Lab, asked
from tests.parity.result import TOLERANCE, Errors, compare

PAIRWISE = [short(case) for case in cases.pairwise_cases()]
BF16 = cases.bf16_cases()  # whole: over fewer steps the largest rounding is a matter of luck
COMPILED = [short(case) for case in cases.compiled_cases()]
SABOTAGED = [(short(case), error) for case, error in cases.sabotaged_cases()]
ROUNDED = [case for case in [*BF16, *COMPILED] if case.spread.bf16]
PROBLEMS = list(dict.fromkeys(case.one_rank_fp32 for case in [*PAIRWISE, *COMPILED]))


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    bounds = [case.one_rank for case in ROUNDED]
    return lab_of([*asked(request), *bounds], tmp_path_factory.mktemp("parity"))


def lab_of(layouts: list[Case], folder: Path) -> Lab:
    """For layouts and for what they are compared with."""
    return Lab([*layouts, *(single for case in layouts for single in (case.one_rank, case.one_rank_fp32))], folder)


def some_slow(cases: list[Case], fast: list[Case]) -> list[Any]:
    """Cases that are not in ``fast`` are left to the slow suite."""
    return [pytest.param(case, id=str(case), marks=[] if case in fast else [pytest.mark.slow]) for case in cases]


def errors(lab: Lab, case: Case) -> Errors:
    """Distance from one rank, which must have started from the same bits."""
    got, expected = lab.result(case), lab.result(case.one_rank)
    for name, tensor in expected.initial.items():
        assert torch.equal(got.initial[name], tensor), f"initial {name}"
    return compare(got, expected)


def test_the_set_covers_every_pair() -> None:
    covered = {pair for case in PAIRWISE for pair in cases.pairs_of(_factors(case))}
    assert cases.valid_pairs() <= covered
    assert max(case.spread.world_size for case in PAIRWISE) == cases.MAX_WORLD


def _factors(case: Case) -> dict[str, object]:
    values = vars(case.problem) | vars(case.spread) | {"tensor": (case.spread.tp, case.spread.sp)}
    return {name: values[name] for name in FACTORS}


@pytest.mark.parametrize("case", some_slow(PAIRWISE, few(PAIRWISE, risky_pairs)))
def test_layout_equals_one_rank(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_one_rank_equals_plain_torch(lab: Lab, case: Case) -> None:
    found = compare(lab.result(case), lab.reference(case))
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("case", [case for case in PROBLEMS if case.problem.clip], ids=str)
def test_clipping_bites_at_every_step(lab: Lab, case: Case) -> None:
    assert min(lab.result(case).norms) > CLIP


@pytest.mark.parametrize("case", some_slow(COMPILED, COMPILED[:1]))
def test_compiled_layout_equals_one_rank_without_compile(lab: Lab, case: Case) -> None:
    if case.spread.bf16:
        within_rounding(lab, case, ROUNDED)
    else:
        assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", some_slow(BF16, [BF16[0], BF16[3], BF16[5]]))
def test_bf16_layout_is_as_close_as_rounding_allows(lab: Lab, case: Case) -> None:
    within_rounding(lab, case, ROUNDED)


def within_rounding(lab: Lab, case: Case, rounded: list[Case]) -> None:
    """A layout in bf16 is within twice the distance that bf16 has from fp32 on one rank: both ends round.

    That distance is the problem's own, but for the loss and the norm, each one number in which roundings may cancel:
    there it is the largest of all ``rounded`` problems. (A norm is off by no more than its gradient, whose bound is
    wider still.)
    """
    found, own = errors(lab, case), rounding(lab, case)
    bounds = {name: 2 * getattr(own, name) for name in ("gradient", "weight")}
    bounds |= {name: 2 * max(getattr(rounding(lab, one), name) for one in rounded) for name in ("loss", "norm")}
    assert bounds["norm"] <= bounds["gradient"]
    for name, bound in bounds.items():
        assert 0 < getattr(found, name) <= bound, (name, found, bounds)


def rounding(lab: Lab, case: Case) -> Errors:
    """What bf16 does to this problem on one rank."""
    return compare(lab.result(case.one_rank), lab.result(case.one_rank_fp32))


@pytest.mark.parametrize(("case", "error"), SABOTAGED, ids=str)
def test_a_bug_is_seen(lab: Lab, case: Case, error: str) -> None:
    """The control: known bugs of parallel training make the error at least a hundred times what is tolerated, or make
    ranks disagree about what they share."""
    if error == "copies":
        with pytest.raises(AssertionError, match="copies of .* differ between ranks"):
            lab.result(case)
    else:
        assert getattr(errors(lab, case), error) > 100 * TOLERANCE


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    members = cases.product_cases()
    return Lab([*members, *(case.one_rank for case in members)], tmp_path_factory.mktemp("product"))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.product_cases(), ids=str)
def test_every_layout_equals_one_rank(product: Lab, case: Case) -> None:
    assert errors(product, case).worst <= TOLERANCE, errors(product, case)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return (tmp_path_factory.mktemp("random") for _ in iter(int, 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=50, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FACTORS.items()}).filter(fits))
def test_random_layouts_equal_one_rank(folders: Iterator[Path], values: dict[str, object]) -> None:
    case = case_of(values)
    found = errors(Lab([case, case.one_rank], next(folders)), case)
    assert found.worst <= TOLERANCE, found
