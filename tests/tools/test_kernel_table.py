"""The rows of ``benchmarks/kernels.py`` whose ceiling is arithmetic, on a processor."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_products_are_drawn_as_the_table_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's function runs; the table's own ``draw`` says what it takes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    spec = importlib.util.spec_from_file_location("kernels_table", BENCHMARKS / "kernels.py")
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_table", kernels)
    spec.loader.exec_module(kernels)
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
