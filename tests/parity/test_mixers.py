"""Every kind of mixer trains the same in every layout, and like plain torch: the whole product, ten steps."""

from __future__ import annotations

import pytest

from tests.parity.cases import Case
from tests.parity.lab import Lab
from tests.parity.mixer_cases import LAYOUTS, MIXERS, cells
from tests.parity.result import TOLERANCE, compare
from tests.parity.test_matrix import errors, lab_of

pytestmark = pytest.mark.slow
CELLS = cells()
CASES = list(dict.fromkeys(CELLS.values()))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(CASES, tmp_path_factory.mktemp("mixers"))


def test_the_product_leaves_out_what_is_refused() -> None:
    assert {(mixer, layout) for mixer in MIXERS for layout in LAYOUTS} - CELLS.keys() == {("dsa", "compile")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_trains_like_one_rank(lab: Lab, case: Case) -> None:
    found = errors(lab, case)
    print("cell", found)
    assert found.worst <= TOLERANCE, found


@pytest.mark.parametrize("case", list(dict.fromkeys(case.one_rank_fp32 for case in CASES)), ids=str)
def test_one_rank_equals_plain_torch(lab: Lab, case: Case) -> None:
    found = compare(lab.result(case), lab.reference(case))
    assert found.worst <= TOLERANCE, found
