"""Where a step's time goes: what a profile's events are counted as."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("step_profile", BENCHMARKS / "step_profile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "step_profile", module)
    spec.loader.exec_module(module)
    return module


LOW = "c10::BFloat16"
OPERATORS: list[tuple[str, float, float, list[list[int]], list[str]]] = [
    # name, begin, microseconds, shapes and types of inputs; one in another is called by it
    ("aten::linear", 0, 20, [[64, 32], [16, 32]], [LOW, LOW]),
    ("aten::mm", 5, 10, [[64, 32], [32, 16]], [LOW, LOW]),
    ("aten::mm", 30, 10, [[64, 32], [32, 4096]], [LOW, LOW]),
    ("smp::norm", 50, 10, [[64, 32], [64, 32], [32]], [LOW, LOW, LOW]),
    ("smp::swiglu_backward", 70, 10, [[64, 32]] * 3, [LOW] * 3),
    ("aten::_to_copy", 90, 10, [[64, 32]], [LOW]),
    ("aten::copy_", 92, 5, [[64, 32], [64, 32]], ["float", LOW]),
    ("aten::copy_", 110, 5, [[64, 32], [64, 32]], [LOW, LOW]),
    ("aten::_scaled_dot_product_cudnn_attention", 120, 20, [[1, 2, 64, 16]], [LOW]),
    ("aten::_cudnn_attention_forward", 122, 10, [[1, 2, 64, 16]], [LOW]),
    ("Optimizer.step#AdamW.step", 150, 50, [], []),
    ("aten::_fused_adamw_", 160, 20, [[[64, 32]]] * 4, ["TensorList"] * 4),  # type: ignore[list-item]
    ("aten::embedding_dense_backward", 210, 5, [[64, 32]], [LOW]),
]
LAUNCHES = {1: 4.0, 2: 8.0, 3: 1.0, 4: 2.0, 6: 1.5, 7: 0.5, 9: 6.0, 11: 12.0, 12: 3.0}
"""Operator by its place -> microseconds of its kernel; each begins 10 after the last one began."""


def strides(shape: list[int]) -> list[int]:
    return [shape[1], 1] if len(shape) == 2 else [1] * len(shape)


def trace() -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    for number, (name, begin, took, shapes, types) in enumerate(OPERATORS):
        given = {"Input Dims": shapes, "Input type": types, "Input Strides": [strides(s) for s in shapes]}
        event = {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "pid": 1, "ts": begin, "dur": took}
        events.append({**event, "args": {"External id": number, **given}})
    for turn, (number, took) in enumerate([*LAUNCHES.items(), (99, 2.0)]):
        kernel = {"ph": "X", "cat": "kernel", "name": f"kernel_{number}", "tid": 7, "pid": 0, "ts": 1000 + 10 * turn}
        events.append({**kernel, "dur": took, "args": {"External id": number}})
    return {"traceEvents": events}


def work(table: Any) -> Any:
    from dataclasses import replace

    sizes = {"num_layers": 1, "vocab_size": 4096, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 16}
    return table.Work(replace(table.MODEL, **sizes), 1, 64, "cuda")


def test_kernels_count_for_the_operator_that_launched_them(table: Any) -> None:
    found = table.read(trace(), "cuda")
    rows = table.by_kind(found, work(table), rate=1e12, bandwidth=1e12)
    took = {kind: round(row.seconds * 1e6, 3) for kind, row in rows.items()}
    assert took == {
        "optimizer": 12.0,
        "head and loss": 8.0,
        "attention": 6.0,
        "products": 4.0,
        "embedding": 3.0,
        "SwiGLU": 2.0,
        "other operations": 2.0,  # of a kernel that no operator launched
        "casts": 1.5,
        "norms": 1.0,
        "copies, zeros": 0.5,
        "nothing (gaps)": 54.0,
    }
    # Ten kernels that begin each 10 after the last, of 40 together; one is still there when the next begins, for 2.
    assert found.seconds * 1e6 == pytest.approx(92) and found.idle * 1e6 == pytest.approx(92 - (40 - 2))


def test_limits_are_flops_and_bytes(table: Any) -> None:
    found = table.read(trace(), "cuda")
    rows = table.by_kind(found, work(table), rate=1e14, bandwidth=1e14)
    two = 64 * 32 * 2  # bytes of a tensor in bf16
    limits = {kind: round(row.limit * 1e14) for kind, row in rows.items()}
    assert limits["products"] == 2 * 64 * 32 * 16 and limits["head and loss"] == 2 * 64 * 32 * 4096
    assert limits["attention"] == 14 * 64 * 32 * 32
    assert limits["norms"] == 4 * two + 64  # x, what is added, their sum, y; and the weight
    assert limits["SwiGLU"] == 5 * two and limits["casts"] == 3 * two
    assert limits["optimizer"] == 28 * table.count_parameters(work(table).model, 4096).total
    slow = table.by_kind(found, work(table), rate=1e12, bandwidth=1e12)
    assert slow["head and loss"].limit == slow["head and loss"].seconds  # not more than what it took: 16.8 us of FLOPs


def test_products_are_told_by_shape(table: Any) -> None:
    found = table.by_shape(table.read(trace(), "cuda"))
    told = {table.shape_of(*key): (row.calls, flops) for key, (row, flops) in found.items()}
    assert told == {
        "64 x 32 x 4096, bfloat16, nn": (1, 2 * 64 * 32 * 4096),
        "64 x 32 x 16, bfloat16, nn": (1, 2 * 64 * 32 * 16),
    }


def test_on_a_cpu_an_operators_time_is_its_own(table: Any) -> None:
    found = table.read(trace(), "cpu")
    rows = table.by_kind(found, work(table), rate=1e12, bandwidth=1e12)
    took = {kind: row.seconds * 1e6 for kind, row in rows.items()}
    assert took["products"] == pytest.approx(10) and took["other operations"] == pytest.approx(10 + 5)
    assert took["attention"] == pytest.approx(20) and took["optimizer"] == pytest.approx(20)
    assert took["casts"] == pytest.approx(5)


def test_overlapping_kernels_leave_no_gap(table: Any) -> None:
    assert table.covered([(5, 9), (0, 6), (12, 15)]) == (15, 3)
    assert table.covered([]) == (0.0, 0.0)


def test_a_product_alone_has_the_same_strides(table: Any) -> None:
    import torch

    left = table.Tensor((8, 4), (1, 8), torch.float32)
    clock = table.Clock("cpu", 1)
    assert table.alone("aten::mm", (left, table.Tensor((4, 6), (6, 1), torch.float32)), clock) > 0
    assert table.alone("aten::_scaled_mm", (left, left), clock) is None
