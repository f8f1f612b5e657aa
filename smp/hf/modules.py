"""Forward passes of transformed modules. Their classes and names stay; parameters are stored as DTensors, while
products and collectives run on plain tensors.

A linear layer's input gradient is a sum over the ranks. Layers next to each other that read the same tensor (query, key
and value; gate and up) share one all-reduce for it: their parent's :class:`Boundary` knows the tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config.schema import ConfigError
from smp.hf import experts
from smp.hf.adapters import target_of
from smp.hf.planning.borrowed import Borrowed
from smp.hf.planning.module_plan import Plan, Step
from smp.hf.planning.rows import COLUMN, EMBEDDING, EXPERTS, LATENT, ROW, SORTED_EXPERTS, SUMMED
from smp.hf.products import product
from smp.hf.sagemaker.fsdp1 import FSDP2
from smp.layers.parameter import local
from smp.parallel.collectives import (
    Group,
    copy_to_group,
    gather_features,
    gather_rows,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
    split_features,
    split_tokens,
    sum_gradient,
)


@dataclass
class Boundary:
    """The inputs that a module's children share while its forward pass runs.

    Attributes:
        active: it runs.
        tokens: its input was gathered from ranks that have some tokens each.
        seen: inputs, and what stands for them.
    """

    active: bool = False
    tokens: bool = False
    seen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def copied(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """``x`` with its gradient summed over the group, by one all-reduce for all children that ask for it."""
        if not self.active:
            return copy_to_group(x, group)
        # By identity: query, key and value projections get the same tensor object.
        for known, copy in self.seen:
            if known is x:
                return copy
        # Under sequence parallelism the shared input's gradient is reduce-scattered; any other
        # input's would be lost.
        if self.tokens and self.seen:
            raise ConfigError("sequence_parallel: a column layer reads something else than its module's input")
        copy = copy_to_group(x, group)
        self.seen.append((x, copy))
        return copy

    # In a copy.deepcopy of a model the children share a boundary of their own, found by the memo.
    def __deepcopy__(self, memo: dict[int, Any]) -> Boundary:
        return memo.setdefault(id(self), Boundary())


@dataclass
class Region:
    """A block that computes on all tokens under sequence parallelism.

    Attributes:
        tokens: (batch, n) while it runs in training.
    """

    tokens: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return memo.setdefault(id(self), Region())


@dataclass
class Cut:
    """How one module computes its forward pass.

    Attributes:
        step: of the plan.
        group: the tensor-parallel ranks.
        inside: the boundary that this module's input crosses.
        around: the boundary that this module's own forward pass is.
        children: of this module, as they were.
        borrowed: its children's parameters that its own forward pass reads.
        lent: this module's parameters that are plain while its parent's forward pass runs.
        fused: the child, cut, whose product is left out of this module's fused kernel.
        ep: of experts the ranks that exchange rows for them, if there are any.
        ep_mean: gradients of experts are means over ``ep``, because FSDP takes means; else sums.
        fsdp1: FSDP1 is around it, and knows of the cut.
        tokens: under sequence parallelism, whether the input or output of this module is some of the tokens.
        region: under sequence parallelism the block, if any, that gives this module all tokens.
    """

    step: Step
    group: Group
    inside: Boundary
    around: Boundary | None = None
    children: tuple[nn.Module, ...] = ()
    borrowed: Borrowed = ()
    lent: set[str] = field(default_factory=set)
    fused: str | None = None
    ep: Group | None = None
    ep_mean: bool = True
    fsdp1: bool = False
    tokens: bool = False
    region: Region | None = None


def install(model: nn.Module, plan: Plan, group: Group, ep: Group | None) -> None:
    """Give every module of ``plan`` its forward pass and its attributes."""
    boundaries = {name: Boundary() for name in plan.boundaries}
    for name in plan.steps.keys() | plan.boundaries | plan.borrowed.keys() | plan.fused.keys():
        # Experts, boundaries and borrowers may be modules without an own row.
        step = plan.steps.get(name, Step("boundary", {}))
        # An adapter's factors share the boundary of the layer that they adapt.
        inside = boundaries.get(target_of(name).rpartition(".")[0]) or Boundary()
        module: Any = model.get_submodule(name)
        exchanging = ep if step.style == EXPERTS else None
        module.smp_cut = Cut(step, group, inside, boundaries.get(name), tuple(module.children()), ep=exchanging)
        module.smp_cut.borrowed = plan.borrowed.get(name, ())
        module.smp_cut.fused = plan.fused.get(name)
        module.forward = MethodType(_without_last_product if name in plan.fused else _forward_of(step), module)
        # generate and the Trainer inspect the signature of a whole model's forward.
        if hasattr(module, "save_pretrained"):
            module.forward = _OfModel(module)
    for name, methods in plan.methods.items():
        # The class's method with plain parameters, for callers of the method (ProphetNet).
        module = model.get_submodule(name)
        for method in methods:
            setattr(module, method, partial(_method, module, method))
    for name, numbers in plan.numbers.items():
        module = model.get_submodule(name)
        module.smp_whole = {attribute: getattr(module, attribute) for attribute in numbers}  # for twins
        for attribute, value in numbers.items():
            setattr(module, attribute, value)


class _OfModel:
    """A whole model's forward pass with the signature of its class: ``generate`` asks for argument names.

    Args:
        module: whose forward pass has been replaced.
    """

    def __init__(self, module: Any) -> None:
        self.method = module.forward
        named = inspect.signature(type(module).forward)
        self.__signature__ = named.replace(parameters=list(named.parameters.values())[1:])  # without self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


def _forward_of(step: Step) -> Any:
    if step.style in COLUMN:
        return _column
    if step.style in ROW:
        return _row
    if step.style == EXPERTS:
        return _dense_experts if step.dense else _experts
    if step.style in SORTED_EXPERTS:
        return _sorted_experts
    if step.style == LATENT:
        return _latent
    return _embedding if step.style == EMBEDDING else _with_plain_parameters


def home_of(module: Any, name: str) -> dict[str, Any]:
    """The dict that holds an own parameter: while FSDP1 computes, that of plain attributes."""
    if name not in vars(module):
        return module._parameters
    if not module.smp_cut.fsdp1:
        raise ConfigError(
            f"{type(module).__name__}.{name}: FullyShardedDataParallel does not know of tensor_parallel_degree, its "
            f"clipping and its optimizer state would be wrong; instead of it: {FSDP2}"
        )
    return vars(module)


def _plain(module: Any, name: str, summed_over: Group | None = None) -> torch.Tensor:
    """This rank's part of an own parameter, as a plain tensor; its gradient is summed over ``summed_over``."""
    parameter = home_of(module, name)[name]
    if name in module.smp_cut.lent:
        # A parent's forward pass has made it plain already.
        return parameter
    assert isinstance(parameter, DTensor), name
    # FSDP2 gathers parameters in hooks around a module's forward: outside of it they are sharded.
    if not _gathered(parameter):
        raise RuntimeError(f"{type(module).__name__}.{name} is sharded by FSDP: call the model, not a part of it")
    return local(parameter, summed_over=summed_over)


def _gathered(parameter: DTensor) -> bool:
    """Whether FSDP2 has gathered the parameter for the forward pass that runs, or does not shard it: only the tp and ep
    dimensions of the mesh are left."""
    return {"ep", "tp"}.issuperset(parameter.device_mesh.mesh_dim_names or ("",))


def local_weight_and_bias(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (out, in) and bias (out,), of the rows that this rank uses."""
    step, group = module.smp_cut.step, module.smp_cut.group
    # Shared key/value heads: ranks use some rows each of a weight that all have, so gradients are
    # summed.
    summed_over = group if step.heads else None
    weight = _plain(module, "weight", summed_over)
    bias = _plain(module, "bias", summed_over) if "bias" in step.cuts else None
    weight = weight.t() if step.transposed else weight
    if step.heads:
        weight, bias = weight.narrow(0, *step.heads), bias if bias is None else bias.narrow(0, *step.heads)
    return weight, bias


def _column(module: Any, input: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., out/tp), or (..., out) when the outputs are gathered."""
    cut: Cut = module.smp_cut
    _check_region(module, cut)
    weight, bias = local_weight_and_bias(module)
    # The shared input's gradient is summed by its copy.
    out = product(module, cut.inside.copied(input, cut.group), weight, bias)
    return out if cut.step.style == "colwise" else gather_features(out, cut.group)


def _row(module: Any, input: torch.Tensor) -> torch.Tensor:
    """(..., in/tp), or (..., in) that is split here -> (..., out)."""
    cut: Cut = module.smp_cut
    _check_region(module, cut)
    weight, bias = local_weight_and_bias(module)
    # The bias comes after the sum, or it would be added tp times.
    part = split_features(input, cut.group) if cut.step.style == "rowwise_split_input" else input
    # The product without bias, which follows the sum.
    out = product(module, part, weight)
    if not (cut.tokens and module.training):
        out = reduce_from_group(out, cut.group)
        return out if bias is None else out + bias
    # reduce_scatter_tokens works on dimension 0; transformers has the batch there.
    out = reduce_scatter_tokens(out.transpose(0, 1), cut.group).transpose(0, 1)  # (batch, n/tp, out)
    # Each rank has some of the tokens, so the bias has a part of its gradient on each.
    return out if bias is None else out + sum_gradient(bias, cut.group)


def _embedding(module: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """ids (...) -> (..., hidden). The class's own forward looks up this rank's rows; the others' are zero before the
    sum."""
    group: Group = module.smp_cut.group
    padding, vocabulary = module.padding_idx, home_of(module, "weight")["weight"].shape[0]
    rows = vocabulary // group.size
    first = group.rank * rows
    unknown = (input < 0) | (input >= vocabulary)  # row -1, an IndexError as without tensor parallelism
    row = input - first
    # Row 0 instead of rows of other ranks: their results are zeroed below.
    elsewhere = (row < 0) | (row >= rows)
    row = row.masked_fill(elsewhere, 0).masked_fill(unknown, -1)
    # The class zeroes the gradient of its padding row: only on the rank that has it.
    if padding is not None:
        # Put back after the call: the number is the whole table's for everyone else.
        module.padding_idx = padding - first if first <= padding < first + rows else None
    try:
        part = _with_plain_parameters(module, row, *args, **kwargs)
    finally:
        module.padding_idx = padding
    return reduce_from_group(part.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)


def _experts(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
    """(tokens, hidden), and (tokens, k) twice -> (tokens, hidden)."""
    cut: Cut = module.smp_cut
    compute = partial(_with_plain_parameters, module)
    # num_experts was divided when the model was cut: it is the number on this rank.
    own = module.num_experts
    return experts.combined(compute, hidden_states, top_k_index, top_k_weights, own, cut.group, cut.ep)


def _dense_experts(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """(experts x tokens, hidden), with all tokens for each expert -> the same. Each rank computes its experts' rows."""
    group: Group = module.smp_cut.group
    # [experts/tp x tokens, hidden] on each rank
    return gather_rows(_with_plain_parameters(module, split_tokens(hidden_states, group)), group)


def _sorted_experts(module: Any, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
    """(rows, in) sorted by expert, and the numbers of each expert's -> (rows, out)."""
    cut: Cut = module.smp_cut
    compute = partial(_with_plain_parameters, module)
    return experts.sorted_rows(compute, inputs, expert_size, module.num_experts, cut.step.style, cut.group)


class _LastProduct:
    """Stands for an output matrix while its module's forward pass runs, which may hand weight and bias to a fused
    kernel: of none the kernel gives what it would have multiplied."""

    weight = bias = None

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.called = layer, False

    def __call__(self, x: torch.Tensor) -> Any:
        self.called = True
        return self.layer(x)


def _without_last_product(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, whose output matrix, cut, computes after a fused kernel instead of inside of it."""
    name = module.smp_cut.fused
    last = _LastProduct(module._modules[name])
    # In front of the child, which keeps its place among the modules.
    vars(module)[name] = last
    try:
        out = _with_plain_parameters(module, *args, **kwargs)
    finally:
        del vars(module)[name]
    return out if last.called else last(out)


def _latent(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """(..., in) -> (..., latent + rope). DeepSeek's compressed keys with the rotary part at the end."""
    cut: Cut = module.smp_cut
    latent, rope = _with_plain_parameters(module, *args, **kwargs).tensor_split((-cut.step.summed,), -1)
    # The latent part goes through layers whose inputs sum its gradient; the rotary part is read by
    # each rank's heads directly, so its gradient is summed here.
    return torch.cat((latent, copy_to_group(rope, cut.group)), -1)


def _method(module: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """A method of the class, other than its forward pass, run with plain parameters."""
    return _called_with_plain_parameters(module, getattr(type(module), method), *args, **kwargs)


def _with_plain_parameters(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, in which its parameters, and those of modules below that it reads, are plain tensors."""
    return _called_with_plain_parameters(module, type(module).forward, *args, **kwargs)


def _called_with_plain_parameters(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cut: Cut = module.smp_cut
    _check_region(module, cut)
    # A child that is a unit of FSDP by itself has its parameters only while its own forward pass runs.
    # What a module further up has lent is plain already.
    # resting: as DTensors.
    resting_ones = [(child, name) for child, name in cut.borrowed if name not in child.smp_cut.lent]
    borrowed = [(child, name) for child, name in resting_ones if _gathered(home_of(child, name)[name])]
    # The module's forward pass may call a method that others call, too (LLaVA-NeXT's get_image_features): its own
    # parameters are plain already.
    own = (name for name in cut.step.cuts if name in cut.lent or isinstance(home_of(module, name)[name], DTensor))
    read = [*((module, name) for name in own), *borrowed]
    homes = [home_of(owner, name) for owner, name in read]
    # Put back in the finally block: an exception in a forward pass must not leave plain tensors in
    # the model.
    resting = [home[name] for home, (_, name) in zip(homes, read, strict=True)]
    if cut.around is not None:
        _check_children(module, cut.children)
        cut.around.active = True
        if cut.tokens and module.training:
            args, kwargs = _all_tokens(cut, args, kwargs)
    try:
        for home, (owner, name) in zip(homes, read, strict=True):
            mean_over = owner.smp_cut.ep if owner.smp_cut.ep_mean else None
            # The class's code sees plain tensors whose autograd goes back to the DTensors.
            home[name] = experts.averaged(_plain(owner, name, summed_over(owner)), mean_over)
        for child, name in borrowed:
            child.smp_cut.lent.add(name)
        return call(module, *args, **kwargs)
    finally:
        # Removed in any case: a borrowed parameter is plain only during this call.
        for child, name in borrowed:
            child.smp_cut.lent.discard(name)
        for home, (_, name), parameter in zip(homes, read, resting, strict=True):
            home[name] = parameter
        if cut.around is not None:
            cut.around.active = False
            # Inputs of this forward pass must not be taken for those of the next one, nor kept
            # alive.
            cut.around.seen.clear()


def _check_region(module: Any, cut: Cut) -> None:
    if cut.region is not None and module.training and cut.region.tokens is None:
        raise ConfigError(
            f"sequence_parallel: {type(module).__name__} is called from outside of its block, which would have given "
            "it all tokens"
        )


def summed_over(module: Any) -> Group | None:
    """The ranks over which gradients of a module's parameters must be summed; None: they are complete on each rank."""
    cut: Cut = module.smp_cut
    parts = cut.step.style == SUMMED or (cut.tokens and module.training and cut.around is None)
    return cut.group if parts else None


def _all_tokens(cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention or MLP with all tokens instead of (batch, n/tp, hidden). The gather's backward
    sums gradients (reduce-scatter), so column layers do not sum them again."""
    kwargs = dict(kwargs)
    # By position or by name: layers call both ways.
    x = args[0] if args else kwargs.pop("hidden_states")
    whole = gather_tokens(x.transpose(0, 1), cut.group).transpose(0, 1)
    assert cut.around is not None
    # (whole, whole): children find the gathered input as it is, without copy_to_group.
    cut.around.seen.append((whole, whole))
    return (whole, *args[1:]), kwargs


def _check_children(module: nn.Module, before: tuple[nn.Module, ...]) -> None:
    """Raise ConfigError where a child has been replaced after the cut, such as by peft's adapters: it would treat a
    part as the whole."""
    for (name, child), known in zip(module._modules.items(), before, strict=False):
        if child is not known and child is not getattr(known, "base_layer", None):  # peft has merged its adapter
            raise ConfigError(
                f"{type(module).__name__}.{name} became {type(child).__name__} after smp.transform, and does not know "
                "of the cut: get_peft_model first, then transform what it returns"
            )
