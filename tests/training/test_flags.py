"""No setting without a proof: each field of the schema has a test that shows what a real run does differently by it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from smp.config.command_line.fields import settings

HERE = Path(__file__).parent
OTHERS = ("test_runtime", "test_stragglers", "test_spikes", "test_rerun", "test_replica_runs", "test_inprocess")
MODULES = [*sorted(path.stem for path in HERE.glob("test_flags_*.py")), *OTHERS]


def proofs() -> dict[str, list[ModuleType]]:
    """Modules by the settings that a test in them, marked by ``proves``, vouches for."""
    out: dict[str, list[ModuleType]] = {}
    for name in MODULES:
        module = importlib.import_module(f"tests.training.{name}")
        for _, test in inspect.getmembers(module, inspect.isfunction):
            for setting in getattr(test, "proves", ()):
                out.setdefault(setting, []).append(module)
    return out


PROOFS = proofs()


@pytest.mark.parametrize("name", settings())
def test_every_setting_is_proven_to_change_a_run(name: str) -> None:
    assert name in PROOFS, f"{settings()[name].flag} needs a test marked proves({name!r}) in {HERE}/test_flags_*.py"
    flag = settings()[name].flag.removeprefix("--")
    sources = [inspect.getsource(module) for module in PROOFS[name]]
    assert any(f"--{flag}" in source or f"--no-{flag}" in source for source in sources), f"no proof gives --{flag}"


def test_what_is_proven_exists() -> None:
    assert set(PROOFS) <= set(settings())
