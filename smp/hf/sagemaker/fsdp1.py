"""FullyShardedDataParallel (FSDP1) around a transformed model, as scripts for SMP v2 call it.

FSDP1 does not know of tensor parallelism what it would have to, and torch does not change it any more. So
``smp.compat.install``, which makes SMP v2's scripts run, replaces four of its functions (as SMP v2 does); a script of
one's own uses ``fully_shard``, and is told so:

==============================  ======================================================================================
function                        replaced because
==============================  ======================================================================================
constructor                     needs the mesh of the data ranks; takes SMP's ``post_param_init_fn``
``clip_grad_norm_``             would add up the parts of one tensor-parallel rank only, and say nothing
``optim_state_dict_to_load``    would cut whole tensors where this rank's tensor-parallel part is meant, and say nothing
``FullStateDictConfig``         knows no ``translate_on_save``; its offload on a CPU reads freed memory
==============================  ======================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate

from smp.config.schema import ConfigError
from smp.hf.state import is_initialized, state

FSDP2 = (
    "for layer in model.model.layers: fully_shard(layer, mesh=smp.state.data_mesh), and then "
    "fully_shard(model, mesh=smp.state.data_mesh)"
)
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_ZERO2 = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


def install() -> None:
    """Replace the functions for the whole process. Models that are not transformed keep torch's behaviour."""
    kind: Any = FullyShardedDataParallel
    config: Any = FullStateDictConfig
    kind.__init__ = _constructor(kind.__init__)
    kind.clip_grad_norm_ = _clipping(kind.clip_grad_norm_)
    kind.optim_state_dict_to_load = staticmethod(_loading(kind.optim_state_dict_to_load))
    config.__init__ = _full_config(config.__init__)


def is_cut(module: nn.Module) -> bool:
    """Whether ``smp.transform`` has cut parameters of ``module``."""
    return any(hasattr(part, "smp_cut") for part in module.modules())


def root_of(model: nn.Module) -> FullyShardedDataParallel | None:
    """The outermost FSDP1 module in ``model``; None without FSDP1."""
    return next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)


def _constructor(plain: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(plain)

    @wraps(plain)
    def constructor(self: Any, *args: Any, post_param_init_fn: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        # Bound to names: scripts pass the module by position or by keyword.
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        module = given["module"]
        cut = is_cut(module)
        if is_initialized():
            given |= _of_cut_model(given) if cut else _of_whole_model(given)
        plain(**given)
        for part in module.modules():
            if hasattr(part, "smp_cut"):
                part.smp_cut.fsdp1 = True
        if cut:
            # The hook runs after FSDP1 has gathered its own dimension.
            self._register_state_dict_hook(_whole_tensors)
        if post_param_init_fn is not None:
            post_param_init_fn(module)

    return constructor


def _of_cut_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that the layout decides.

    Raises:
        ConfigError: for those with which FSDP1 would not be right.
    """
    mesh = state.data_mesh
    if state.ep_size > 1:
        raise ConfigError(
            "FullyShardedDataParallel does not take a model with expert_parallel_degree > 1; instead of it, before "
            f"other layers: fully_shard(layer.mlp.experts, mesh=smp.state.expert_mesh), then {FSDP2}"
        )
    names: dict[int, str] = {}
    for name, parameter in given["module"].named_parameters(remove_duplicate=False):
        if (first := names.setdefault(id(parameter), name)) != name:
            raise ConfigError(
                f"FullyShardedDataParallel makes two parameters of {first} and {name}, which are tied, where there is "
                f"tensor_parallel_degree, and trains them apart; instead of it: {FSDP2}"
            )
    if given.get("process_group") is not None or given.get("device_mesh") not in (None, mesh):
        raise ConfigError(
            "FullyShardedDataParallel(process_group=, device_mesh=): leave both out: a transformed model is sharded "
            "over smp.state.data_mesh"
        )
    if state.hybrid_shard_degree == 1 or given.get("sharding_strategy") is ShardingStrategy.NO_SHARD:
        raise ConfigError(
            "FullyShardedDataParallel does not take a model with tensor_parallel_degree > 1 that is not sharded "
            f"(hybrid_shard_degree 1, NO_SHARD); instead of it: {FSDP2}"
        )
    if given.get("use_orig_params") is False:
        raise ConfigError("FullyShardedDataParallel(use_orig_params=False): a transformed model needs True")
    strategy = _strategy(given.get("sharding_strategy"), mesh)
    # All ranks have the same weights since transform, which compared or sent them.
    return {"device_mesh": mesh, "sharding_strategy": strategy, "use_orig_params": True, "sync_module_states": False}


def _of_whole_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for ``hybrid_shard_degree`` without tensor parallelism.

    Raises:
        ConfigError: there is tensor parallelism, and the model does not know of it.
    """
    if given.get("process_group") is not None or given.get("device_mesh") is not None:
        return {}
    if state.tp_size > 1:
        raise ConfigError(
            f"FullyShardedDataParallel: {type(given['module']).__name__} is not cut over tensor_parallel_degree "
            f"{state.tp_size}: smp.transform(model) comes before"
        )
    strategy, degree = given.get("sharding_strategy"), state.settings.hybrid_shard_degree
    if strategy is ShardingStrategy.NO_SHARD or (degree == 0 and strategy in _HYBRID and state.device_type != "cpu"):
        return {}  # torch's own: nothing, or the ranks of a machine
    if state.hybrid_shard_degree == 1:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    mesh = _alone(state.data_mesh)
    return {"device_mesh": mesh, "sharding_strategy": _strategy(strategy, mesh)}


def _strategy(asked: ShardingStrategy | None, mesh: DeviceMesh) -> ShardingStrategy:
    """The strategy, as in SMP v2: the layout decides over which ranks parameters are sharded, and the script whether
    they stay gathered after the forward pass (ZeRO-2)."""
    zero2 = asked in _ZERO2
    if mesh.ndim == 2:
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if zero2 else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if zero2 else ShardingStrategy.FULL_SHARD


def _alone(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks that is not a part of a larger one: FSDP1 takes the last dimension of a parent mesh for
    tensor parallelism."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return DeviceMesh.from_group(
        groups if mesh.ndim > 1 else groups[0], mesh.device_type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names
    )


def _whole_tensors(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State dict hook: FULL_STATE_DICT gets Hugging Face's whole tensors, not those of one tensor-parallel rank."""
    config = module._state_dict_config
    if not isinstance(config, FullStateDictConfig) or not getattr(config, "translate_on_save", True):
        return
    for name, tensor in state_dict.items():
        if isinstance(tensor, DTensor):
            here: Any = tensor.to(tensor.device_mesh.device_type)  # offloaded ones cannot be gathered
            state_dict[name] = here.full_tensor().to(tensor.device)


def _clipping(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(plain)
    def clip(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if not is_cut(self):
            return plain(self, max_norm, norm_type)
        if norm_type != 2.0:
            raise ConfigError(f"clip_grad_norm_(norm_type={norm_type}): of a transformed model it is 2")
        return clip_pieces(self, float(max_norm))

    return clip


@torch.no_grad()
def clip_pieces(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradients of a cut model, which are flat pieces under FSDP1.

    Every rank calls this. Returns the norm before, 0-dim fp32.
    """
    replicas = state.dp_size * state.cp_size // state.hybrid_shard_degree
    squares = torch.zeros((), device=state.device_type)
    pieces: dict[int, torch.Tensor] = {}
    for module in model.modules():
        cut: Any = getattr(module, "smp_cut", None)
        for name, dim in (cut.step.cuts if cut is not None else {}).items():
            piece = getattr(module, name).grad
            if piece is None or piece.numel() == 0 or id(piece) in pieces:
                continue
            pieces[id(piece)] = piece
            # Each square is counted once: replicas have equal pieces, and an uncut parameter is on
            # every tensor-parallel rank.
            squares += piece.float().square().sum() / (replicas * (state.tp_size if dim is None else 1))
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for piece in pieces.values():
        # torch's clip_grad_norm_ has the same 1e-6.
        piece.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def load(model: Any, optim: Any, optim_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Whole over the data ranks, but this tensor-parallel rank's part: of that FSDP1 cuts its pieces."""
        if is_cut(model):
            optim_state_dict = dict(optim_state_dict)
            optim_state_dict["state"] = {
                name: {key: _part(value) for key, value in moments.items()}
                for name, moments in optim_state_dict["state"].items()
            }
        return plain(model, optim, optim_state_dict, *args, **kwargs)

    return load


def _part(value: Any) -> Any:
    if not isinstance(value, DTensor):
        if isinstance(value, torch.Tensor) and value.ndim:
            raise ConfigError(
                "optim_state_dict_to_load: of a transformed model it takes what FSDP.optim_state_dict returns with "
                "StateDictType.SHARDED_STATE_DICT"
            )
        return value
    tensor_parallel = value.placements[-1]
    # The last mesh dimension is tensor parallelism: gathered over all others, cut over it.
    return value.redistribute(placements=[*[Replicate()] * (value.device_mesh.ndim - 1), tensor_parallel]).to_local()


def _full_config(plain: Callable[..., None]) -> Callable[..., None]:
    @wraps(plain)
    def config(self: Any, *args: Any, translate_on_save: bool = True, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.translate_on_save = translate_on_save
        if is_initialized() and state.device_type == "cpu":
            self.offload_to_cpu = False

    return config
