"""Packed documents train alike under every layout, and like plain torch in float64.

Sequences hold several documents that do not see each other. Every way to split meets them once; the whole matrix of
layouts without packing is in test_matrix.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.cases import Case, case_of
from tests.parity.lab import Lab, asked
from tests.parity.result import TOLERANCE, compare
from tests.parity.test_matrix import errors, some_slow

_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": (2, True), "style": "llama", "unequal": True},
    {"tensor": (2, False), "style": "gpt2", "extra": "window", "recompute": "selective"},
    {"tensor": (4, True), "style": "llama", "kv_heads": 2, "dropout": True, "recompute": "full"},
    {"shard": 2, "accumulation": 4, "style": "gpt2", "unequal": True},
    {"pp": 2, "schedule": "1f1b", "accumulation": 4, "style": "gpt2", "layers": 3},
    {"pp": 2, "schedule": "zb-v", "accumulation": 4, "style": "llama", "layers": 5, "tensor": (2, True)},
    {"tensor": (2, True), "style": "llama", "compile": True, "extra": "window"},
)
LAYOUTS = [case_of({**values, "packed": True, "micro_batch": 3, "steps": 2}) for values in _LAYOUTS]
UNPACKED = replace(LAYOUTS[0], problem=replace(LAYOUTS[0].problem, packed=False)).one_rank


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    cases = list(dict.fromkeys([*asked(request), LAYOUTS[0]]))
    one_rank = [single for case in cases for single in (case.one_rank, case.one_rank_fp32)]
    return Lab([*cases, *one_rank, UNPACKED], tmp_path_factory.mktemp("packed"))


NOT_COMPILED = [case for case in LAYOUTS if not case.spread.compile]


@pytest.mark.parametrize("case", some_slow(LAYOUTS, NOT_COMPILED))
def test_layout_equals_one_rank(lab: Lab, case: Case) -> None:
    assert errors(lab, case).worst <= TOLERANCE, errors(lab, case)


@pytest.mark.parametrize("case", some_slow(LAYOUTS, NOT_COMPILED))
def test_one_rank_equals_plain_torch(lab: Lab, case: Case) -> None:
    found = compare(lab.result(case.one_rank), lab.reference(case))
    assert found.worst <= TOLERANCE, found


def test_documents_make_a_difference(lab: Lab) -> None:
    assert lab.result(LAYOUTS[0].one_rank).losses[0] != lab.result(UNPACKED).losses[0]
