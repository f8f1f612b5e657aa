"""``smp.transform``: makes a Hugging Face model tensor-parallel in place.

The object stays: its class, the names of its parameters, ``forward``, ``generate``, ``save_pretrained``. Parameters
become DTensors on the tensor-parallel mesh, so ``fully_shard`` adds the data dimensions and ``state_dict()`` has
Hugging Face's names and global shapes. All is decided (:mod:`smp.hf.planning.module_plan`) before the first parameter
is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from smp.config.schema import ConfigError
from smp.hf import adapters, attention, context, experts, guards, optimizers, products, sequence, trainer
from smp.hf.loading import weights
from smp.hf.loss import GATHERED
from smp.hf.loss import check as check_loss
from smp.hf.loss import install as install_loss
from smp.hf.modules import install
from smp.hf.planning.module_plan import Plan, Step, check_untouched, make_expert_plan, make_plan
from smp.hf.planning.rows import EXPERTS, REPLICATE, check_given, pattern_of
from smp.hf.planning.share import Share
from smp.hf.state import state
from smp.hf.verify import Expected
from smp.parallel.agree import on_all_or_none
from smp.parallel.collectives import Group

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Done:
    """A line of the report: what was done to the modules of one pattern."""

    pattern: str
    module: str
    style: str
    count: int
    note: str

    def __str__(self) -> str:
        note = f"  ({self.note})" if self.note else ""
        return f"  {self.pattern:<48} {self.module:<24} x {self.count:<4} {self.style}{note}"


def transform(
    model: Model,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    rows: Mapping[str, str] | None = None,
    loss: str = GATHERED,
    cp_comm_type: str = "p2p",
    config: experts.MoEConfig | None = None,
    load_state_dict_from_rank0: bool = False,
    verify: bool | None = None,
    allow_whole_layers: bool = False,
) -> Model:
    """Cut the parameters of ``model`` over the tensor-parallel ranks of ``smp.init``, in place; returns ``model``.

    Every rank calls this with the same model, before ``fully_shard`` and before the optimizer is built. What was done
    is printed by rank 0 and kept as ``model.smp_report``, a tuple of :class:`Done`.

    Args:
        model: a transformers model with a tensor-parallel plan, or any module with ``rows``.
        device: where the parts go; by default they stay where the model is. A model that is on the meta device, on all
            ranks, stays there until ``smp.load_weights`` or ``DelayedParamIniter`` (:mod:`smp.hf.loading.delayed`).
        dtype: of floating-point parameters; by default each keeps its own.
        rows: styles by pattern of module names (:mod:`smp.hf.planning.rows`), before those that transformers has.
        loss: of a causal language model called with labels: "gathered", Hugging Face's own on all logits,
            "vocab_parallel" on this rank's columns, "chunked" without logits (:mod:`smp.hf.loss`).
        cp_comm_type: what attention exchanges with context_parallel_degree > 1: "p2p", keys around a ring during
            computation, or "all_gather", all keys at once (:mod:`smp.hf.context`).
        config: of the router of a model with experts (:class:`smp.MoEConfig`).
        load_state_dict_from_rank0: only rank 0 has the weights, the others may be on the meta device. They are sent one
            after the other.
        verify: compare logits and every gradient of a small batch before and after; by default if ``rows`` are given.
        allow_whole_layers: go on where the rows cut no matrix of the model's layers, all of which every rank then has.

    Raises:
        ConfigError: in one line with the module's name, before anything is changed, for a model that would not be equal
            to itself before. After a failed ``verify`` the model must not be used.
    """
    # Order matters from here on: all refusals before the first change, since a half-cut model
    # cannot be restored.
    _check_types(model, dtype, rows)
    tp = Group.of(state.tp_mesh)
    verify = bool(rows) if verify is None else verify
    check = partial(
        _decide,
        model,
        tp,
        rows or {},
        loss,
        cp_comm_type,
        config,
        device,
        load_state_dict_from_rank0,
        verify,
        allow_whole_layers,
    )
    # A refusal on one rank is raised on all.
    plan, streams, share = on_all_or_none(check, ConfigError, "smp.transform")
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    # Same shapes and bits everywhere, or parts of different models would be joined.
    weights.check_alike(model, compare=not load_state_dict_from_rank0 and not on_meta)
    # Before the cut: the reference output and gradients.
    expected = Expected.of(model) if verify else None
    _cut(model, plan, None if on_meta and not load_state_dict_from_rank0 else device, dtype, load_state_dict_from_rank0)
    model.smp_from_rank0 = load_state_dict_from_rank0  # type: ignore[assignment]
    report = _install(model, plan, streams, tp, loss, config)
    model.smp_report = report  # type: ignore[assignment]
    if state.rank == 0:
        print("\n".join(_said(model, plan, report, tp, share)), flush=True)
    if expected is not None:
        expected.compare(model)
    if tp.size > 1:
        # After the comparison: the guards count first forward passes.
        guards.install(model, tp, state.device_type)
    if plan.steps:
        guards.refuse_ddp(model)
    context.install(model, cp_comm_type)  # after the comparison, which is of whole sequences
    return model


def _install(
    model: nn.Module,
    plan: Plan,
    streams: Sequence[sequence.Stream],
    tp: Group,
    loss: str,
    config: experts.MoEConfig | None,
) -> tuple[Done, ...]:
    """Give a model whose parameters are cut the forward passes, loss and methods that go with it; returns the
    report."""
    # Forward passes first: sequence parallelism and loss wrap or replace these.
    install(model, plan, tp, state.context.ep_group)
    experts.apply_config(adapters.base_of(model)[0], config)
    for stream in streams:
        sequence.install(model, plan, stream, tp)
    install_loss(model, loss, tp)
    weights.install(model)
    adapters.install(model)
    trainer.announce(model)
    linears = products.install(model) if tp.size == 1 and state.device_type == "cpu" else 0
    return _report(model, plan, linears, attention.install(model))


def _decide(
    model: nn.Module,
    tp: Group,
    rows: Mapping[str, str],
    loss: str,
    cp_comm_type: str,
    config: experts.MoEConfig | None,
    device: torch.device | str | None,
    from_rank0: bool,
    verify: bool,
    allow_whole_layers: bool,
) -> tuple[Plan, list[sequence.Stream], Share]:
    """The plan, the cut of the residual stream (if sequence-parallel), and the share that is cut. Everything that can
    be refused is refused here, before the model is changed."""
    if verify and (from_rank0 or any(parameter.is_meta for parameter in model.parameters())):
        raise ConfigError("verify needs the weights: not with load_state_dict_from_rank0, nor on the meta device")
    experts.check_config(adapters.base_of(model)[0], config)
    check_untouched(model)
    context.check(model, cp_comm_type)
    optimizers.refuse_built(model)
    _check_device(model, device, from_rank0)
    if tp.size == 1:
        adapters.check(model)  # saved as with several ranks
        check_given(model, rows, rows)
    plan = _plan(model, rows, tp)
    check_loss(model, loss, tp.size, plan)
    share = Share.of(model, plan)
    if tp.size > 1:
        share.check(model, allow_whole_layers)
    split = tp.size > 1 and state.settings.sequence_parallel
    return plan, [sequence.check(model, plan)] if split else [], share


def _plan(model: nn.Module, rows: Mapping[str, str], tp: Group) -> Plan:
    if tp.size > 1:
        return make_plan(model, rows, tp.size, tp.rank, state.ep_size)
    return make_expert_plan(model, rows, state.ep_size) if state.ep_size > 1 else Plan()


def _cut(
    model: nn.Module, plan: Plan, device: torch.device | str | None, dtype: torch.dtype | None, from_rank0: bool
) -> None:
    """Replace every parameter by this rank's part, one at a time; shared ones stay shared."""
    source = weights.FromRankZero(state.tp_mesh.device_type) if from_rank0 else None
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        step = plan.steps.get(name, Step(REPLICATE, {}))
        mesh = state.context.ep_tp if step.style == EXPERTS else None
        mesh = state.tp_mesh if mesh is None else mesh
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                whole = parameter.data if source is None else source.tensor(parameter.data)
                made[id(parameter)] = weights.part_of(whole, parameter, step.cuts.get(own), mesh, device, dtype)
                made[-id(parameter)] = parameter  # kept alive: ids are reused
            module._parameters[own] = made[id(parameter)]
        for own, buffer in list(module._buffers.items()):
            if buffer is not None:
                whole = buffer if source is None else source.tensor(buffer)
                module._buffers[own] = whole if device is None else whole.to(device)


def _report(model: nn.Module, plan: Plan, linears: int, attends: str) -> tuple[Done, ...]:
    products = "products in fp32 by oneDNN where they are large"
    whole = [Done("", "Linear", products, linears, "")] if linears else []
    whole += [Done("", type(model).__name__, attends, 1, "")] if attends else []
    if not plan.steps:
        return (Done("", type(model).__name__, "tensor_parallel_degree 1: nothing is cut", 1, ""), *whole)
    counted: dict[tuple[str, str, str, str], int] = {}
    for name, step in plan.steps.items():
        kind = type(model.get_submodule(name)).__name__
        key = (pattern_of(name), kind, step.style, step.note)
        counted[key] = counted.get(key, 0) + 1
    # Divided numbers, such as heads, are changes of the model, too.
    for name, numbers in plan.numbers.items():
        kind = type(model.get_submodule(name)).__name__
        text = ", ".join(f"{attribute} = {value}" for attribute, value in numbers.items())
        key = (pattern_of(name), kind, text, "")
        counted[key] = counted.get(key, 0) + 1
    return (*(Done(pattern, kind, style, n, note) for (pattern, kind, style, note), n in counted.items()), *whole)


def _said(model: nn.Module, plan: Plan, report: Sequence[Done], tp: Group, share: Share) -> list[str]:
    """The report for the user; one line where no parameter is cut."""
    kind = type(model).__name__
    if not plan.steps:
        more = (f"{done.style} ({done.module} x {done.count})" for done in report[1:])
        return ["; ".join([f"smp.transform: {kind}: {report[0].style}", *more])]
    exchanged = f", experts over {state.ep_size} data ranks" if state.ep_size > 1 else ""
    shares = share.lines(tp.size * state.ep_size) if tp.size > 1 else []
    first = f"smp.transform: {kind} over {tp.size} tensor-parallel ranks{exchanged}"
    return [first, *map(str, report), *(f"smp.transform: {line}" for line in shares)]


def _check_types(model: Any, dtype: Any, rows: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"transform: a model (nn.Module), not {type(model).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"transform(dtype={dtype!r}): a torch.dtype, such as torch.bfloat16")
    if rows is not None and not isinstance(rows, Mapping):
        raise ConfigError(f"transform(rows=): a dictionary of styles by pattern, not {type(rows).__name__}")


def _check_device(model: nn.Module, device: torch.device | str | None, from_rank0: bool) -> None:
    wanted = state.tp_mesh.device_type
    if device is not None and torch.device(device).type != wanted:
        raise ConfigError(f"transform(device={str(device)!r}): smp.init chose {wanted}")
    delayed = not from_rank0 and all(parameter.is_meta for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        if parameter.is_meta and (delayed or (from_rank0 and state.rank > 0)):
            continue
        if parameter.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and other parameters are not: load all weights on every rank, on rank 0 "
                "with load_state_dict_from_rank0=True, or none before smp.load_weights"
            )
        if device is None and parameter.device.type != wanted:
            raise ConfigError(
                f"{name} is on {parameter.device.type}, smp.init chose {wanted}: transform(device={wanted!r})"
            )
