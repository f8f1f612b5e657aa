"""Parameters that a module reads from its children, as mixers with a convolution read ``self.conv1d.weight`` to hand it
to a kernel, so that the child's own forward pass does not run. Found in the sources of the modules' classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from torch import nn

from smp.config.schema import ConfigError
from smp.hf.rows import REPLICATE, SUMMED

_KIND = ("dtype", "device", "shape", "size", "dim", "ndim")
_NOT_ITS_KIND = rf"\b(?!\.(?:{'|'.join(_KIND)})\b)"
"""After a tensor's name: its numbers are wanted, not what is known of it without them."""
Borrowed = tuple[tuple[Any, str], ...]


def borrowed_parameters(
    model: nn.Module, wholes: Mapping[str, tuple[str, ...]], placed: Collection[str]
) -> dict[str, Borrowed]:
    """By a module's name: (child, parameter's name) of what its class reads as ``self.child.name``.

    Args:
        wholes: modules by their name, with the own parameters that every rank has whole. Modules that are cut are not
            among them: who reads a part of a weight as if it were all of it would be wrong.
        placed: all modules whose parameters rest as DTensors.

    Raises:
        ConfigError: parameters are read outside of any forward pass, or in that of a module further up.
    """
    _check_depth(model, placed)
    found = {}
    for name, module in model.named_modules():
        own = {child: wholes.get(f"{name}.{child}" if name else child, ()) for child, _ in module.named_children()}
        read = _children_read(_source_of(type(module)), own)
        if read:
            found[name] = tuple((module.get_submodule(child), parameter) for child, parameter in read)
    for name, module in model.named_modules():
        for child, method in _methods_called(module):
            full = f"{name}.{child}" if name else child
            if _reads(module.get_submodule(child), method, wholes.get(full, ()), found.get(full, ())):
                raise ConfigError(
                    f"{full}: {type(module).__name__} calls its {method}(), which reads parameters outside of a "
                    "forward pass; smp.transform cannot cut such a model"
                )
    return found


def _check_depth(model: nn.Module, placed: Collection[str]) -> None:
    """No forward pass reads a parameter of its module's grandchildren: it would get a DTensor."""
    for name, module in model.named_modules():
        source = _source(type(module).forward)
        for child, parameter in _read_deeper(source):
            full = f"{name}.{child}" if name else child
            if full in placed and parameter in model.get_submodule(full)._parameters:
                raise ConfigError(
                    f"{full}: {type(module).__name__} reads its {parameter} from further up; smp.transform cannot cut "
                    "such a model"
                )


def _read_deeper(source: str) -> Iterator[tuple[str, str]]:
    """(path, attribute) of what may be a grandchild's parameter: each beginning of ``self.a.b.weight.norm``."""
    for chain in re.findall(r"\bself((?:\.\w+){3,})", source):
        words = chain.split(".")[1:]
        for end in range(2, len(words)):
            if not set(words[end + 1 : end + 2]) & set(_KIND):
                yield ".".join(words[:end]), words[end]


def whole_parameters(steps: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Of a plan's steps: names of modules' own parameters that every rank has whole."""
    return {name: tuple(step.cuts) for name, step in steps.items() if step.style in (REPLICATE, SUMMED)}


def _children_read(source: str, own: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    pairs = set(re.findall(rf"\bself\.(\w+)\.(\w+){_NOT_ITS_KIND}", source))
    return [(child, parameter) for child in own for parameter in own[child] if (child, parameter) in pairs]


def _reads(module: nn.Module, method: str, own: tuple[str, ...], borrowed: Borrowed) -> bool:
    """Whether a method's code names parameters of its module's own, or those that the module borrows."""
    source = _source(getattr(type(module), method))
    names = {id(child): name for name, child in module.named_children()}
    words = [rf"{names[id(child)]}\.{parameter}" for child, parameter in borrowed]
    return any(re.search(rf"\bself\.{word}{_NOT_ITS_KIND}", source) for word in (*own, *words))


def _methods_called(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(child, method) of children whose own methods, other than their forward passes, a module's class calls."""
    children = dict(module.named_children())
    for child, method in dict.fromkeys(re.findall(r"\bself\.(\w+)\.(\w+)\(", _source_of(type(module)))):
        if (
            child in children
            and method != "forward"
            and inspect.isfunction(getattr(type(children[child]), method, None))
        ):
            yield child, method


def _source_of(kind: type) -> str:
    """Of a class and those that it inherits from, without torch's."""
    return "".join(_source(base) for base in kind.__mro__ if not base.__module__.startswith(("torch", "builtins")))


@cache  # of a class with many modules, read once
def _source(what: Any) -> str:
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):  # made without a file: what it reads stays a DTensor, which torch refuses aloud
        return ""
