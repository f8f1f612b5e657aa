"""Weights of a transformed model: from all ranks or rank 0, to and from whole tensors, and to a folder.

``state_dict()`` needs nothing: it has Hugging Face's names and DTensors of global shapes. ``load_state_dict`` cuts
whole tensors, and ``save_pretrained`` gathers them, one at a time, to rank 0, which writes what transformers writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from smp.config.schema import ConfigError
from smp.hf.adapters import faces_of, in_adapter_file
from smp.hf.loading.stored_names import written_by
from smp.hf.sagemaker.fsdp1 import root_of
from smp.parallel.agree import gather, on_all_or_none, on_rank_zero
from smp.parallel.dtensor_region import local_region, placed_like

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(model: nn.Module, *, compare: bool) -> None:
    """Check that all ranks hold the same parameters, and with ``compare`` the same bits: parts of different models make
    no model.

    Raises:
        ConfigError: with the first name that differs.
    """
    mine = [(name, tuple(p.shape), _sum_of_bits(p) if compare else 0) for name, p in model.named_parameters()]
    # Shapes first: bits of tensors with different shapes cannot be compared.
    ranks = gather(mine)
    for rank, other in enumerate(ranks):
        if [entry[:2] for entry in other] != [entry[:2] for entry in ranks[0]]:
            raise ConfigError(f"ranks 0 and {rank} have different models: other parameters or shapes")
        for first, second in zip(ranks[0], other, strict=True):
            if first != second:
                raise ConfigError(
                    f"{first[0]} differs between ranks 0 and {rank}: seed all ranks alike before the model is built, "
                    "load the same weights, or load_state_dict_from_rank0=True"
                )


def _sum_of_bits(parameter: torch.Tensor) -> int:
    """The sum of all bits as integers: exact in any order, so independent of the number of threads."""
    data = parameter.detach().contiguous().flatten()
    return int(data.view(_BITS[data.element_size()]).sum(dtype=torch.int64))


class FromRankZero:
    """Whole tensors that rank 0 sends to all.

    Args:
        device: of the process group's collectives.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def tensor(self, mine: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on every rank; ``mine`` gives its shape."""
        sent = mine.to(self.device) if dist.get_rank() == 0 else torch.empty_like(mine, device=self.device)
        sent = sent.contiguous()
        # Broadcast sends memory as it lies.
        dist.broadcast(sent, 0)
        return sent


def part_of(
    whole: torch.Tensor,
    parameter: nn.Parameter,
    dim: int | None,
    mesh: DeviceMesh,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    """This rank's part of a parameter, cut along ``dim`` over all ranks of ``mesh``; on a single rank a plain
    parameter."""
    dtype = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
    if mesh.size() == 1:
        made = nn.Parameter(whole.to(device=device, dtype=dtype), requires_grad=parameter.requires_grad)
    else:
        # dim None: every rank has the whole.
        part = whole if dim is None else whole.chunk(mesh.size(), dim)[_index_in(mesh)]
        # A copy of its own: a view would keep the whole tensor alive.
        part = part.to(device=device, dtype=dtype, copy=True).contiguous()
        # Of the whole tensor; without it from_local derives a stride from the part.
        stride = torch.empty(whole.shape, device="meta").stride()
        placements = [Replicate() if dim is None else Shard(dim)] * mesh.ndim
        tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
        made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    # Attributes on parameter objects (transformers sets some) survive.
    vars(made).update(vars(parameter))
    return made


def _index_in(mesh: DeviceMesh) -> int:
    """This rank's number in the mesh, row-major: the last dimension is fastest."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    flat = 0
    for size, index in zip(mesh.shape, coordinate, strict=True):
        flat = flat * size + index
    return flat


def install(model: nn.Module) -> None:
    """Give ``model`` a ``load_state_dict`` that takes whole tensors and a ``save_pretrained`` that gathers."""
    for module in model.modules():  # any of which may be loaded by itself
        module.register_load_state_dict_pre_hook(_cut_whole_tensors)
    for face in faces_of(model):
        if hasattr(face, "resize_token_embeddings"):
            face.resize_token_embeddings = _refuse_resize
        if hasattr(face, "save_pretrained"):
            face.save_pretrained = MethodType(_save_pretrained, face)


def _refuse_resize(*_: Any, **__: Any) -> None:
    raise ConfigError("resize_token_embeddings: the table is placed already: resize the model before smp.transform")


# Pre-hooks get the dict before keys are compared and may replace its tensors.
def _cut_whole_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if all(isinstance(tensor, DTensor) for tensor in state_dict.values()):
        return  # those around this module have cut them
    if root_of(module) is not None or not any(isinstance(p, DTensor) for p in module.parameters()):
        return  # FSDP1 cuts what it loads
    for name, own in module.state_dict(prefix=prefix, keep_vars=True).items():
        whole = state_dict.get(name)
        # Already sharded tensors, and those without a DTensor in the model, are loaded as they are.
        if not isinstance(own, DTensor) or not isinstance(whole, torch.Tensor) or isinstance(whole, DTensor):
            continue
        if whole.shape != own.shape:
            raise ConfigError(f"load_state_dict: {name} is {tuple(whole.shape)}, the model's is {tuple(own.shape)}")
        region = local_region(own)
        for dim, (first, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            whole = whole.narrow(dim, first, size)
        state_dict[name] = placed_like(own, whole.to(own.device).contiguous())


def _gathered(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, gathered over one mesh dimension after the other. (``full_tensor`` does the same, with a
    warning.)"""
    placements = list(tensor.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def whole_state_dict(model: nn.Module, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Whole tensors of the wanted names, on the CPU of rank 0; {} on others, which hold one tensor at a time. Every
    rank calls this. Tied parameters stay one tensor."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not wanted(name):
            continue
        # The gather is a collective: skipped on all ranks alike, as names and ties are the same.
        if id(tensor) in seen:
            if dist.get_rank() == 0:
                whole[name] = whole[seen[id(tensor)]]
            continue
        seen[id(tensor)] = name
        gathered = tensor.detach()
        if isinstance(gathered, DTensor):
            gathered = _gathered(gathered)
        if dist.get_rank() == 0:
            whole[name] = gathered.cpu()
    return whole


def _save_pretrained(self: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """Save as the class's own ``save_pretrained`` does. Every rank calls it; rank 0 writes, whatever
    ``is_main_process`` says."""
    options.pop("is_main_process", None)

    # On all ranks, before the first collective.
    def check() -> None:
        for key in ("state_dict", "distributed_checkpoint"):
            if options.pop(key, None):
                raise ConfigError(f"save_pretrained of a transformed model gathers the weights itself: leave out {key}")
        table = getattr(self.get_input_embeddings(), "weight", None)
        if table is not None and table.ndim == 1:  # a piece
            raise ConfigError("save_pretrained: FullyShardedDataParallel has the weights: see FSDP.state_dict_type")

    # A rank that raised alone would leave the others in the gathers below.
    on_all_or_none(check, ConfigError, "save_pretrained")
    written_by(self)
    whole = whole_state_dict(self, in_adapter_file(self))

    def write() -> None:
        cut = vars(self.config).pop("distributed_config", None)  # or transformers would gather again, on one rank
        try:
            type(self).save_pretrained(self, save_directory, state_dict=whole, **options)
        finally:
            if cut is not None:
                self.config.distributed_config = cut

    on_rank_zero(write, RuntimeError)
