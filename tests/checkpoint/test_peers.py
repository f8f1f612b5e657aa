"""Copies in the memory of nodes: written, kept by a neighbour, found again, and sent to who lacks them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from smp.checkpoint import peers
from smp.checkpoint.api import load_from
from smp.checkpoint.peers import PeerCopies, Place, next_nodes
from tests.distributed import run_distributed


def test_a_copy_is_on_another_node() -> None:
    even = [Place(node, local) for node in range(3) for local in range(2)]
    assert next_nodes(even) == [2, 3, 4, 5, 0, 1]
    uneven = [Place(0, 0), Place(0, 1), Place(4, 0)]
    assert next_nodes(uneven) == [2, 2, 0]
    assert next_nodes(even[:2]) == [None, None]


def state_of(world: int, fill: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) + fill
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole[0] * 2, mesh, [Replicate()]),
        "plain": torch.full((3,), fill),
    }


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


def copied(rank: int, world: int, base: str, lost: list[int]) -> list[Any]:
    """Copies of two steps; then the memory of some nodes is lost, and all start anew."""
    said: list[str] = []
    place = Place(rank // 2, rank % 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "own_folder", lambda path: path / str(place.node))
        copies = PeerCopies(base, place, said.append)
        assert copies.find() is None
        for iteration in (3, 6):
            copies.begin(state_of(world, iteration), {"progress": {"iteration": iteration}}, {})
            while copies.busy:
                copies.poll()
        kept = sorted(path.name[:12] for path in copies.root.iterdir())
        copies.close(done=None)
        dist.barrier()
        if place.local_rank == 0 and place.node in lost:
            shutil.rmtree(copies.root)
        dist.barrier()
        again = PeerCopies(base, place, said.append)
        found = again.find()
        if found is None:
            return [kept, None, said]
        state = state_of(world, -1)
        load_from(found[0], found[1], state)
        return [kept, (found[1].extra["progress"]["iteration"], whole(state)), said]


def test_any_one_node_may_be_lost(tmp_path: Path) -> None:
    for lost in ([], [1], [0]):
        ranks = run_distributed(copied, 4, str(tmp_path / str(lost)), lost)
        want = {"sharded": torch.arange(35.0).view(7, 5) + 6, "plain": torch.full((3,), 6.0)}
        want["replicated"] = want["sharded"][0] * 2
        for kept, result, _ in ranks:
            assert kept == ["iter_0000003", "iter_0000006"]  # the one before goes when the next begins
            assert result is not None and result[0] == 6
            assert all(torch.equal(result[1][name], want[name]) for name in want)
        assert "in that of the next one" in ranks[0][2][0]


def test_both_of_two_nodes_lost_is_no_copy(tmp_path: Path) -> None:
    assert all(result is None for _, result, _ in run_distributed(copied, 4, str(tmp_path), [0, 1]))


def full(rank: int, world: int, base: str) -> list[str]:
    """A node whose memory is full."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "own_folder", lambda path: path / str(rank))
        copies = PeerCopies(base, Place(rank, 0), said.append)
        if rank == 1:
            patch.setattr(PeerCopies, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        copies.begin(state_of(world, 1), {"progress": {"iteration": 1}}, {})
        copies.wait()
        assert copies.newest is None and copies.find() is None
    return said


def test_a_full_memory_is_said_and_training_goes_on(tmp_path: Path) -> None:
    (said, _) = run_distributed(full, 2, str(tmp_path))
    assert "WARNING: no copy in memory: " in said[-1] and "rank 1: OSError: [Errno 28] No space left" in said[-1]
