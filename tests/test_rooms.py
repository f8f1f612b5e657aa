"""The packages of smp: small enough to look through, described, and without circles of imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp")

SMP = Path(__file__).parents[1] / "smp"
MOST_MODULES = 20


def test_a_package_has_few_modules_and_says_what_is_in_them() -> None:
    for init in SMP.rglob("__init__.py"):
        modules = [path for path in init.parent.glob("*.py") if path != init]
        assert len(modules) <= MOST_MODULES, f"{init.parent}: {len(modules)} modules, cut it into packages"
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{init} does not say what is in it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Types included. Modules without imports are taken away again and again; what is left is in a circle."""
    graph = grimp.build_graph("smp", cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while leaves := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in leaves}
    assert not left, sorted(left)
