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
from smp.hf.adapters import layer_under
from smp.hf.planning.rows import REPLICATE, SUMMED, pattern_of
from smp.hf.sources import source_of

_KIND = ("dtype", "device", "shape", "size", "dim", "ndim")
_NOT_ITS_KIND = rf"\b(?!\.(?:{'|'.join(_KIND)})\b)"
"""After a tensor's name: its values are wanted, not only dtype, device or shape."""
_FUSED_OUTPUT = re.compile(r"\boutproj_(?:weight|bias)=self\.(\w+)\.(?:weight|bias)\b")
"""Arguments of Mamba-2's fused kernel, which leaves its last product out where it gets none."""
Borrowed = tuple[tuple[Any, str], ...]


def borrowed_parameters(
    model: nn.Module, wholes: Mapping[str, tuple[str, ...]], placed: Collection[str]
) -> tuple[dict[str, Borrowed], dict[str, set[str]]]:
    """By a module's name: (module below, parameter's name) of what its class reads as ``self.child.name``, or from
    further down; and the module's own methods, besides the forward pass, that read parameters and are called by others.

    Args:
        wholes: modules by their name, with the own parameters that every rank has whole. Modules that are cut are not
            among them: who reads a part of a weight as if it were all of it would be wrong.
        placed: all modules whose parameters rest as DTensors.

    Raises:
        ConfigError: parameters that are cut are read by a module further up.
    """
    of = {id(model.get_submodule(name)): own for name, own in wholes.items()}
    # Two passes: a method may read what its module borrows.
    found = {}
    for name, module in model.named_modules():
        layers = {child: layer_under(layer) for child, layer in module.named_children()}
        own = {child: of.get(id(layer), ()) for child, layer in layers.items()}
        read = _children_read(_source_of(type(module)), own)
        pairs = [(layers[child], parameter) for child, parameter in read] + list(_deeper(model, name, of, placed))
        if pairs:
            found[name] = tuple(pairs)
    methods: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        for child, method in _methods_called(module):
            full = f"{name}.{child}" if name else child
            if _reads(module.get_submodule(child), method, wholes.get(full, ()), found.get(full, ())):
                methods.setdefault(full, set()).add(method)
    return found, methods


def _deeper(
    model: nn.Module, name: str, wholes: Mapping[int, tuple[str, ...]], placed: Collection[str]
) -> Iterator[tuple[nn.Module, str]]:
    """What the forward pass of a module reads of modules below its children."""
    module = model.get_submodule(name)
    for path, parameter in _read_deeper(_source(type(module).forward)):
        full = f"{name}.{path}" if name else path
        if full not in placed or parameter not in model.get_submodule(full)._parameters:
            continue
        below = model.get_submodule(full)
        if parameter not in wholes.get(id(below), ()):
            raise ConfigError(
                f"{full}: {type(module).__name__} reads its {parameter}, which is cut, from further up; "
                f'rows={{"{pattern_of(full)}": "replicate"}} leaves it whole'
            )
        yield below, parameter


def read_from_above(model: nn.Module, below: Collection[nn.Module]) -> bool:
    """Whether a module reads parameters of one of ``below`` in its own forward pass."""
    for module in model.modules():
        if any(module._modules[child] in below for child, _ in children_read(module)):
            return True
        for path, parameter in _read_deeper(_source(type(module).forward)):
            try:
                found = module.get_submodule(path)
            except AttributeError:  # of another class's
                continue
            if found in below and parameter in found._parameters:
                return True
    return False


@cache  # as all that is found in a source: a model has many modules of few classes
def _read_deeper(source: str) -> tuple[tuple[str, str], ...]:
    """(path, attribute) of what may be a grandchild's parameter: each prefix of ``self.a.b.weight.norm``."""
    found = []
    # Longer than self.a.b: a child's own attributes are found elsewhere.
    for chain in re.findall(r"\bself((?:\.\w+){3,})", source):
        words = chain.split(".")[1:]
        for end in range(2, len(words)):
            if not set(words[end + 1 : end + 2]) & set(_KIND):
                found.append((".".join(words[:end]), words[end]))
    return tuple(found)


def whole_parameters(steps: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names of own parameters that every rank has whole, by module, from the steps of a plan."""
    return {name: tuple(step.cuts) for name, step in steps.items() if step.style in (REPLICATE, SUMMED)}


def children_read(module: nn.Module) -> list[tuple[str, str]]:
    """(child, own parameter) for all of its children's parameters that the class of ``module`` reads or passes on, but
    for the output matrix of a fused kernel, which works without."""
    own = {name: tuple(layer_under(child)._parameters) for name, child in module.named_children()}
    return _children_read(_without_fused(_source_of(type(module))), own)


@cache
def _without_fused(source: str) -> str:
    return _FUSED_OUTPUT.sub("", source)


@cache
def _fused_output(source: str) -> str | None:
    found = _FUSED_OUTPUT.search(source)
    return None if found is None else found[1]


def matrix_of_fused_kernel(module: nn.Module) -> str | None:
    """The child whose weight and bias the class of ``module`` passes to a fused kernel as its last product."""
    return _fused_output(_source_of(type(module)))


def _children_read(source: str, own: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    # The source decides, not a run: the model may be on the meta device, and a branch may depend on
    # inputs.
    pairs = _pairs_read(source)
    return [(child, parameter) for child in own for parameter in own[child] if (child, parameter) in pairs]


@cache
def _pairs_read(source: str) -> frozenset[tuple[str, str]]:
    """(child, attribute) of all of ``self.child.attribute`` whose values are wanted."""
    return frozenset(re.findall(rf"\bself\.(\w+)\.(\w+){_NOT_ITS_KIND}", source))


def _reads(module: nn.Module, method: str, own: tuple[str, ...], borrowed: Borrowed) -> bool:
    """Whether a method's code names parameters of its module or those that the module borrows."""
    source = _source(getattr(type(module), method))
    names = {id(below): re.escape(name) for name, below in module.named_modules()}
    words = [rf"{names[id(child)]}\.{parameter}" for child, parameter in borrowed]
    by_its_class = bool(own) and "super()." in source  # ProphetNet's positions, whose class is nn.Embedding
    return by_its_class or any(re.search(rf"\bself\.{word}{_NOT_ITS_KIND}", source) for word in (*own, *words))


def _methods_called(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(child, method) of children's own methods, other than forward, that a module's class calls."""
    children = dict(module.named_children())
    for child, method in _calls(_source_of(type(module))):
        if (
            child in children
            and method != "forward"
            and inspect.isfunction(getattr(type(children[child]), method, None))
        ):
            yield child, method


@cache
def _calls(source: str) -> tuple[tuple[str, str], ...]:
    """(child, method) of all of ``self.child.method(...)``, each once."""
    return tuple(dict.fromkeys(re.findall(r"\bself\.(\w+)\.(\w+)\(", source)))


def _source_of(kind: type) -> str:
    """The source of a class and its bases; of torch's own classes only MultiheadAttention, which reads its child's
    parameters."""
    torchs = ("torch", "builtins")
    bases = [b for b in kind.__mro__ if b is nn.MultiheadAttention or not b.__module__.startswith(torchs)]
    return "".join(map(_source, bases))


@cache  # of a class with many modules, read once
def _source(what: Any) -> str:
    try:
        return source_of(what)
    except (OSError, TypeError):  # made without a file: what it reads stays a DTensor, which torch refuses aloud
        return ""
