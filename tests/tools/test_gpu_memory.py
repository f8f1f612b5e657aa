"""The comparison of predicted with measured memory can fail."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gpu_memory", BENCHMARKS / "gpu_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_prediction_that_is_off_fails(gpu_memory: Any) -> None:
    assert gpu_memory.compared("run", 0.0, 0.47)[1] is False
    assert gpu_memory.compared("run", 0.985, 1.0)[1] and gpu_memory.compared("run", 1.015, 1.0)[1]
    assert not gpu_memory.compared("run", 0.97, 1.0)[1] and not gpu_memory.compared("run", 1.03, 1.0)[1]
    assert gpu_memory.compared("run", 1.0, "out of memory") == ("run: predicted 1.000 GB, out of memory", False)


def test_what_was_allocated_at_once_is_read_from_a_profile(gpu_memory: Any, tmp_path: Path) -> None:
    changes = [(3, -10), (1, 10), (2, 20), (4, 5)]
    events = [{"name": "[memory]", "ts": ts, "args": {"Bytes": size}} for ts, size in changes]
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank_00000.trace.json").write_text(json.dumps({"traceEvents": [*events, {"name": "mm"}]}))
    assert gpu_memory.allocated(tmp_path) == 30
