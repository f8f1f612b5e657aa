"""Weights in 4 bits have the bits of the whole matrix's, however layers and FSDP cut them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from smp.config import Layout
from smp.kernels.precision import nf4
from smp.layers import ColumnParallelLinear, RowParallelLinear
from smp.layers.adapters.quantized import (
    fill,
    quantize_layers,
    quantized_layers,
    read_blocks,
    region_of_weight,
    whole_shape,
)
from smp.parallel.context import build_context
from smp.parallel.dtensor_region import local_part
from smp.sharding.parallelize import shard
from tests.distributed import run_distributed

LAYOUTS = (
    Layout(tp=4),
    Layout(dp_shard=4),
    Layout(dp_shard=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_replicate=4),
)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"column": (20, 320), "heads": (2, 192), "row": (7, 768)}  # rows that FSDP cannot share evenly
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def bits(rank: int, world: int) -> list[str]:
    """What differs; nothing should."""
    wrong = []
    for layout in LAYOUTS:
        context = build_context(layout, "cpu")
        for double in (False, True):
            with torch.device("meta"):
                model = nn.Module()
                model.column = ColumnParallelLinear(320, 20, context, bias=False)
                model.heads = ColumnParallelLinear(
                    192, 2, context, bias=False, parts=2
                )  # every rank holds all with tp 4
                model.row = RowParallelLinear(768, 7, context, bias=False)
            quantize_layers(model, double=double)
            if layout.data_parallel > 1:
                shard(model, [], context.fsdp, bf16=True)
            model.to_empty(device="cpu")
            for name, layer in quantized_layers(model).items():
                weight = weights()[name]

                def read(offsets: Sequence[int], out: torch.Tensor, weight: torch.Tensor = weight) -> None:
                    (row, column), (rows, columns) = offsets, out.shape
                    out.copy_(weight[row : row + rows, column : column + columns])

                assert whole_shape(layer) == tuple(weight.shape)
                fill(layer, read_blocks(layer, read, torch.float32))
                halves, scales = nf4.quantize(weight)
                whole = nf4.pack(halves, scales, scales if double else None, (0, 0))
                wide = nf4.widen(whole, torch.float32, double=double)
                region = region_of_weight(layer)
                (row, column), (rows, columns) = region.offsets, region.sizes
                found = nf4.widen(local_part(layer.weight.detach()), torch.float32, double=double)
                if not torch.equal(found, wide[row : row + rows, column : column + columns]):
                    wrong.append(f"{layout}: {name}, double {double}")
    return wrong


def test_every_layout_has_the_same_bits() -> None:
    assert run_distributed(bits, 4) == [[]] * 4
