"""A model's twin: its classes and configuration before anything was cut or sharded, with all tensors on the meta
device.

What transformers knows of a model by its classes (how names in a folder become names of parameters, which first values
it gives to which parameter) is asked of the twin: in the model itself parameters are parts, numbers of heads are
divided, and ``fully_shard`` has given modules another class.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def twin_of(model: nn.Module, tied: bool = True) -> nn.Module:
    """The twin of ``model`` and all modules below: whole parameters and buffers, on the meta device. With ``tied``
    shared tensors are shared in the twin, too."""
    made: dict[int, Any] = {}
    # Two passes: children must exist before they are linked.
    for module in model.modules():
        made[id(module)] = _shell(module)
    for module in model.modules():
        twin = made[id(module)]
        twin._modules = {name: made.get(id(child)) for name, child in module._modules.items()}
        twin._parameters = {name: _on_meta(p, made if tied else {}) for name, p in module._parameters.items()}
        twin._buffers = {name: _on_meta(b, made if tied else {}) for name, b in module._buffers.items()}
    return cast(nn.Module, made[id(model)])


def _shell(module: nn.Module) -> nn.Module:
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))  # not of fully_shard
    # No constructor is run: it would allocate weights and need arguments.
    twin = cast(nn.Module, object.__new__(kind))
    vars(twin).update(vars(module))
    # A replaced forward belongs to the cut model; smp_whole holds the numbers from before the cut.
    vars(twin).pop("forward", None)
    vars(twin).update(vars(module).get("smp_whole", {}))
    return twin


def _on_meta(tensor: torch.Tensor | None, made: dict[int, Any]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in made:
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            vars(twin).update(vars(tensor))
        made[id(tensor)] = twin
    return cast(torch.Tensor, made[id(tensor)])
