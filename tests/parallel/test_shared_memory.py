"""The backend ``smp_node``: sums and gathers through memory that ranks share, as on gloo; lost and late ranks."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp
from smp.parallel import shared_memory
from smp.parallel.network.group import CollectiveError
from tests.distributed import run_distributed
from tests.parallel.test_backend import each_collective, same

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
LIMIT = 2.0


def as_on_gloo(rank: int, world: int) -> None:
    """Each collective gives gloo's bits on whole numbers, also in several turns."""
    group: Any = dist.new_group(backend=shared_memory.NAME)
    for place in (shared_memory.PLACE, 1 << 12):
        shared_memory.PLACE = place
        made: Any = dist.new_group(backend=shared_memory.NAME)
        ours, theirs = (each_collective(rank, world, g) for g in (made, dist.group.WORLD))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert same(ours[name], theirs[name]), name
        counts = {name for name in made.counts if name.startswith("memory")}
        assert counts == {"memory all-reduce", "memory all-gather", "memory reduce-scatter"}
    gaps = torch.arange(12.0).view(3, 4)[:, ::2]
    dist.all_reduce(gaps, AVG, group=group)
    assert gaps.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert group.counts["memory all-reduce"] == 1


def test_collectives_are_those_of_gloo() -> None:
    run_distributed(as_on_gloo, 4)


def sums(rank: int, world: int) -> list[torch.Tensor]:
    group = dist.new_group(backend=shared_memory.NAME)
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        every = [torch.randn(1000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        expected = every[0].float()
        for other in every[1:]:
            expected = expected + other.float()
        dist.all_reduce(x, group=group)
        assert torch.equal(x, expected.to(dtype))  # in the order of ranks, and rounded once
        out.append(x)
    for turn in range(200):  # each rank is slow at other turns
        time.sleep(1e-3 * (turn % world == rank))
        x = torch.full((5000,), float(turn + rank))
        dist.all_reduce(x, group=group)
        assert x.unique().tolist() == [world * turn + sum(range(world))]
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_in_the_order_of_ranks_and_the_same_on_all(world: int) -> None:
    first, *others = run_distributed(sums, world)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def lose(rank: int, world: int, how: str) -> str:
    """Rank 1 takes no part in the second sum."""
    group = dist.new_group(backend=shared_memory.NAME, timeout=timedelta(seconds=LIMIT if how == "late" else 60))
    dist.all_reduce(torch.ones(10), group=group)
    if rank == 1:
        time.sleep(0.2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "left":
            dist.destroy_process_group(group)
        time.sleep(2 * LIMIT)
        return ""
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(10), group=group)
    assert time.monotonic() - started < 30
    with pytest.raises(CollectiveError, match="an earlier collective of this group failed"):
        dist.all_reduce(torch.ones(10), group=group)
    return str(caught.value)


@pytest.mark.parametrize(("how", "why"), [("left", "ended, or it left the group"), ("late", "it is late")])
def test_a_rank_that_does_not_come_is_named(how: str, why: str) -> None:
    said = run_distributed(lose, 2, how)[0]
    assert "all-reduce of 40 bytes failed after" in said and "rank 1 of the group has not come" in said and why in said


def test_a_killed_rank_ends_the_others_before_their_timeout() -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9") as caught:
        run_distributed(lose, 2, "killed")
    assert "rank 0:" not in str(caught.value)  # it got its error, long before its timeout of 60 seconds


def without_memory(rank: int, world: int) -> None:
    """Rank 1 cannot open what rank 0 made, as in another container."""
    if rank == 1:
        shared_memory._open = lambda path, secret: None
    group: Any = dist.new_group(backend=shared_memory.NAME)
    dist.all_reduce(x := torch.ones(10), group=group)
    assert x.tolist() == [world] * 10
    assert group.memory is None and dict(group.counts) == {"gloo all-reduce": 1}


def test_ranks_that_do_not_see_the_memory_send_over_gloo() -> None:
    run_distributed(without_memory, 2)


def another_memory(rank: int, world: int) -> None:
    """Behind the path is something else: a process of another machine."""
    with open("/proc/self/exe", "rb") as file:
        assert shared_memory._open(f"/proc/self/fd/{file.fileno()}", "0" * 32) is None
    assert shared_memory._open("/proc/self/fd/12345", "0" * 32) is None


def test_memory_of_another_group_is_not_taken() -> None:
    run_distributed(another_memory, 1)


def backends(rank: int, world: int, hosts: list[str]) -> str:
    import smp.hf.state as module

    module.socket.gethostname = lambda: hosts[rank]
    smp.init({"tensor_parallel_degree": 2})
    return dist.get_backend(smp.state.tp_process_group)


@pytest.mark.parametrize(("hosts", "expected"), [(["a", "a", "b", "b"], "smp_node"), (["a", "b", "a", "b"], "gloo")])
def test_tensor_parallel_ranks_of_one_machine_share_memory(hosts: list[str], expected: str) -> None:
    assert run_distributed(backends, 4, hosts) == [expected] * 4
