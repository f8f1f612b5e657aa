"""A model and its optimizer as a flat dictionary of named tensors, and back.

Names do not depend on the layout: ``model.<name>`` for parameters and persistent buffers, ``optim.<state key>.<name>``
for the optimizer's per-element state. Step counts are numbers and travel in the checkpoint's ``extra``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adam, Optimizer

from smp.checkpoint.format.entries import CheckpointError
from smp.optim.host import HostAdamW
from smp.optim.low_precision import MOMENTS, LowPrecisionAdamW
from smp.optim.muon import Muon

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def training_state(
    model: nn.Module, optimizer: Optimizer | None = None, *, frozen: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(tensors by name, step count by parameter name). Without ``frozen`` only what is trained.

    The tensors are the live ones: loading into them fills model and optimizer. Optimizer state that does not exist
    yet is created as zeros, as the first step would. Hyper-parameters are not state: they come from the configuration.

    Raises:
        CheckpointError: when the optimizer holds parameters that are not the model's (of another model, or from before
            FSDP replaced them), or is of a kind whose state is not known.
    """
    names = {name: p for name, p in _parameter_names(model).items() if frozen or p.requires_grad}
    tensors: dict[str, torch.Tensor] = {f"model.{name}": parameter for name, parameter in names.items()}
    if frozen:
        tensors |= {f"model.{name}": buffer for name, buffer in _persistent_buffers(model).items()}
    if optimizer is None:
        return tensors, {}
    # Before the first step there is no state: a load would find nothing to fill and leave moments at zero.
    materialize_optimizer_state(optimizer)
    steps: dict[str, float] = {}
    for name, parameter, group in _optimized(model, optimizer):
        state = optimizer.state.get(parameter, {})
        tensors |= {f"optim.{key}.{name}": state[key] for key in _moments(optimizer, group) if key in state}
        if (step := state.get("step", group.get("step"))) is not None:
            steps[name] = float(step)
    return tensors, steps


def restore_optimizer_scalars(model: nn.Module, optimizer: Optimizer, scalars: Mapping[str, float]) -> None:
    """Set the step counts that :func:`training_state` returned, after the tensors were loaded.

    Raises:
        CheckpointError: when the count of a parameter is missing, or an optimizer that counts per group gets several.
    """
    materialize_optimizer_state(optimizer)
    counted: list[tuple[str, dict[str, Any]]] = []
    for name, parameter, group in _optimized(model, optimizer):
        state = optimizer.state.get(parameter, {})
        # torch's optimizers count for each parameter, apex's for a group.
        holder = state if "step" in state else group
        if "step" not in holder:
            continue
        if name not in scalars:
            raise CheckpointError(f"the checkpoint has no optimizer step count for {name}")
        if isinstance(holder["step"], torch.Tensor):
            # In place, since it may be on a device.
            holder["step"].fill_(scalars[name])
        else:
            # ``type``: a count that is an int stays one.
            holder["step"] = type(holder["step"])(scalars[name])
        counted.append((name, holder))
    for name, holder in counted:  # that of a group was set once per parameter
        if float(holder["step"]) != scalars[name]:
            kind = type(optimizer).__name__
            raise CheckpointError(f"{kind} counts steps per group, but {name} differs from its group")


def materialize_optimizer_state(optimizer: Optimizer) -> None:
    """Create state that the first step would create, as zeros. Weights and existing state stay as they are.

    Known are torch's Adam, AdamW and SGD, apex's FusedAdam, Muon, and AdamW with moments in few bits. Frozen
    parameters get no state.

    Raises:
        CheckpointError: for another optimizer, or SGD with dampening (its first step ignores it: zeros are not equal).
    """
    for group in optimizer.param_groups:
        moments = _moments(optimizer, group)
        # Its step counts in the group from the first call on, which has not come yet.
        if _is_fused_adam(optimizer):
            group.setdefault("step", 0)
        for parameter in group["params"]:
            state = optimizer.state[parameter] if moments and parameter.requires_grad else None
            # What exists is live state and must not become zeros.
            if state is None or len(state):
                continue
            if isinstance(optimizer, LowPrecisionAdamW) or (isinstance(optimizer, Muon) and group["use_muon"]):
                state.update(optimizer.new_state(parameter))
                continue
            if isinstance(optimizer, Adam | Muon):
                on_host = isinstance(optimizer, HostAdamW)
                state["step"] = torch.zeros(()) if on_host else _new_step(parameter, group)
            for key in moments:
                state[key] = _new_moment(optimizer, parameter)


def _new_moment(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Zeros with the dtype and device with which the optimizer would make them."""
    if isinstance(optimizer, HostAdamW):
        return optimizer.zeros_like(parameter)
    zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
    # apex keeps fp32 moments for bf16 parameters, too.
    return zeros.float() if _is_fused_adam(optimizer) else zeros


def _moments(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the per-element state of a parameter in ``group``; not all of its parameters have each of them."""
    if isinstance(optimizer, LowPrecisionAdamW):
        return tuple(f"{moment}{what}" for moment in MOMENTS for what in ("", "_scale"))
    if isinstance(optimizer, Muon) and group["use_muon"]:
        return ("momentum_buffer",)
    if isinstance(optimizer, Adam | Muon):  # torch's AdamW is one, and goes with Muon
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    if _is_fused_adam(optimizer):
        return ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, SGD) and not group["momentum"]:
        return ()
    if isinstance(optimizer, SGD) and not group["dampening"]:
        return ("momentum_buffer",)
    dampening = " with dampening" if isinstance(optimizer, SGD) else ""
    raise CheckpointError(
        f"cannot checkpoint the optimizer {type(optimizer).__name__}{dampening}: its state is not known"
    )


def _is_fused_adam(optimizer: Optimizer) -> bool:
    """Whether it is apex's, by the name of its class: importing apex to ask would make it a dependency."""
    return any(kind.__name__ == "FusedAdam" for kind in type(optimizer).__mro__)


def _new_step(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Adam's step count as torch makes it: on the parameter's device for kernels that read it, else on the CPU."""
    # As ``_get_scalar_dtype`` of torch.optim has it.
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    device = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def collect_logical_rows(
    model: nn.Module, optimizer: Optimizer | None = None, *, frozen: bool = True
) -> dict[str, int]:
    """Tensor name -> number of real rows, for every padded parameter of ``model`` and its state in ``optimizer``.
    Without ``frozen`` only of what is trained.

    A module states them in an attribute ``logical_rows``: its own parameter's name -> real rows of dimension 0.
    """
    name_of = {id(parameter): name for name, parameter in _parameter_names(model).items()}
    rows: dict[str, int] = {}
    for module in model.modules():
        for own_name, count in getattr(module, "logical_rows", {}).items():
            if not frozen and not getattr(module, own_name).requires_grad:
                continue
            name = name_of[id(getattr(module, own_name))]
            # A tied matrix is named by the embedding and by the head.
            assert rows.setdefault(f"model.{name}", count) == count, f"modules disagree about the rows of {name}"
    if optimizer is not None:
        materialize_optimizer_state(optimizer)
        for name, parameter, group in _optimized(model, optimizer):
            if f"model.{name}" in rows and parameter in optimizer.state:
                keys = [key for key in _moments(optimizer, group) if key in optimizer.state[parameter]]
                rows |= {f"optim.{key}.{name}": rows[f"model.{name}"] for key in keys}
    return rows


def _parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Sharded parameters by name without wrappers' prefixes, a tied one once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward leaves the root's parameters gathered
    return {_clean(name): parameter for name, parameter in model.named_parameters()}


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict(keep_vars=True)
    # torch lists persistent buffers in ``state_dict`` only, among the parameters.
    return {_clean(name): value for name, value in state.items() if _clean(name) not in map(_clean, parameters)}


def _optimized(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    """(name, parameter, its group) of everything the optimizer updates."""
    name_of = {id(parameter): name for name, parameter in _parameter_names(model).items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in name_of:
                raise CheckpointError(
                    "the optimizer holds parameters that are not the model's: build it over this model, after "
                    "sharding, which replaces parameters"
                )
            yield name_of[id(parameter)], parameter, group


def _clean(name: str) -> str:
    """The name without the prefixes of modules that activation checkpointing and torch.compile wrap."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
