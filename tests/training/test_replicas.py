"""Checksums find every flipped bit, the majority's copy repairs, and what has no majority ends the run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from smp.training.faults import replicas
from smp.training.faults.replicas import checksum, describe, differences, repair
from tests.distributed import run_distributed


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """One bit of one element, in place."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    words = tensor.view(-1).view(kinds[tensor.itemsize])
    lowest = -(1 << (8 * tensor.itemsize - 1)) if tensor.itemsize > 1 else 128
    words[element] ^= lowest if bit == 8 * tensor.itemsize - 1 else 1 << bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_flipped_bit_changes_the_checksum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK", 64)
    draw = random.Random(1)
    for count in (1, 3, 64, 1001):
        tensor = torch.randn(count).mul(40).to(dtype)
        before = checksum(tensor)
        assert torch.equal(checksum(tensor.clone()), before)
        for _ in range(100):
            element, bit = draw.randrange(count), draw.randrange(8 * tensor.itemsize)
            flip(tensor, element, bit)
            assert not torch.equal(checksum(tensor), before)
            flip(tensor, element, bit)
        assert torch.equal(checksum(tensor), before)
    swapped = torch.arange(10.0)
    assert checksum(swapped) != checksum(swapped.flip(0)), "places count"


def compared(rank: int, size: int, tp: int, wrong: int, copies: int) -> Any:
    """A mesh (replicas, shards, tp); a flipped bit of a matrix (cut over tp) and of a norm on one rank."""
    shards = size // copies // tp
    mesh = init_device_mesh("cpu", (copies, shards, tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    torch.manual_seed(3)
    matrix = distribute_tensor(torch.randn(8, 12), mesh, [Replicate(), Shard(0), Shard(1)])
    norm = distribute_tensor(torch.randn(8), mesh, [Replicate(), Shard(0), Replicate()])
    tensors = {"matrix": matrix, "norm": norm, "step": torch.tensor(float(rank))}
    assert differences(tensors) == []
    if rank == wrong:
        flip(matrix.to_local(), 3, 0)
        flip(norm.to_local(), 1, 31)
    found = differences(tensors)
    lines = describe(found, 5)
    known = [one for one in found if one.source is not None]
    repair(known, tensors)
    return [(one.name, one.wrong, one.source) for one in found], lines, [one.name for one in differences(tensors)]


@pytest.mark.parametrize(("size", "tp", "copies", "wrong"), [(3, 1, 3, 2), (6, 2, 3, 4), (4, 1, 4, 0)])
def test_the_rank_is_named_and_gets_the_copy_of_the_majority(size: int, tp: int, copies: int, wrong: int) -> None:
    for found, lines, left in run_distributed(compared, size, tp, wrong, copies):
        assert {(name, ranks) for name, ranks, _ in found} == {("matrix", (wrong,)), ("norm", (wrong,))}
        assert all(source not in (None, wrong) for _, _, source in found) and left == []
        assert all("iteration 5: silent corruption: " in line and f"rank {wrong} on " in line for line in lines)


def test_of_two_copies_none_is_right() -> None:
    for found, lines, left in run_distributed(compared, 4, 1, 2, 2):  # two shards, two copies each
        assert {(name, ranks, source) for name, ranks, source in found} == {
            ("matrix", (0, 2), None),
            ("norm", (0, 2), None),
        }
        assert lines[0].endswith(", and no majority says which is right") and len(left) == 2
        assert "differ between rank 0 on " in lines[0]


def test_norms_over_tensor_parallel_ranks_are_copies_too() -> None:
    """Two replicas of two tensor-parallel ranks make four copies of a norm, and two of a matrix."""
    for found, _, _ in run_distributed(compared, 4, 2, 3, 2):
        assert {(name, ranks, source is None) for name, ranks, source in found} == {
            ("matrix", (1, 3), True),
            ("norm", (3,), False),
        }
