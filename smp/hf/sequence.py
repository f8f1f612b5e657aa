"""Sequence parallelism in a transformed model: between blocks each tensor-parallel rank has some of the tokens.

    first layer      (batch, n, hidden) -> this rank's (batch, n/tp, hidden)
    norm             of these tokens; its gradient is summed over the ranks
    attention, MLP   gather all tokens, columns and rows as without it, the sum is scattered instead of reduced
    last layer       -> (batch, n, hidden)

In training only: in evaluation, and while text is generated, the stream is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from smp.config.schema import ConfigError
from smp.hf.adapters import base_of
from smp.hf.plan import Plan
from smp.hf.rows import COLUMN, EXPERTS, REPLICATE, ROW, pattern_of
from smp.parallel.collectives import Group, gather_sequence, split_tokens


def check(model: nn.Module, plan: Plan) -> str:
    """The name of the list of layers of ``model``, whose residual stream can be cut.

    Raises:
        ConfigError: with the module that is not as in a decoder of attention and MLP.
    """
    base, _ = base_of(model)
    if base is not model:
        raise ConfigError("sequence_parallel: not with adapters of peft")
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and _layers(module)]
    if len(lists) != 1:
        raise ConfigError(f"sequence_parallel: {type(model).__name__} has {len(lists)} lists of layers, not one")
    for name, step in plan.steps.items():
        if not name.startswith(f"{lists[0]}."):
            continue
        around = _boundary_of(name, plan)
        alone = around is None and step.style in (*COLUMN, *ROW, EXPERTS)
        whole = step.style == REPLICATE and _computes(model.get_submodule(name), around)
        if alone or whole or around == _layer_of(name, lists[0]):
            raise ConfigError(
                f"sequence_parallel: {pattern_of(name)} ({step.style}) is not as in a decoder of attention and MLP, "
                "which gather tokens when they begin and scatter them when they end"
            )
    _all_scatter(model, plan, lists[0])
    return lists[0]


def _all_scatter(model: nn.Module, plan: Plan, layers: str) -> None:
    """What gathers the tokens when it begins has a rowwise layer, which scatters them again."""
    scattering = {_boundary_of(name, plan) for name, step in plan.steps.items() if step.style in ROW}
    for name in plan.steps:
        around = _boundary_of(name, plan) if name.startswith(f"{layers}.") else None
        if around is not None and around not in scattering:
            raise ConfigError(
                f"sequence_parallel: {pattern_of(around)} ({type(model.get_submodule(around)).__name__}) has columns "
                "that are cut and no rowwise layer: it would gather all tokens and scatter none"
            )


def _computes(module: nn.Module, around: str | None) -> bool:
    """Whether a module that every rank has whole is more than a norm.

    Inside of an attention or MLP that is a matrix, of which all ranks would compute the same; outside of them also a
    convolution: part of a mixer that no plan cuts, which would see this rank's tokens only.
    """
    if around is not None:
        return isinstance(module, nn.Linear)
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _layers(modules: nn.ModuleList) -> bool:
    kinds = [kind.__name__ for module in modules for kind in type(module).__mro__]
    return len(modules) > 0 and kinds.count("GradientCheckpointingLayer") == len(modules)


def _layer_of(name: str, layers: str) -> str:
    return f"{layers}.{name.removeprefix(f'{layers}.').partition('.')[0]}"


def _boundary_of(name: str, plan: Plan) -> str | None:
    """The attention or MLP that a module is part of."""
    parts = name.split(".")
    return next((top for end in range(1, len(parts)) if (top := ".".join(parts[:end])) in plan.boundaries), None)


def install(model: Any, plan: Plan, layers: str, group: Group) -> None:
    """Cut the residual stream of ``model``, whose modules have their forward passes."""
    stack: Any = model.get_submodule(layers)
    for name, module in model.named_modules():
        cut = getattr(module, "smp_cut", None)
        if cut is None or not name.startswith(f"{layers}."):
            continue
        inside = _boundary_of(name, plan) is not None
        cut.tokens = name in plan.boundaries or cut.step.style in ROW or not inside
        if cut.around is not None:
            cut.around.tokens = True
    stack[0].register_forward_pre_hook(_Split(group, tuple(stack.named_modules())[1:]), with_kwargs=True)
    stack[-1].register_forward_hook(_Gather(group))
    model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)


@dataclass(frozen=True)
class _Split:
    """Before the first of the layers.

    Attributes:
        parts: all modules of all layers, and their names.
    """

    group: Group
    parts: tuple[tuple[str, nn.Module], ...]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name, part in self.parts:
            if part.training != module.training:  # each decides by itself whether it has some tokens or all
                raise ConfigError(
                    f"sequence_parallel: layers.{name} is in {'evaluation' if module.training else 'training'} and the "
                    "first layer is not: call train() or eval() of the whole model; requires_grad freezes a layer"
                )
        if not module.training:
            return None
        kwargs = dict(kwargs)
        x = args[0] if args else kwargs.pop("hidden_states")
        if x.ndim != 3 or x.shape[1] % self.group.size:
            raise ConfigError(
                f"sequence_parallel: hidden states {tuple(x.shape)}: {self.group.size} ranks do not divide the length; "
                "pad batches to a multiple, and call model.eval() before generate"
            )
        return (split_tokens(x.transpose(0, 1), self.group).transpose(0, 1), *args[1:]), kwargs


@dataclass(frozen=True)
class _Gather:
    """After the last layer; what follows is the same on all ranks, so gradients are cut."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not module.training:
            return output
        x = output[0] if isinstance(output, tuple) else output  # (batch, n/tp, hidden)
        whole = gather_sequence(x, self.group)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


def _refuse_hidden_states(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if model.training and (kwargs.get("output_hidden_states") or model.config.output_hidden_states):
        raise ConfigError("output_hidden_states: with sequence_parallel a rank has some tokens of them: model.eval()")
