"""Parameters as DTensors on the tensor-parallel mesh, and their initialization.

A DTensor carries its global shape and placement, so FSDP2, gradient norms and checkpoints need no other bookkeeping.
Layers compute on plain local tensors, which they get from :func:`local` only. That is called for each parameter and
micro-batch, so it avoids the checks and the dispatch of ``DTensor.to_local`` and ``DTensor.from_local``; see
``benchmarks/host_time.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from smp.parallel.collectives import Group, sum_gradient
from smp.parallel.dtensor_region import local_region
from smp.parallel.rng import keyed_normal


@dataclass(frozen=True)
class Normal:
    """Independent N(0, std^2) elements keyed by (seed, parameter name)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Every element has this value."""

    value: float


@dataclass(frozen=True)
class LogUniform:
    """Logarithms of independent numbers that lie evenly between ``low`` and ``high``, keyed as those of
    :class:`Normal`."""

    low: float
    high: float


@dataclass(frozen=True)
class StepUniform:
    """Independent numbers whose softplus has a logarithm that lies evenly between those of ``low`` and ``high``, keyed
    as those of :class:`Normal` (the steps that Mamba-2 begins with)."""

    low: float
    high: float


Initializer = Normal | Constant | LogUniform | StepUniform


def tp_parameter(shape: tuple[int, ...], placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter of global ``shape`` placed on the 1-D ``mesh``: ``Shard(dim)`` or ``Replicate()``.

    Device and dtype are torch's defaults, as ``with torch.device("meta")`` sets them around a whole model. Outside the
    meta device the elements are NaN until :func:`init_weights`: forgetting that shows in the first loss.

    Raises:
        ValueError: when the sharded dimension is not divisible by the mesh size.
    """
    return placed_parameter(shape, (placement,), mesh)


def placed_parameter(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh) -> nn.Parameter:
    """A parameter as of :func:`tp_parameter`, on a mesh of any number of dimensions, with a placement for each; two do
    not cut one dimension.

    Raises:
        ValueError: when a dimension is not divisible by the size of the mesh dimension that cuts it.
    """
    local_shape = list(shape)
    for placement, size, name in zip(placements, mesh.shape, mesh.mesh_dim_names or ("tp",), strict=True):
        if isinstance(placement, Shard):
            # Even parts only: layers assume that all ranks have parts of one shape.
            if shape[placement.dim] % size:
                kind = "expert-parallel" if name == "ep" else "tensor-parallel"
                raise ValueError(f"dimension {placement.dim} of {shape} is not divisible by {kind} size {size}")
            local_shape[placement.dim] //= size
    # NaN: a parameter that nothing fills shows in the first loss.
    data = torch.full(local_shape, float("nan"))
    # Of the whole; ``from_local`` takes shape and stride together.
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(data, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return nn.Parameter(whole)


def local(
    parameter: torch.Tensor, dtype: torch.dtype | None = None, *, summed_over: Group | None = None
) -> torch.Tensor:
    """The local part of a DTensor parameter, differentiable: the gradient comes back with the parameter's own
    placement.

    Args:
        parameter: of a layer.
        dtype: to compute with; layers pass that of their input. Under FSDP the weights have this dtype already; without
            FSDP this casts the fp32 master weights, with the rounding of FSDP. (A compiler may leave out roundings.)
        summed_over: the ranks that use a replicated parameter on different data each. The gradient is their sum, in
            fp32; so it is never ``Partial``, and any optimizer can use it.
    """
    dtensor = cast(DTensor, parameter)
    if torch.compiler.is_compiling():  # torch's compiler knows to_local
        # ``grad_placements``: the local gradient has the parameter's own placement, never ``Partial``.
        part = _cast(dtensor.to_local(grad_placements=dtensor.placements), dtype)
    elif torch.is_grad_enabled() and dtensor.requires_grad:
        part = _Local.apply(dtensor, dtype)
    else:
        part = _cast(dtensor._local_tensor, dtype)
    return part if summed_over is None else sum_gradient(part, summed_over)


class _Local(torch.autograd.Function):
    """``to_local`` and a cast. The gradient shares the parameter's spec, as FSDP2's gradients do: by it DTensor's
    dispatch, which adds gradients of several micro-batches, knows what it did before."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, dtype: torch.dtype | None) -> torch.Tensor:
        # None for a weight that a loss does not reach, and not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.dtensor_spec, part = dtensor._spec, dtensor._local_tensor
        ctx.dtype, ctx.stride = part.dtype, part.stride()
        made = _cast(part, dtype)
        # Autograd attaches the graph to the tensor object that is returned: it must not be the parameter's own.
        return made.view_as(made) if made is part else made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[DTensor | None, None]:
        if grad is None:
            return None, None
        spec: Any = ctx.dtensor_spec
        # fp32 for fp32 master weights: gradients of several micro-batches add up in it.
        grad = grad.to(ctx.dtype)
        if grad.stride() != ctx.stride:  # of which a spec says nothing; fused optimizers take them to be equal
            grad = grad.new_empty_strided(grad.shape, ctx.stride).copy_(grad)
        if not torch.is_grad_enabled():
            return DTensor(grad, spec, requires_grad=False), None
        shape = {"shape": spec.shape, "stride": spec.stride}  # a gradient that will be differentiated
        return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False, **shape), None


def _cast(part: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """``part`` cast to ``dtype`` if it is fp32. Other weights are returned unchanged: a silent cast to a wider dtype
    would be slow."""
    return part if dtype is None or part.dtype != torch.float32 else part.to(dtype)


def init_weights(model: nn.Module, seed: int, *, only: str | None = None) -> None:
    """Fill every parameter of ``model``, and every buffer that has an initializer, in place, from (seed, name) alone.

    Works before and after ``fully_shard`` and after ``to_empty``; every layout gets the same bits. Modules state their
    first values in an attribute ``initializers`` (parameter name -> :class:`Normal` or :class:`Constant`); another
    module can be given one. A tied parameter takes the first name it is found under. With ``only`` modules of other
    last names (``lora`` of ``layers.0.mlp.up.lora``) are left as they are.

    Raises:
        ValueError: for a parameter on the meta device, or without an initializer: torch's own way to draw first values
            gives other bits in another layout, and after ``to_empty`` there are none.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if only is not None and prefix.rpartition(".")[2] != only:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # A tied one keeps the values of the first name, on all ranks.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full_name = f"{prefix}.{name}" if prefix else name
            if parameter.is_meta:
                raise ValueError(f"{full_name} is on the meta device: call model.to_empty(device=...) first")
            initializer = getattr(module, "initializers", {}).get(name)
            if initializer is None:
                raise ValueError(
                    f"{full_name} has no initializer: set {prefix or 'model'}.initializers = "
                    f"{{{name!r}: Normal(0.02)}}, or Constant(...), of smp.layers"
                )
            rows = getattr(module, "logical_rows", {}).get(name, parameter.shape[0])
            _fill(parameter, full_name, initializer, seed, rows)
        # Buffers too: ``to_empty`` left them without values. Those without an initializer are computed elsewhere.
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            initializer = getattr(module, "initializers", {}).get(name.rpartition(".")[2])
            if initializer is not None:
                _fill(buffer, name, initializer, seed, buffer.shape[0])


@torch.no_grad()
def _fill(parameter: torch.Tensor, name: str, initializer: Initializer, seed: int, logical_rows: int) -> None:
    """Fill the local part. Rows past ``logical_rows`` are vocabulary padding and zero."""
    data = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if isinstance(initializer, Constant):
        data.fill_(initializer.value)
        return
    # This rank's part of the whole: only its numbers are drawn.
    region = local_region(parameter)
    # Uneven sharding leaves ranks without rows.
    if region.empty:
        return
    drawn = keyed_normal(seed, name, tuple(parameter.shape), region, getattr(initializer, "std", 1.0))
    if isinstance(initializer, LogUniform | StepUniform):
        share = torch.special.ndtr(drawn.double())  # evenly between 0 and 1
        low, high = initializer.low, initializer.high
        if isinstance(initializer, LogUniform):
            drawn = (low + (high - low) * share).log()
        else:
            drawn = torch.expm1(low * (high / low) ** share).log()  # the inverse of softplus
    data.copy_(drawn)
    real = min(max(logical_rows - region.offsets[0], 0), region.sizes[0])
    # Not drawn: how much padding there is depends on the layout, and a checkpoint must not.
    data[real:].zero_()


SHARD_ROWS = Shard(0)
SHARD_COLUMNS = Shard(1)
REPLICATE = Replicate()
