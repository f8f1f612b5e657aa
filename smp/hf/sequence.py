"""Sequence parallelism in a transformed model: between blocks each tensor-parallel rank has some of the tokens.

    first layer      (batch, n, hidden) -> this rank's (batch, n/tp, hidden)
    norm             of these tokens; its gradient is summed over the ranks
    attention, MLP   gather all tokens, columns and rows as without it, the sum is scattered instead of reduced
    other blocks     gather all tokens, compute as without it, and keep this rank's: experts with their router, latent
                     attention, projections that every rank has whole, mixers
    last layer       -> (batch, n, hidden)

In training only: in evaluation, and while text is generated, the stream is whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smp.config.schema import ConfigError
from smp.hf.adapters import base_of
from smp.hf.modules import Region
from smp.hf.planning.module_plan import Plan
from smp.hf.planning.rows import REPLICATE, ROW, SUMMED, pattern_of
from smp.parallel.collectives import Group, gather_sequence, split_tokens

_STREAM = ("hidden_states", "x", "input", "inputs")
"""Keyword names of the token tensor in blocks' forward passes."""


@dataclass(frozen=True)
class Stream:
    """What sequence parallelism does to a model.

    Attributes:
        layers: the name of the list of layers.
        whole: names of the blocks in them that compute as without it, on all tokens.
    """

    layers: str
    whole: frozenset[str]


def check(model: nn.Module, plan: Plan) -> Stream:
    """How the residual stream of ``model`` can be cut.

    Raises:
        ConfigError: with the block that keeps columns, or whatever else is not as in a decoder.
    """
    base, _ = base_of(model)
    if base is not model:
        raise ConfigError("sequence_parallel: not with adapters of peft")
    layers = _decoder_layers(model)
    _check_arguments(model, layers)
    whole = set()
    for block, module in _blocks(model, layers):
        # Two kinds of blocks work on a rank's tokens: norms, and blocks that gather at their
        # columns and scatter at their rows. All others get all tokens around them.
        if _is_token_wise(module, block, plan) or _gathers_and_scatters(model, block, layers, plan):
            continue
        _check_closed(block, module, plan)
        whole.add(block)
    return Stream(layers, frozenset(whole))


def _check_arguments(model: nn.Module, layers: str) -> None:
    """Refuse layers that get inputs of all tokens apart from the residual stream (Gemma 3n's per-layer inputs)."""
    for layer in model.get_submodule(layers).children():
        for name in inspect.signature(type(layer).forward).parameters:
            if name.startswith("per_layer_input"):
                raise ConfigError(
                    f"sequence_parallel: {type(layer).__name__} takes {name}, of all tokens, with the residual stream"
                )


def _decoder_layers(model: Any) -> str:
    """The name of the list of layers; for a model with several (vision towers) that of its decoder."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and _layers(module)]
    decoder = model.get_decoder() if len(lists) > 1 and hasattr(model, "get_decoder") else None
    if decoder is not None and decoder is not model:
        own = set(decoder.modules())
        lists = [name for name in lists if model.get_submodule(name) in own]
    if len(lists) != 1:
        raise ConfigError(f"sequence_parallel: {type(model).__name__} has {len(lists)} lists of layers, not one")
    return lists[0]


def _blocks(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the blocks of layers: their children, with lists among these opened."""
    waiting = [(f"{layers}.{number}", layer) for number, layer in model.get_submodule(layers).named_children()]
    while waiting:
        name, module = waiting.pop(0)
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}"
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                waiting.append((full, child))
            else:
                yield full, child


def _is_token_wise(module: nn.Module, block: str, plan: Plan) -> bool:
    """Whether a block has no matrices and every rank has it whole: norms, activations, scales."""
    vectors = all(parameter.ndim < 2 for parameter in module.parameters())
    return vectors and all(plan.steps[name].style == REPLICATE for name in _steps_in(block, plan))


def _steps_in(block: str, plan: Plan) -> list[str]:
    return [name for name in plan.steps if name == block or name.startswith(f"{block}.")]


def _gathers_and_scatters(model: nn.Module, block: str, layers: str, plan: Plan) -> bool:
    """Whether a block is like Llama's attention and MLP: column-parallel layers that read its input, and row-parallel
    ones at its end."""
    steps = _steps_in(block, plan)
    ends = {_boundary_of(name, plan, layers) for name in steps if plan.steps[name].style in ROW}
    for name in steps:
        around, style = _boundary_of(name, plan, layers), plan.steps[name].style
        matrix = any(parameter.ndim > 1 for parameter in model.get_submodule(name).parameters(recurse=False))
        if around is None or not f"{around}.".startswith(f"{block}.") or around not in ends:
            return False
        if style not in ("colwise", "rowwise", SUMMED) and (style != REPLICATE or matrix):
            return False
    return bool(steps)


def _check_closed(block: str, module: nn.Module, plan: Plan) -> None:
    """Check that columns which are cut stay within the block: what enters and leaves it must be whole."""
    styles = [plan.steps[name].style for name in _steps_in(block, plan)]
    if ("colwise" in styles) != ("rowwise" in styles):
        has = "columns that are cut and no rowwise layer" if "colwise" in styles else "a rowwise layer and no columns"
        raise ConfigError(
            f"sequence_parallel: {pattern_of(block)} ({type(module).__name__}) has {has}: what it gives or gets is not "
            "the residual stream"
        )


def _layers(modules: nn.ModuleList) -> bool:
    # transformers' decoder layers all inherit from this class.
    kinds = [kind.__name__ for module in modules for kind in type(module).__mro__]
    return len(modules) > 0 and kinds.count("GradientCheckpointingLayer") == len(modules)


def _boundary_of(name: str, plan: Plan, layers: str) -> str | None:
    """The attention or MLP inside a layer that a module is part of; None: the layer itself, or outside."""
    layer = f"{layers}.{name.removeprefix(f'{layers}.').partition('.')[0]}"
    return next((top for top in _above(name)[:-1] if top in plan.boundaries and top.startswith(f"{layer}.")), None)


def install(model: Any, plan: Plan, stream: Stream, group: Group) -> None:
    """Cut the residual stream of ``model``, whose modules have their new forward passes already."""
    stack: Any = model.get_submodule(stream.layers)
    regions = {name: Region() for name in stream.whole}
    for name, module in model.named_modules():
        cut = getattr(module, "smp_cut", None)
        if cut is None or not name.startswith(f"{stream.layers}."):
            continue
        cut.region = next((regions[top] for top in _above(name) if top in regions), None)
        if cut.region is not None:
            continue
        if _is_layer(name, stream.layers):
            cut.around = None  # its blocks gather tokens, not the layer
        inside = _boundary_of(name, plan, stream.layers) is not None
        # Norms (outside of boundaries) have some tokens each: their gradients are sums over ranks.
        cut.tokens = cut.around is not None or cut.step.style in ROW or not inside
        if cut.around is not None:
            cut.around.tokens = True
    for name, region in regions.items():
        block = model.get_submodule(name)
        block.register_forward_pre_hook(_AllTokens(group, region), with_kwargs=True)
        # always_call: the region must be left also when the block raised.
        block.register_forward_hook(_OwnTokens(group, region), always_call=True)
    stack[0].register_forward_pre_hook(_Split(group, tuple(stack.named_modules())[1:]), with_kwargs=True)
    stack[-1].register_forward_hook(_Gather(group))
    model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)


def _is_layer(name: str, layers: str) -> bool:
    return name.removeprefix(f"{layers}.").isdigit()


def _above(name: str) -> list[str]:
    """A module's name and the names of all modules around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


@dataclass(frozen=True)
class _AllTokens:
    """Forward pre-hook of a block that computes on all tokens. All ranks compute the same then, so the gather's
    backward cuts gradients and does not sum them."""

    group: Group
    region: Region

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return None
        names = [name for name in _STREAM if isinstance(kwargs.get(name), torch.Tensor)]
        x = args[0] if args else kwargs[names[0]] if names else None
        if not isinstance(x, torch.Tensor) or x.ndim < 3:
            raise ConfigError(
                f"sequence_parallel: {type(module).__name__} is not called with (batch, tokens, hidden): first, or as "
                f"one of {', '.join(_STREAM)}"
            )
        own = x.shape[:2]
        self.region.tokens = own[0], own[1] * self.group.size

        def whole(value: Any) -> Any:
            tokens = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[:2] == own
            return gather_sequence(value, self.group) if tokens else value

        return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


@dataclass(frozen=True)
class _OwnTokens:
    """Forward hook of such a block: this rank's tokens of its output."""

    group: Group
    region: Region

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        tokens, self.region.tokens = self.region.tokens, None
        first = output[0] if isinstance(output, tuple) else output
        if tokens is None or first is None:  # in evaluation; it has failed
            return output
        # Experts flatten (batch, tokens) to rows.
        flat = first.ndim == 2 and first.shape[0] == tokens[0] * tokens[1]
        x = first.unflatten(0, tokens) if flat else first
        if x.ndim < 3 or x.shape[:2] != tokens:
            raise ConfigError(
                f"sequence_parallel: {type(module).__name__} gives {tuple(first.shape)} for {tokens[0]} x {tokens[1]} "
                "tokens, not the residual stream"
            )
        # split_tokens works on dimension 0; transformers has the batch there.
        own = split_tokens(x.transpose(0, 1), self.group).transpose(0, 1).contiguous()  # (batch, n/tp, ...)
        own = own.flatten(0, 1) if flat else own
        return (own, *output[1:]) if isinstance(output, tuple) else own


@dataclass(frozen=True)
class _Split:
    """Forward pre-hook of the first layer: this rank's tokens.

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
    """Forward hook of the last layer: all tokens again. What follows is the same on all ranks, so gradients are cut."""

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
