"""``make gpu`` installs nothing: a package that only extras bring may not keep pytest from collecting other tests."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = {"smp", "tests", "tools", "examples", "benchmarks", "pretrain_gpt", "finetune"}
BASE = {"torch", "numpy", "einops", "jinja2", "sentencepiece", "tokenizers", "tensorboard", "yaml", "tqdm", "xxhash"}
FOR_TESTS = {"pytest", "hypothesis", "safetensors", "packaging", "setuptools"}
IN_ENVIRONMENT = {"transformers", "peft", "pyarrow"}  # ``make env`` installs them


def imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module:
        return [statement.module.split(".")[0]]
    return []


def needless(path: Path) -> set[str]:
    """Packages that the file imports as soon as it is collected, without ``pytest.importorskip`` before it."""
    found: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and "importorskip" in ast.unparse(statement):
            break  # what follows is for machines that have it
        found |= set(imported(statement))
    return found - OURS - BASE - FOR_TESTS - set(sys.stdlib_module_names)


def test_tests_are_collected_without_extras() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert {str(path.relative_to(ROOT)): names for path in files if (names := needless(path))} == {}


def asked_for(statement: ast.stmt) -> set[str]:
    """Packages without which pytest skips the whole file: those of ``importorskip`` outside functions and classes."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return set()
    return {
        call.args[0].value.split(".")[0]
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("pytest.importorskip", "importorskip")
        if isinstance(call.args[0], ast.Constant)
    }


@cache
def skipped_without(path: Path) -> tuple[set[str], set[str]]:
    """(packages that the file asks for, packages that files of tests which it imports ask for besides)."""
    own: set[str] = set()
    others: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        own |= asked_for(statement)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("tests."):
            other = ROOT / f"{statement.module.replace('.', '/')}.py"  # type: ignore[union-attr]
            if other.exists():
                others |= set().union(*skipped_without(other)) - own
    return own, others


def test_no_file_is_skipped_by_one_that_it_imports() -> None:
    """A file of tests that asks for a package ends the collection of every file that imports from it: where the
    package is missing, as Megatron-Core mostly is, those would be skipped too, although they may not need it."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert skipped_without(ROOT / "tests/convert/test_trained_experts.py")[1] == {"transformers"}
    found = {str(path.relative_to(ROOT)): skipped_without(path)[1] - IN_ENVIRONMENT for path in files}
    assert {path: packages for path, packages in found.items() if packages} == {}
