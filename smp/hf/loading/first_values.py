"""First values of a model's parameters by transformers' own rules, each parameter drawn by itself.

transformers asks every module, children before parents, for its first values, by the ``_init_weights`` of the nearest
``PreTrainedModel`` around it. A rule may write parameters of other modules than the one that it is asked for (GPT-2's
scales the output projections of all layers). So all rules run once on a twin without weights
(:mod:`smp.hf.loading.twins`), which shows who writes what; then a parameter is drawn by running its writers on a twin
in which it alone is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config.schema import ConfigError
from smp.hf.adapters import base_of
from smp.hf.loading.twins import twin_of
from smp.parallel.rng import stable_hash

_ELSEWHERE = "build the model on the CPU, the same on every rank, or on rank 0 with load_state_dict_from_rank0=True"


@dataclass(frozen=True)
class Rule:
    """One module and the rules that give it first values.

    Attributes:
        name: of the module.
        module: twin.
        owner: twin of the transformers model whose rules are asked; None: there is none around it.
    """

    name: str
    module: nn.Module
    owner: Any

    def run(self) -> None:
        """Give the module's parameters and buffers their first values.

        Raises:
            ConfigError: there are no rules.
        """
        if not hasattr(self.owner, "_init_weights"):
            raise ConfigError(f"{self.name}: no _init_weights, transformers' rules for first values, around it")
        with torch.no_grad():
            self.owner._init_weights(self.module)


class FirstValues:
    """The rules of ``model``, which may be cut, sharded and on any device.

    Attributes:
        rules: by the name of the module, in transformers' order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.twin = twin_of(model, tied=False)  # tied parameters have the values that their first home gets
        self.rules = {rule.name: rule for rule in _in_order("", self.twin, None)}
        self._home: dict[str, tuple[nn.Module, str]] = {}
        self._storages: dict[int, str] = {}
        for name, module in self.twin.named_modules():
            for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._home[_join(name, own)] = module, own
                    # Views share a storage: a rule that writes a view writes the parameter.
                    self._storages[tensor.untyped_storage()._cdata] = _join(name, own)
        self._source = _sources_of_tied(model)

    @cached_property
    def writers(self) -> dict[str, list[Rule]]:
        """For each parameter or buffer the rules that write it, in order; shared tensors are under the first of their
        names.

        Raises:
            ConfigError: a rule does not run without weights.
        """
        writers: dict[str, list[Rule]] = {}
        # No GPU generators are saved: rules run on the meta device here and draw nothing.
        with torch.random.fork_rng(devices=[]):
            for rule in self.rules.values():
                # In the order of transformers: a later rule may overwrite or scale what an earlier
                # one wrote.
                with _Written() as mode, _told_of_drawing(mode):
                    try:
                        rule.run()
                    except (RuntimeError, NotImplementedError) as wrong:
                        raise ConfigError(
                            f"{rule.name} ({type(rule.module).__name__}): transformers' rules for first values do not "
                            f"run without weights: {str(wrong).splitlines()[0]}"
                        ) from wrong
                for storage in mode.storages & self._storages.keys():
                    writers.setdefault(self._storages[storage], []).append(rule)
        return writers

    @torch.no_grad()
    def draw(self, name: str, seed: int) -> torch.Tensor:
        """A whole parameter on the CPU, with the same bits whatever is drawn before or after.

        Raises:
            ConfigError: no rule gives it a value, or not to all of it.
        """
        name = self._source.get(name, name)
        rules = self.writers.get(name, [])
        module, own = self._home[name]
        meta = module._parameters[own]
        assert meta is not None
        # NaN marks what no rule writes; integers have none.
        empty = torch.nan if meta.is_floating_point() else 0
        real = nn.Parameter(torch.full(meta.shape, empty, dtype=meta.dtype), requires_grad=False)
        # Only this parameter is real: writes to others go to the meta device and cost nothing.
        module._parameters[own] = real
        try:
            # The generator is seeded for each rule: the value depends on seed, rule and name only.
            for rule in rules:
                with torch.random.fork_rng(devices=[]):
                    # All that a CPU generator takes of it; torch.manual_seed would seed GPUs too, for good.
                    torch.default_generator.manual_seed(stable_hash(seed, rule.name, name) & 0xFFFFFFFF)
                    rule.run()
        except NotImplementedError as wrong:
            raise ConfigError(f"{name}: its first value follows from other parameters: {_ELSEWHERE}") from wrong
        finally:
            module._parameters[own] = meta
        if not rules or real.isnan().any():
            raise ConfigError(
                f"{name}: transformers' rules give {type(self.twin).__name__} no first value for it: {_ELSEWHERE}"
            )
        return real.detach()

    def buffers(self, name: str, empty: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers of the module ``name`` by the rules that write them; others keep their values of ``empty``."""
        module = self.rules[name].module
        asked = {rule.name for own in empty for rule in self.writers.get(_join(name, own), [])}
        meta = dict(module._buffers)
        module._buffers.update(empty)
        try:
            # All rules that write one of the buffers, in transformers' order.
            for rule in self.rules.values():
                if rule.name in asked:
                    rule.run()
            return {own: module._buffers[own] for own in empty}  # type: ignore[misc]
        finally:
            module._buffers.update(meta)


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _sources_of_tied(model: Any) -> dict[str, str]:
    """For each tied parameter the name of the one that it is tied to: transformers ties after drawing, so that one's
    value stays."""
    targets = getattr(base_of(model)[0], "all_tied_weights_keys", None) or {}
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {
        name: next((other for other in names if other not in targets), names[0])
        for names in groups.values()
        for name in names
    }


def _in_order(name: str, module: nn.Module, owner: Any) -> Iterator[Rule]:
    """Rules in the order of transformers' ``initialize_weights``: children first, each by the rules of the nearest
    model around it."""
    owner = module if hasattr(module, "_init_weights") and hasattr(module, "initialize_weights") else owner
    for child_name, child in module.named_children():
        yield from _in_order(_join(name, child_name), child, owner)
    yield Rule(name, module, owner)


@contextmanager
def _told_of_drawing(written: _Written) -> Iterator[None]:
    """Report every tensor that torch's initializers are given to ``written``: some of them do nothing on the meta
    device."""
    from transformers import initialization

    functions: Any = initialization.TORCH_INIT_FUNCTIONS
    known = dict(functions)

    def telling(function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        written.storages.add(tensor.untyped_storage()._cdata)
        return function(tensor, *args, **kwargs)

    functions.update({name: partial(telling, known[name]) for name in known})
    try:
        with initialization.guard_torch_init_functions():  # a rule may call torch's own
            yield
    finally:
        functions.update(known)


class _Written(TorchDispatchMode):
    """A dispatch mode that collects the storages of tensors written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        for argument, value in zip(func._schema.arguments, args, strict=False):
            given[argument.name] = value
        # alias_info of the operator's schema says which arguments it writes.
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))
