"""``make gpu`` installs nothing: a package that only extras bring may not keep pytest from collecting other tests."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = {"smp", "tests", "tools", "examples", "benchmarks", "pretrain_gpt", "finetune"}
BASE = {"torch", "numpy", "einops", "jinja2", "sentencepiece", "tokenizers", "tensorboard", "yaml", "tqdm", "xxhash"}
FOR_TESTS = {"pytest", "hypothesis", "safetensors", "packaging", "setuptools"}


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
        if "importorskip" in ast.unparse(statement) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            break  # what follows is for machines that have it
        found |= set(imported(statement))
    return found - OURS - BASE - FOR_TESTS - set(sys.stdlib_module_names)


def test_tests_are_collected_without_extras() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert {str(path.relative_to(ROOT)): names for path in files if (names := needless(path))} == {}
