"""``init_process_group("smp")`` and ``("smddp")`` after ``import smp`` alone, which loads no torch: the names are made
known as soon as torch.distributed is there, and what they stand for is loaded when a group is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_TORCH = "torch.distributed.distributed_c10d"
_CREATORS = {"smp": "create", "smddp": "create_smddp"}


def register() -> None:
    """Now, or when torch.distributed is imported."""
    module = sys.modules.get(_TORCH)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    else:
        sys.meta_path.insert(0, _Finder())


def _register(module: Any) -> None:
    for name in _CREATORS.keys() - set(module.Backend.backend_list):
        module.Backend.register_backend(name, _Creator(name), extended_api=True, devices=["cpu", "cuda"])


class _Creator:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> Any:
        return getattr(import_module("smp.parallel.backend"), _CREATORS[self.name])(*args)


class _Finder(MetaPathFinder):
    """Finds torch.distributed's module once, as Python does, and registers when it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _register(module)

            loader.exec_module = exec_module
        return spec
