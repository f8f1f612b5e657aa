"""Frozen linear layers with weights in 4 bits, for adapters on top (QLoRA, ``smp.kernels.precision.nf4``).

The packed weight replaces the weight and is split in the same way: TP splits its rows or columns, FSDP its rows of
packed bytes. Blocks of 64 elements are those of the whole matrix, so every layout rounds alike; a row is split between
blocks only. Layers dequantize a weight where they use it, in the forward pass and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config import ConfigError
from smp.kernels.precision import nf4
from smp.layers.linear import linear_layers
from smp.layers.parameter import SHARD_COLUMNS, tp_parameter
from smp.parallel.dtensor_region import local_part, local_region
from smp.parallel.owners import gathered
from smp.parallel.region import Region

PRODUCTS = {False: "nf4", True: "nf4-double"}
"""Names of the products, by whether scales are quantized, too."""
Read = Callable[[Sequence[int], torch.Tensor], None]
"""Fills a tensor with the region of the whole weight that begins at some offsets."""
_CHUNK = 1 << 24


@dataclass
class Blocks:
    """This rank's part of a matrix on its way into 4 bits.

    Attributes:
        halves: uint8 (rows, in / 2 of this rank).
        scales: fp32 (rows, in / 64 of this rank).
    """

    halves: torch.Tensor
    scales: torch.Tensor


def quantize_layers(model: nn.Module, *, double: bool) -> None:
    """Give all linear layers of ``model``, on the meta device, weights in 4 bits. After adapters were attached, before
    ``fully_shard``. Layers of other packages whose rows are not made of whole blocks stay as they are.

    Raises:
        ConfigError: a rank's part of a row is not made of whole blocks, or no layer's rows are.
    """
    for name, layer in _layers(model).items():
        weight = layer.weight
        if weight.shape[1] % nf4.BLOCK and "take_product" in vars(layer):  # in no layout
            continue
        # A row of the weight is quantized in blocks of 64 elements: where columns are cut, each rank's
        # part is a row of its own.
        placed = isinstance(weight, DTensor)  # transformers' layers on one tensor-parallel rank are plain
        ranks = weight.device_mesh.size() if placed and weight.placements[0] == SHARD_COLUMNS else 1
        try:
            # Width of a rank's packed rows, in 16-bit numbers; raises where blocks would be split.
            packed = nf4.width(weight.shape[1] // ranks, double=double)
        except ValueError as error:
            raise ConfigError(
                f"--load-in-4bit: {name}, cut over {ranks} tensor-parallel ranks: {error}; take fewer"
            ) from None
        shape = weight.shape[0], packed * ranks
        with torch.device(weight.device):
            wide = tp_parameter(shape, weight.placements[0], weight.device_mesh) if placed else torch.empty(shape)
        # Packed bytes under a dtype that FSDP gathers without a change.
        layer.weight = nn.Parameter(wide.to(torch.bfloat16), requires_grad=False)
        if "take_product" in vars(layer):
            layer.take_product(PRODUCTS[double])
        else:
            layer.product = PRODUCTS[double]
    if _layers(model) and not quantized_layers(model):
        raise ConfigError(
            f"--load-in-4bit: no linear layer has rows of whole blocks of {nf4.BLOCK} elements; leave it out"
        )


def _layers(model: nn.Module) -> dict[str, Any]:
    """Linear layers that can rest in 4 bits, by name: those of this package, and others with a method ``take_product``,
    which gets the name of a product."""
    others = {name: module for name, module in model.named_modules() if "take_product" in vars(module)}
    return {**linear_layers(model), **others}


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with weights in 4 bits, by name."""
    return {name: layer for name, layer in _layers(model).items() if layer.product in PRODUCTS.values()}


def region_of_weight(layer: Any) -> Region:
    """Which part of the whole matrix (out, in) this rank has in 4 bits."""
    # All column parts are equal, so packed offset / packed width is the number of the part.
    region, columns = local_region(layer.weight), _columns(layer)
    return Region((region.offsets[0], region.offsets[1] // region.sizes[1] * columns), (region.sizes[0], columns))


def whole_shape(layer: Any) -> tuple[int, int]:
    """(out, in)."""
    rows, packed = layer.weight.shape
    return rows, packed // local_region(layer.weight).sizes[1] * _columns(layer)


def _columns(layer: Any) -> int:
    double = layer.product == PRODUCTS[True]
    return nf4.BLOCK * nf4.blocks_of(local_region(layer.weight).sizes[1], double=double)


def read_blocks(layer: Any, read: Read, dtype: torch.dtype) -> Blocks:
    """Quantize this rank's part of a weight of ``dtype``, some rows at a time."""
    region, device = region_of_weight(layer), layer.weight.device
    rows, columns = region.sizes
    halves = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, columns // nf4.BLOCK, device=device)
    # Some rows at a time: the wide weight never exists as a whole.
    size = max(1, _CHUNK // columns)
    for start in range(0, rows, size):
        part = torch.empty(min(size, rows - start), columns, dtype=dtype)
        read((region.offsets[0] + start, region.offsets[1]), part)
        halves[start : start + size], scales[start : start + size] = nf4.quantize(part.to(device))
    return Blocks(halves, scales)


@torch.no_grad()
def fill(layer: Any, blocks: Blocks) -> None:
    """Pack a weight. The scales of the whole matrix are gathered for it: all ranks that share the layer call this."""
    whole, region = None, region_of_weight(layer)
    if layer.product == PRODUCTS[True]:
        rows, columns = whole_shape(layer)
        # Scales are quantized under a scale of all of them, so every rank needs all, whatever it has of the weight.
        whole = gathered(blocks.scales, (rows, columns // nf4.BLOCK), layer.weight)
    first = region.offsets[0], region.offsets[1] // nf4.BLOCK
    local_part(layer.weight).copy_(nf4.pack(blocks.halves, blocks.scales, whole, first))
