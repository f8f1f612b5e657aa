"""Whole tensors on owners and back, and on all ranks, for every way to cut them, unevenly too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from smp.config import Layout
from smp.layers.parameter import placed_parameter, tp_parameter
from smp.parallel.context import build_context
from smp.parallel.dtensor_region import local_part, local_region
from smp.parallel.owners import gathered, on_owners
from smp.sharding.parallelize import shard
from tests.distributed import run_distributed
from tests.fake_group import fake_context


def shapes(tp: int) -> list[tuple[int, int]]:
    """Which TP cuts by rows, by columns, not at all, and so on; rows that FSDP cannot share evenly."""
    return [(3 * tp, 10), (10, 3 * tp), (14, 2), (tp, 4), (3, 2 * tp), (8, 8), (5 * tp, 2)]


COUNT = len(shapes(1))


def whole(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1000 * number


def own(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    region = local_region(parameter)
    return tensor[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))]


def parameters(layout: Layout) -> list[nn.Parameter]:
    context = build_context(layout, "cpu")
    model = nn.Module()
    for number, shape in enumerate(shapes(layout.tp)):
        placement = (Shard(0), Shard(1), Replicate())[number % 3] if layout.tp > 1 else Replicate()
        setattr(model, f"p{number}", tp_parameter(shape, placement, context.tp))
    model.stack = placed_parameter((3, 5, 8), (Shard(2),), context.tp)
    if layout.data_parallel > 1:
        shard(model, [], context.fsdp)
    return list(model.parameters())


def check(rank: int, world: int) -> dict[str, list[int]]:
    """How many whole tensors a rank computed with, by layout."""
    counts = {}
    for layout in (Layout(tp=4), Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2)):
        tensors = parameters(layout)
        wholes = [whole(i, tuple(p.shape)) for i, p in enumerate(tensors)]
        seen: list[int] = []
        back: dict[int, torch.Tensor] = {}

        def compute(number: int, tensor: torch.Tensor, wholes: Any = wholes, seen: Any = seen) -> torch.Tensor:
            if number < COUNT:
                assert torch.equal(tensor, wholes[number])
            else:  # of a stack each matrix is whole
                assert tensor.shape[1:] == wholes[number].shape[1:]
            seen.append(number)
            return -tensor

        on_owners(tensors, lambda i: own(wholes[i], tensors[i]).clone(), compute, back.__setitem__)  # noqa: B023
        for number, p in enumerate(tensors):
            assert torch.equal(back[number], -own(wholes[number], p)), (layout, number)
            everywhere = gathered(own(wholes[number], p).contiguous(), p.shape, p)
            assert torch.equal(everywhere, wholes[number])
            assert isinstance(p, DTensor) and local_part(p).shape == back[number].shape
        counts[str(layout)] = seen
        dist.barrier()
    return counts


def test_four_ranks_share_the_work() -> None:
    ranks = run_distributed(check, 4)
    for layout in ranks[0]:
        seen = [r[layout] for r in ranks]
        assert set().union(*map(set, seen)) == set(range(COUNT + 1))
        if "dp_shard=4" in layout:  # every matrix once
            assert sorted(n for one in seen for n in one if n < COUNT) == list(range(COUNT))
            assert max(map(len, seen)) <= 3


def test_one_rank_has_all() -> None:
    with fake_context():
        tensors, back = [torch.ones(2, 3), torch.ones(4, 2)], {}
        on_owners(tensors, lambda i: tensors[i], lambda _, t: 2 * t, back.__setitem__)
        assert [back[i].sum().item() for i in range(2)] == [12, 16]
        assert torch.equal(gathered(tensors[0], (2, 3), tensors[0]), tensors[0])
