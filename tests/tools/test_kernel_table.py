"""The rows of ``benchmarks/kernels.py`` whose ceiling is arithmetic, on a processor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    spec = importlib.util.spec_from_file_location("kernels_table", BENCHMARKS / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_table", module)
    spec.loader.exec_module(module)
    return module


def test_products_are_drawn_as_the_table_draws(kernels: Any) -> None:
    """Each row's function runs; the table's own ``draw`` says what it takes."""
    ran = []

    def add_product(name: str, version: str, flops: float, run: object) -> None:
        if callable(run):
            run()
            ran.append((name, version))

    table = SimpleNamespace(
        device="cpu",
        sizes=SimpleNamespace(
            tokens=32, length=16, hidden=16, vocabulary=32, heads=2, groups=2, head_dim=8, dtype=torch.bfloat16
        ),
        say=lambda *_: None,
        add_product=add_product,
    )
    table.draw = lambda *arguments: kernels.Table.draw(table, *arguments)
    kernels.products(table, False)
    assert ("linear + cross-entropy", "smp torch") in ran and ("causal attention", "flash") in ran
    assert ("8 experts, dw", "smp torch") in ran


def test_a_version_that_fails_leaves_the_others_and_fails_the_table(kernels: Any) -> None:
    """A card is there for minutes: one kernel that does not fit it may not cost all rows."""

    def bad(*_: torch.Tensor) -> torch.Tensor:
        raise ValueError("out of resource: shared memory\nand more")

    said: list[str] = []
    table = kernels.Table.__new__(kernels.Table)
    table.sizes, table.say, table.device = SimpleNamespace(dtype=torch.float32), said.append, "cpu"
    table.bandwidth, table.product, table.failed = 1e9, 1e9, 0
    table.clock = SimpleNamespace(seconds=lambda run, prepare=lambda: None: (prepare(), run(), 1.0)[-1])
    versions = {"liger": bad, "smp triton": bad, "eager": torch.sin, "smp cuda": None}
    table.add(kernels.Case("sine", [(4, 4)], versions, 32, 48))
    assert table.failed == 1  # another program's own trouble is not ours
    assert [line.split()[1:4] for line in said[:2]] == [
        ["liger", "ValueError:", "out"],
        ["smp", "triton", "ValueError:"],
    ]
    assert [line.split()[1:3] for line in said[2:]] == [
        ["forward", "eager"],
        ["backward", "eager"],
        ["forward", "smp"],
        ["backward", "smp"],
    ]
    table.add_product("product", "smp triton", 8.0, bad)
    assert table.failed == 2 and "shared memory" in said[-1]
