"""Sources of classes and functions are those that ``inspect`` finds."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from smp.hf.sources import source_of

MODULE = '''
import functools

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@functools.total_ordering
class A:
    x = 1

    def __lt__(self, other): return True

    @decorated
    def forward(self):
        """Two
  lines."""
        return self.x

    @staticmethod
    def free(): return 1

    class Inner:
        async def later(self): pass

try:
    import absent_package
except ImportError:
    class Fallback(A): pass

if True:
    class Chosen(A):
        def forward(self): return 2
else:
    class Chosen: pass

def makes():
    class Local: y = 1
    return Local

one = lambda: 1
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "with_sources.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("with_sources", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "with_sources", made)
    spec.loader.exec_module(made)
    return made


def with_members(things: list[Any]) -> Iterator[Any]:
    for thing in things:
        yield thing
        if inspect.isclass(thing):
            yield from (getattr(thing, name) for name, own in vars(thing).items() if inspect.isfunction(own))


def test_sources_are_those_of_inspect(module: ModuleType) -> None:
    things = [module.A, module.A.Inner, module.Fallback, module.Chosen, module.makes(), module.makes, module.one]
    things += [module.A.free, module.decorated]
    for thing in with_members(things):
        assert source_of(thing) == inspect.getsource(thing), thing


def test_of_a_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    own = modeling_llama.__name__
    kinds = [kind for kind in vars(modeling_llama).values() if getattr(kind, "__module__", "") == own]
    assert len(kinds) > 10
    for kind in with_members(kinds):
        if kind.__module__ == own:
            assert source_of(kind) == inspect.getsource(kind), kind


def test_what_has_no_file_is_an_error() -> None:
    made = type("Made", (), {"__module__": __name__})
    for thing, error in ((made, OSError), (int, TypeError), (len, TypeError)):
        for read in (inspect.getsource, source_of):
            with pytest.raises(error):
                read(thing)
