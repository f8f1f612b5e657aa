"""The parity matrix on NCCL, one GPU for each rank: every layout that this machine has GPUs for equals one GPU."""

from __future__ import annotations

import pytest
import torch

from tests.parity import cases, pipeline_cases
from tests.parity.cases import Case
from tests.parity.lab import Lab
from tests.parity.result import TOLERANCE
from tests.parity.test_matrix import errors

pytestmark = pytest.mark.gpu
CASES = [
    case
    for case in (*cases.pairwise_cases(), *pipeline_cases.pipeline_cases(), *pipeline_cases.special_cases())
    if case.spread.world_size > 1 and not case.spread.compile
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    here = [case for case in CASES if case.spread.world_size <= torch.cuda.device_count()]
    return Lab([*here, *(case.one_rank for case in here)], tmp_path_factory.mktemp("parity"), "cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_on_nccl_equals_one_gpu(request: pytest.FixtureRequest, case: Case) -> None:
    needed, there = case.spread.world_size, torch.cuda.device_count()
    if needed > there:
        pytest.skip(f"needs {needed} GPUs, this machine has {there}")
    lab = request.getfixturevalue("lab")
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)
