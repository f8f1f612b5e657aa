"""``smp.clip_grad_norm_``: the L2 norm of the whole gradient, however it is sharded.

The arithmetic is that of every run (``smp.optim.optimizer.clip_gradients``). Here is what a script can get wrong and a
run cannot: it gives parameters and no model, or has not sharded them; and FSDP 1, which clips by its own flat buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from smp.config.schema import ConfigError
from smp.hf.sagemaker import fsdp1
from smp.hf.state import state
from smp.optim.optimizer import clip_gradients


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients of ``model`` so that their L2 norm over all ranks is at most ``max_norm``.

    Every rank calls this. Returns the norm before, 0-dim fp32, the same on each rank and in every layout.

    Raises:
        ConfigError: ``model`` is no model; ``max_norm`` is not above 0; or several data ranks, and nothing sums the
            gradients over them.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"clip_grad_norm_: the model, not its parameters (a {type(model).__name__})")
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: max_norm {max_norm}: give a number above 0; float('inf') only measures")
    # FSDP1 holds gradients in flat buffers, which only its own method reads.
    if (root := fsdp1.root_of(model)) is not None:
        return root.clip_grad_norm_(max_norm)
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    # DDP averages gradients itself; but experts of expert parallelism have ranks of their own.
    if state.ep_size > 1 or not isinstance(model, DistributedDataParallel):
        check_sharded(named)
    return clip_gradients([parameter for _, parameter in named], max_norm)


def check_sharded(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that ``fully_shard`` has seen these parameters where there are several data ranks: it averages their
    gradients.

    Raises:
        ConfigError: with the first that it has not seen.
    """
    if state.data_mesh.size() == 1:
        return
    meshes = [set(mesh.mesh_dim_names or ()) for mesh in (state.data_mesh, state.expert_mesh)]
    experts = "fully_shard(experts, mesh=smp.state.expert_mesh) of every layer, then " if state.ep_size > 1 else ""
    for name, parameter in named:
        mesh = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        # Sharded on the data mesh, or for experts on the smaller expert mesh: subsets of mesh
        # dimensions.
        if not any(wanted <= set(mesh or ()) for wanted in meshes):
            raise ConfigError(
                f"{name} is not sharded, so each of the {state.data_mesh.size()} data ranks has another gradient: "
                f"{experts}fully_shard(model, mesh=smp.state.data_mesh) before the first step"
            )
