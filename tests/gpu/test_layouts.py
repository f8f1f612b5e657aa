"""Layouts of several processes on one card, beside one process on it: streams, events, copies and kernels as they run
under NCCL, which takes one process for each GPU; see ``tests/one_card.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import Case
from tests.parity.lab import Lab, asked
from tests.parity.offload_cases import without_offload
from tests.parity.one_card_cases import GATHERED, LIKE_ONE_RANK, OFFLOADED
from tests.parity.result import TOLERANCE
from tests.parity.test_fp8 import without_gather
from tests.parity.test_matrix import errors
from tests.parity.test_offload import differing

pytestmark = pytest.mark.gpu


def beside(case: Case) -> Case:
    """What a layout is compared with."""
    if case in GATHERED:
        return without_gather(case)
    return without_offload(case) if case in OFFLOADED else case.one_rank


def lab_of(layouts: list[Case], folder: Path) -> Lab:
    return Lab([one for case in layouts for one in (case, beside(case))], folder, "one card")


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(asked(request), tmp_path_factory.mktemp("one_card"))


@pytest.mark.parametrize("case", LIKE_ONE_RANK, ids=str)
def test_a_layout_on_one_card_equals_one_process(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", OFFLOADED, ids=str)
def test_offload_on_one_card_changes_no_bit(lab: Lab, case: Case) -> None:
    assert differing(lab, case) == []


@pytest.mark.parametrize("case", GATHERED, ids=str)
def test_a_gather_of_8_bits_on_one_card_changes_none(lab: Lab, case: Case) -> None:
    got, want = lab.result(case), lab.result(without_gather(case))
    assert got.losses == want.losses and got.norms == want.norms
