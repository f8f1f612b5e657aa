"""A small model in any layout, with uneven shards and vocabulary padding, whose whole tensors are known."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

VOCAB = 33
PADDING = 7.0
"""What the padding rows hold before a load, and must hold after it."""

SHAPES: dict[str, tuple[tuple[int, ...], Placement]] = {
    "embedding": ((VOCAB, 6), Shard(0)),
    "column": ((10, 6), Shard(0)),
    "odd": ((33, 3), Shard(0)),
    "few": ((3, 2), Shard(0)),
    "row": ((7, 9), Shard(1)),
    "bias": ((13,), Shard(0)),
    "norm": ((5,), Replicate()),
}
Layout = tuple[int, int, int]
"""(dp_replicate, dp_shard, tp)"""


def whole(name: str, kind: str) -> torch.Tensor:
    """The known whole tensor of a module; ``kind`` is "model", "exp_avg" or "exp_avg_sq"."""
    generator = torch.Generator().manual_seed(sum(f"{kind}.{name}".encode()))
    return torch.randn(SHAPES[name][0], generator=generator)


def padded(name: str, tp: int, kind: str) -> torch.Tensor:
    """``whole`` with the padding rows that the layout wants: 4 rows per rank at least, as vocabulary padding does."""
    tensor = whole(name, kind)
    if name != "embedding":
        return tensor
    rows = -(-VOCAB // (4 * tp)) * 4 * tp
    return torch.cat([tensor, torch.full((rows - VOCAB, tensor.shape[1]), PADDING)])


class Holder(nn.Module):
    """A module with one weight."""

    def __init__(self, weight: nn.Parameter, logical_rows: int | None) -> None:
        super().__init__()
        self.weight = weight
        if logical_rows is not None:
            self.logical_rows = {"weight": logical_rows}


class Net(nn.Module):
    """One Holder per entry of SHAPES, and an output layer tied to the embedding."""

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, weight in weights.items():
            setattr(self, name, Holder(weight, VOCAB if name == "embedding" else None))
        self.head = Holder(weights["embedding"], VOCAB)


def tp_local(name: str, mesh: DeviceMesh | None, tp: int, kind: str = "model") -> torch.Tensor:
    """What one TP rank holds before FSDP: torch.chunk is the definition, no arithmetic of ours."""
    tensor, placement = padded(name, tp, kind), SHAPES[name][1]
    if mesh is None or not isinstance(placement, Shard):
        return tensor
    chunks = tensor.chunk(tp, placement.dim)
    rank = mesh.get_local_rank("tp")
    return chunks[rank] if rank < len(chunks) else chunks[0].narrow(placement.dim, 0, 0)


def build(mesh: DeviceMesh | None, tp: int, device: str) -> Net:
    """The model, sharded when there is a mesh. On "cpu" with its known values; on "meta", then emptied to PADDING."""
    weights = {}
    for name, (_, placement) in SHAPES.items():
        data, like = tp_local(name, mesh, tp).clone().to(device), padded(name, tp, "model")
        if mesh is not None:
            data = DTensor.from_local(
                data, mesh["tp"], [placement], run_check=False, shape=like.shape, stride=like.stride()
            )
        weights[name] = nn.Parameter(data)
    model = Net(weights)
    if mesh is not None:
        for name in ("column", "row", "norm"):
            fully_shard(getattr(model, name), mesh=fsdp_mesh(mesh))
        fully_shard(model, mesh=fsdp_mesh(mesh))
    if device == "meta":
        model.to_empty(device="cpu")
        if mesh is None:
            model.head.weight = model.embedding.weight  # to_empty unties plain parameters
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.fill_(PADDING)
    return model


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP works on; without replicas one dimension."""
    return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]


def build_mesh(layout: Layout) -> DeviceMesh:
    """Mesh over all ranks with the names that the package uses."""
    return init_device_mesh("cpu", layout, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def gathered(model: Net, name: str) -> torch.Tensor:
    """A module's TP-local weight as FSDP itself gathers it for the forward pass."""
    for module in (model, getattr(model, name)):
        if isinstance(module, FSDPModule):
            module.unshard()
    weight = getattr(model, name).weight
    result = (weight.to_local() if isinstance(weight, DTensor) else weight).detach().clone()
    for module in (model, getattr(model, name)):
        if isinstance(module, FSDPModule):
            module.reshard()
    return result
