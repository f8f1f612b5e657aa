"""Optimizers over DTensor parameters, and gradient clipping over the whole mesh."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from smp.config import ConfigError, OptimizerConfig
from smp.kernels.copier import Copier, copier_of
from smp.optim.host import HostAdamW
from smp.optim.low_precision import LowPrecisionAdamW
from smp.optim.muon import Muon, matrices_of, vectors_of, vocabulary_of
from smp.parallel.dtensor_region import local_part, placed_like

_NONE: Mapping[torch.Tensor, int] = {}


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    fsdp: DeviceMesh | None,
    expert_fsdp: DeviceMesh | None = None,
    *,
    copier: Copier | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names, over all trainable parameters of a parallelized model.

    Weight decay skips biases and tensors with one dimension (norms), except for what ``apply_wd_to_qk_layernorm`` says.

    Args:
        model: any module, after ``parallelize`` or ``shard``.
        config: of the optimizer.
        fsdp: the mesh that it has to be sharded over, ``ParallelContext.fsdp``; None, or one rank: it need not be.
        expert_fsdp: that of experts which are split over ranks, ``ParallelContext.expert_fsdp``.
        copier: of --optimizer-cpu-offload; by default made for the parameters' device.
        seed: of stochastic rounding, where moments are in bf16 or fp8.

    Raises:
        ConfigError: for ``apex-adam`` without apex or its CUDA extensions; for moments in fp8 that the layout cuts
            within a block.
        ValueError: when a parameter is not the sharded one: FSDP would replace it, and it would not train. The first
            step looks again, and raises it when the model has other parameters by then.
    """
    _check_sharded(model, fsdp, expert_fsdp)
    optimizer = _optimizer_of(model, config, copier, seed)

    looked = False

    def look_once(*_: Any) -> None:
        nonlocal looked
        if not looked:
            _check_trained(model, optimizer)
        looked = True

    # At the first step: the model may have been sharded after the optimizer was built.
    optimizer.register_step_pre_hook(look_once)
    return optimizer


def _check_sharded(model: nn.Module, fsdp: DeviceMesh | None, expert_fsdp: DeviceMesh | None) -> None:
    """Check that the model's parameters are the sharded ones: neither those of a model before ``fully_shard``, nor
    gathered ones."""
    sharded = isinstance(model, FSDPModule)
    if fsdp is not None and fsdp.size() > 1 and not sharded:
        raise ValueError("build the optimizer after parallelize(): FSDP replaces the model's parameters")
    if sharded and fsdp is not None:
        # A forward outside of training may leave a unit gathered; its parameters are then replaced again.
        meshes = [fsdp, *([] if expert_fsdp is None else [expert_fsdp])]
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        gathered = [n for n, p in trained.items() if not any(_is_sharded(p, mesh) for mesh in meshes)]
        if gathered:
            raise ValueError(f"{gathered[0]} is gathered: reshard() the model before the optimizer is built")


def _check_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer's parameters are those that the model has now."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if strange := trained.keys() - known:
        name = next(name for number, name in trained.items() if number in strange)
        raise ValueError(f"{name} is not the parameter that the optimizer was built with: it would not train")
    if gone := known - trained.keys():
        raise ValueError(f"the optimizer has {len(gone)} parameters that the model no longer trains")


def _optimizer_of(model: nn.Module, config: OptimizerConfig, copier: Copier | None, seed: int) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = matrices_of(model) if config.optimizer == "muon" else set()
    vectors = vectors_of(model, query_key_norms=not config.apply_wd_to_qk_layernorm)
    decayed = [p for p in parameters if p not in vectors and p not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p in vectors], "weight_decay": 0.0},
    ]
    if config.optimizer == "muon":
        by_muon = {"params": [p for p in parameters if p in matrices], "weight_decay": config.weight_decay}
        groups = [by_muon | {"use_muon": True}, *(group | {"use_muon": False} for group in groups)]
    if config.decoupled_lr is not None:
        groups = _decoupled(groups, vocabulary_of(model))
    groups = [g for g in groups if g["params"]] or groups[:1]  # an empty pipeline stage has none
    if config.optimizer == "muon":
        return Muon(groups, config)
    if config.optimizer == "sgd":
        # One operation after the other per parameter, each with DTensor's dispatch: seconds at the first step.
        return _on_local_shards(torch.optim.SGD)(groups, lr=config.lr, momentum=config.sgd_momentum)
    if (config.exp_avg_dtype, config.exp_avg_sq_dtype) != ("fp32", "fp32"):
        names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        return LowPrecisionAdamW(groups, config, names, seed)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    if config.optimizer == "apex-adam":
        return _apex_adam(groups, options)
    if config.optimizer_cpu_offload:
        device = parameters[0].device if parameters else torch.device("cpu")
        return HostAdamW(groups, copier or copier_of(device), **options)
    # One kernel for all parameters of a group, and the one that can decide on the device whether there is a step. The
    # first call on 300 DTensors takes half a second, to find out how they are cut.
    return _on_local_shards(torch.optim.AdamW)(groups, fused=True, **options)


def _decoupled(groups: list[dict[str, Any]], vocabulary: set[nn.Parameter]) -> list[dict[str, Any]]:
    """Splits each group in two: other parameters, and those in ``vocabulary``, whose group is marked."""
    rest = [group | {"params": [p for p in group["params"] if p not in vocabulary]} for group in groups]
    own = [group | {"params": [p for p in group["params"] if p in vocabulary], "decoupled": True} for group in groups]
    return rest + own


def _is_sharded(parameter: torch.Tensor, fsdp: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    # FSDP2's sharded parameter is a DTensor on the mesh of FSDP and TP, its gathered one on TP alone.
    names = fsdp.mesh_dim_names
    return names is None or set(names) <= set(parameter.device_mesh.mesh_dim_names or ())


def _apex_adam(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        raise ConfigError(
            "--optimizer apex-adam needs apex with its CUDA extensions, which is not installed; "
            "--optimizer adam is torch's fused AdamW"
        ) from None

    try:
        # apex's kernel works on raw pointers
        return _on_local_shards(FusedAdam)(groups, adam_w_mode=True, **options)
    except RuntimeError as error:  # apex was built without its CUDA extensions
        raise ConfigError(f"--optimizer apex-adam: {error}; --optimizer adam is torch's fused AdamW") from None


def _on_local_shards(kind: Any) -> Any:
    """A subclass of optimizer ``kind`` whose step runs on local shards instead of DTensors.

    Correct for element-wise updates only. Between steps parameters and state are DTensors, as checkpoints and clipping
    expect.
    """
    # torch wraps the step of a class whose instances it makes to run hooks: this one runs them, once
    step_on_shards = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step

    class OnLocalShards(kind):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            this: Any = self
            groups, states = [g["params"] for g in this.param_groups], this.state
            # The same memory: the update writes into the shards.
            local = {p: _local_twin(p) for group in groups for p in group}
            given = {local[p]: _map_tensors(state, local_part) for p, state in states.items()}
            this.state = defaultdict(dict, {twin: dict(state) for twin, state in given.items()})
            for group in this.param_groups:
                group["params"] = [local[p] for p in group["params"]]
            try:
                step_on_shards(self, closure)
            finally:
                inner, this.state = this.state, states
                for group, params in zip(this.param_groups, groups, strict=True):
                    group["params"] = params
            # DTensors again, of what this step has made; of the rest they are there.
            for p, twin in local.items():
                known = given.get(twin, {})
                new = {key: value for key, value in inner.get(twin, {}).items() if value is not known.get(key)}
                if new:
                    states[p].update(_map_tensors(new, partial(_like, p)))

    OnLocalShards.__name__ = OnLocalShards.__qualname__ = kind.__name__  # what profiles and messages call it
    return OnLocalShards


def _local_twin(parameter: torch.Tensor) -> torch.Tensor:
    """A plain tensor on the memory of ``parameter``'s local shard, with its gradient."""
    twin = local_part(parameter).detach()
    twin.grad = None if parameter.grad is None else local_part(parameter.grad)
    return twin


def _like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, one rank's shard, as a DTensor placed like ``parameter``."""
    if not isinstance(parameter, DTensor) or tensor.ndim == 0:
        return tensor
    return placed_like(parameter, tensor)


def _map_tensors(state: dict[str, Any], fn: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {key: fn(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def step_if(wanted: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` if ``wanted``, a 0-dim boolean, is true.

    On a GPU torch's fused AdamW looks itself, by the way that ``torch.amp.GradScaler`` uses: an update that finds
    infinities leaves weights, moments and step counts alone, and the host need not wait. SGD and apex have no such way;
    on a CPU there is nothing to wait for.
    """
    if wanted.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
        step_on_device_if(wanted, optimizer)
    # Reading it waits for the device.
    elif wanted:
        optimizer.step()


def step_on_device_if(wanted: torch.Tensor, optimizer: Any) -> None:
    """A step of a fused optimizer that changes nothing where ``wanted`` is false."""
    # The names that torch.amp.GradScaler uses.
    optimizer.grad_scale, optimizer.found_inf = None, (~wanted).float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, decoupled_lr: float | None = None) -> None:
    """Use ``lr`` for the next step, and ``decoupled_lr`` in groups that --decoupled-lr made."""
    for group in optimizer.param_groups:
        group["lr"] = decoupled_lr if decoupled_lr is not None and group.get("decoupled") else lr


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None = None,
    *,
    copies: Mapping[torch.Tensor, int] = _NONE,
    device: torch.device | None = None,
    scale: Callable[[list[torch.Tensor], torch.Tensor], None] = torch._foreach_mul_,
) -> torch.Tensor:
    """Scale all gradients so that their global L2 norm is at most ``max_norm``; 0 only measures.

    Every rank adds the squares of its local elements, divided by the number of ranks that hold a copy of them, and one
    all-reduce over all ranks sums it all. (torch's ``get_total_norm`` runs one all-reduce per mesh dimension, in turn.)

    Args:
        parameters: of this rank's part of the model; none if it has none. All ranks of ``group`` call this.
        max_norm: upper bound.
        group: the ranks that the model is split over; by default all.
        copies: for parameters that ranks outside of their mesh also hold (a tied matrix at both ends of a pipeline):
            how many ranks for each.
        device: where the sum is made; by default that of the parameters.
        scale: (gradients, a 0-dim factor) -> multiplies them, see :func:`scaling_of`.

    Returns:
        The norm before clipping, 0-dim fp32, the same on each rank.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    grads = [local_part(p.grad) for p in with_grad if p.grad is not None]
    device = device or (grads[0].device if grads else None)
    # On the device: nothing waits. In fp64, where the square of an fp32 number is exact: which tensors are summed first
    # differs between layouts (full recompute, say, moves layers between pipeline stages), and in fp32 the last bit of
    # the norm, and with clipping all weights, would tell.
    squares = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[torch.Tensor]] = {}  # a tensor of these numbers would be a copy that the host waits for
    for p, grad in zip(with_grad, grads, strict=True):
        # By the number of copies, so that one division serves all gradients that are held alike.
        by_copies.setdefault(_copies(p.grad, group) * copies.get(p, 1), []).append(grad)
    for number, alike in by_copies.items():
        # Norms by one kernel for many tensors; squared again, because squares are what adds up over ranks.
        squares += torch.stack(torch._foreach_norm(alike)).double().square().sum() / number
    # Also on ranks without gradients, such as a stage that trains nothing: all of them have to come.
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt().float()
    if max_norm > 0 and grads:
        # torch's ``clip_grad_norm_`` has the same constant.
        scale(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def scaling_of(optimizer: torch.optim.Optimizer) -> Callable[[list[torch.Tensor], torch.Tensor], None]:
    """How clipping scales the gradients of ``optimizer``: one that has them on the host does so there."""
    return optimizer.scale if isinstance(optimizer, HostAdamW) else torch._foreach_mul_


def _copies(tensor: torch.Tensor | None, group: dist.ProcessGroup | None) -> int:
    """Number of ranks of its mesh that hold the same elements as this one."""
    if not isinstance(tensor, DTensor):
        # An ordinary parameter: every rank of the group has it.
        return dist.get_world_size(group)
    # Replicated over a mesh dimension of n ranks: n equal copies.
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Replicate))
