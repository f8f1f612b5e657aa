"""Copies in the memory of nodes: written, kept by a neighbour, found again, and sent to who lacks them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from smp.checkpoint import peers
from smp.checkpoint.api import load_from
from smp.checkpoint.folders.lock import started_at
from smp.checkpoint.peer_cleanup import remove_with_launcher
from smp.checkpoint.peer_files import Location, next_nodes
from smp.checkpoint.peers import PeerCopies
from smp.checkpoint.spare_files import SpareNode, serving, spare_nodes
from tests.distributed import run_distributed


def test_a_copy_is_on_another_node() -> None:
    even = [Location(node, local) for node in range(3) for local in range(2)]
    assert next_nodes(even) == [2, 3, 4, 5, 0, 1]
    uneven = [Location(0, 0), Location(0, 1), Location(4, 0)]
    assert next_nodes(uneven) == [2, 2, 0]
    assert next_nodes(even[:2]) == [None, None]


def test_memory_is_freed_when_the_launcher_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as launcher:
        folder = tmp_path / "all" / f"{launcher.pid}-{started_at(launcher.pid)}"
        (folder / "iter_0000003-00000000").mkdir(parents=True)
        # Not that of another process with its number.
        other = folder.with_name(f"{launcher.pid}-1")
        other.mkdir()
        for _ in range(2):  # torchrun starts workers several times
            remove_with_launcher(folder)
        remove_with_launcher(other)
        time.sleep(1)
        assert folder.exists()
        launcher.kill()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [path.name for path in folder.parent.iterdir()] == [other.name]


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
    location = Location(rank // 2, rank % 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "own_folder", lambda path: path / str(location.node))
        copies = PeerCopies(base, location, said.append)
        assert copies.find() is None
        for iteration in (3, 6):
            copies.begin(state_of(world, iteration), {"progress": {"iteration": iteration}}, {})
            while copies.busy:
                copies.poll()
        kept = sorted(path.name[:12] for path in copies.root.iterdir())
        copies.close(done=None)
        dist.barrier()
        if location.local_rank == 0 and location.node in lost:
            shutil.rmtree(copies.root)
        dist.barrier()
        again = PeerCopies(base, location, said.append)
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


def started(base: str, node: int, patch: pytest.MonkeyPatch, spare: Sequence[SpareNode] = ()) -> PeerCopies:
    """On the node of that number, of one process."""
    patch.setattr(peers, "own_folder", lambda path: path / str(node))
    return PeerCopies(base, Location(node, 0), lambda line: None, spare=spare)


def copy(copies: PeerCopies, state: dict[str, torch.Tensor], iteration: int) -> None:
    copies.begin(state, {"progress": {"iteration": iteration}}, {})
    copies.wait()


def gone_on(rank: int, world: int, base: str) -> Any:
    """A start that goes on from a copy makes one of the same iteration at once; then all start again. What a start did
    not go on from, because it is not whole, is not the newest one later."""
    with pytest.MonkeyPatch.context() as patch:
        first = started(base, rank, patch)
        copy(first, state_of(world, 6), 6)
        torn = first.root / "iter_0000009-00000000"
        shutil.copytree(first.root / str(first._kept), torn)
        (torn / f"shard_{1 - rank:05d}.safetensors").unlink()
        (torn / "shard_00000.safetensors").unlink(missing_ok=True)
        dist.barrier()
        second = started(base, rank, patch)
        assert second.find() is not None
        copy(second, state_of(world, 6), 6)
        both = sorted(path.name[:12] for path in second.root.iterdir())
        third = started(base, rank, patch)
        found = third.find()
        assert found is not None
        state = state_of(world, -1)
        load_from(*found, state)
        copy(third, state_of(world, 7), 7)
        copy(third, state_of(world, 8), 8)
        left = sorted(path.name[:12] for path in third.root.iterdir())
        return both, found[0].local.name, whole(state), left


def test_ranks_go_on_from_one_copy_also_where_an_iteration_has_two(tmp_path: Path) -> None:
    for attempt in range(4):  # names are drawn, and so is the order of a set of them
        ranks = run_distributed(gone_on, 2, str(tmp_path / str(attempt)))
        assert ranks[0][1] == ranks[1][1]
        for both, _, state, left in ranks:
            assert both == ["iter_0000006", "iter_0000006"] and left == ["iter_0000007", "iter_0000008"]
            assert torch.equal(state["plain"], torch.full((3,), 6.0))


def changing(rank: int, world: int, base: str) -> dict[str, torch.Tensor]:
    """What makes batches has other tensors from copy to copy."""
    with pytest.MonkeyPatch.context() as patch:
        copies = started(base, rank, patch)
        state = state_of(world, 1)
        copy(copies, state | {"rollouts.current.ids": torch.arange(4.0), "rollouts.next.ids": torch.arange(2.0)}, 1)
        copy(copies, state | {"rollouts.current.ids": torch.arange(6.0)}, 2)
        found = started(base, rank, patch).find()
        assert found is not None and "rollouts.next.ids" not in found[1].tensors
        loaded = state_of(world, -1) | {"rollouts.current.ids": torch.zeros(6)}
        load_from(*found, loaded)
        return whole(loaded)


def test_tensors_may_change_from_copy_to_copy(tmp_path: Path) -> None:
    for state in run_distributed(changing, 2, str(tmp_path)):
        assert torch.equal(state["rollouts.current.ids"], torch.arange(6.0)) and float(state["plain"][0]) == 1


def smaller(rank: int, world: int, base: str) -> dict[str, torch.Tensor] | None:
    """Three nodes make a copy; the third is lost, and of the others one trains on and one is spare. What that has of a
    newer copy was cut off."""
    with pytest.MonkeyPatch.context() as patch:
        copies = started(base, rank, patch)
        copy(copies, state_of(world, 5.0), 5)
        newer = copies.root / "iter_0000006-00000000"
        shutil.copytree(copies.root / str(copies._kept), newer)
        if rank == 1:
            with (newer / "shard_00001.safetensors").open("r+b") as file:
                file.truncate(8)
        dist.barrier()
        dist.destroy_process_group()
        if rank > 0:
            return None
        shapes = {"sharded": (7, 5), "replicated": (5,), "plain": (3,)}
        store = dist.HashStore()
        with serving(Path(base) / "1", store, 1, "127.0.0.1"):
            (node,) = spare_nodes(store, [1], timedelta(seconds=5))
            refused = replace(node, token="0" * 32)
            with pytest.raises(OSError, match="404"):
                refused.fetch(next(iter(node.copies)), "part_00001.json", Path(base) / "x")
            found = started(base, 0, patch, [node]).find()
            assert found is not None
            state = {name: torch.zeros(shape) for name, shape in shapes.items()}
            load_from(*found, state)
            return state


def test_a_spare_node_gives_what_it_has(tmp_path: Path) -> None:
    state = run_distributed(smaller, 3, str(tmp_path))[0]
    assert torch.equal(state["sharded"], torch.arange(35.0).view(7, 5) + 5) and float(state["plain"][0]) == 5


def full(rank: int, world: int, base: str) -> list[str]:
    """A node whose memory is full."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "own_folder", lambda path: path / str(rank))
        copies = PeerCopies(base, Location(rank, 0), said.append)
        if rank == 1:
            patch.setattr(PeerCopies, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        copies.begin(state_of(world, 1), {"progress": {"iteration": 1}}, {})
        copies.wait()
        assert copies.newest is None and copies.find() is None
    return said


def test_a_full_memory_is_said_and_training_goes_on(tmp_path: Path) -> None:
    (said, _) = run_distributed(full, 2, str(tmp_path))
    assert "WARNING: no copy in memory: " in said[-1] and "rank 1: OSError: [Errno 28] No space left" in said[-1]


def damaged(rank: int, world: int, base: str, nodes: list[int]) -> Any:
    """Bytes of the file of rank 0 have changed on these nodes."""
    with pytest.MonkeyPatch.context() as patch:
        first = started(base, rank, patch)
        copy(first, state_of(world, 6), 6)
        if rank in nodes:
            path = first.root / str(first._kept) / "shard_00000.safetensors"
            data = bytearray(path.read_bytes())
            data[-3] ^= 4
            path.write_bytes(data)
        dist.barrier()
        second = started(base, rank, patch)
        found = second.find()
        assert found is not None
        assert second.drop_damaged(*found) == bool(nodes) and not second.drop_damaged(*found)
        again = second.find()
        if again is None:
            return None
        state = state_of(world, -1)
        load_from(*again, state)
        return whole(state)


def test_a_damaged_file_has_a_twin(tmp_path: Path) -> None:
    for nodes in ([], [0], [1]):
        for state in run_distributed(damaged, 2, str(tmp_path / str(nodes)), nodes):
            assert torch.equal(state["sharded"], torch.arange(35.0).view(7, 5) + 6)
    assert run_distributed(damaged, 2, str(tmp_path / "both"), [0, 1]) == [None, None]


def lost_in_between(rank: int, world: int, base: str, lost: str) -> Any:
    """A process is lost when the files of a second copy are written, or all but one, and before anybody knows that; or
    its node is, with its memory."""
    with pytest.MonkeyPatch.context() as patch:
        first = started(base, rank, patch)
        copy(first, state_of(world, 6), 6)
        first.begin(state_of(world, 9), {"progress": {"iteration": 9}}, {})
        assert first._save is not None
        first._save.thread.join()
        if lost == "part":
            (first._save.folder.local / "part_00001.json").unlink()
        dist.barrier()
        if lost == "node" and rank == 1:
            shutil.rmtree(first.root)
        dist.barrier()
        found = started(base, rank, patch).find()
        assert found is not None
        state = state_of(world, -1)
        load_from(*found, state)
        return found[1].extra, whole(state)


def test_a_copy_is_whole_when_its_files_are(tmp_path: Path) -> None:
    for lost, iteration in (("process", 9), ("node", 9), ("part", 6)):
        for extra, state in run_distributed(lost_in_between, 2, str(tmp_path / lost), lost):
            assert extra == {"progress": {"iteration": iteration}}
            assert torch.equal(state["sharded"], torch.arange(35.0).view(7, 5) + iteration)
