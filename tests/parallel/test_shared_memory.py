"""The backend ``smp_node``: sums and gathers through memory that ranks share, as on gloo; lost and late ranks."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import mmap
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import smp
from smp.parallel import node_group, shared_memory
from smp.parallel.network.group import CollectiveError
from tests.distributed import run_distributed
from tests.parallel.test_backend import each_collective, same

AVG = dist.ReduceOp.AVG
LIMIT = 2.0


def as_on_gloo(rank: int, world: int) -> None:
    """Each collective gives gloo's bits on whole numbers, also in several chunks."""
    group: Any = dist.new_group(backend=node_group.NAME)
    for size in (shared_memory.SLOT_BYTES, 1 << 12):
        shared_memory.SLOT_BYTES = size
        made: Any = dist.new_group(backend=node_group.NAME)
        found, expected = (each_collective(rank, world, g) for g in (made, dist.group.WORLD))
        assert found.keys() == expected.keys()
        for name in found:
            assert same(found[name], expected[name]), name
        counts = {name for name in made.counts if name.startswith("memory")}
        kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier")
        assert counts == {f"memory {kind}" for kind in kinds}
    gaps = torch.arange(12.0).view(3, 4)[:, ::2]
    dist.all_reduce(gaps, AVG, group=group)
    assert gaps.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert group.counts["memory all-reduce"] == 1
    whatever_lies_in_memory(rank, world, group)


def whatever_lies_in_memory(rank: int, world: int, group: Any) -> None:
    """Ranks whose tensors lie differently go the same way; averages; tensors without elements."""
    total = float(sum(range(world)))
    negated = torch._neg_view(torch.full((2, 6), -float(rank)))[:, ::2] if rank else torch.zeros(2, 3)
    dist.all_reduce(negated, group=group)
    assert negated.tolist() == [[total] * 3] * 2
    given = torch._neg_view(-torch.arange(6.0))[::2] if rank == 1 else torch.arange(0.0, 6.0, 2.0)
    gathered = torch.zeros(6 * world)[::2] if rank == 2 else torch.zeros(3 * world)
    dist.all_gather_into_tensor(gathered, given, group=group)
    assert gathered.tolist() == [0.0, 2.0, 4.0] * world
    parts = torch.arange(2.0 * world).repeat_interleave(2)[::2] if rank == 1 else torch.arange(2.0 * world)
    part = torch._neg_view(torch.zeros(4))[::2] if rank == 0 else torch.zeros(2)
    dist.reduce_scatter_tensor(part, parts + rank, AVG, group=group)
    assert part.tolist() == [2 * rank + total / world, 2 * rank + 1 + total / world]
    dist.reduce_scatter_tensor(part, parts, group=group)
    assert part.tolist() == [2.0 * rank * world, (2.0 * rank + 1) * world]
    dist.all_reduce(torch.empty(0, 3), group=group)
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0), group=group)
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), group=group)
    with torch.inference_mode():
        frozen = torch.ones(3)
        made: Any = dist.new_group(backend=node_group.NAME)
    for one in (group, made):
        dist.all_reduce(frozen, group=one)
    dist.all_reduce(x := torch.ones(3), group=made)
    assert frozen.tolist() == [world**2] * 3 and x.tolist() == [world] * 3
    counts = {"memory all-reduce": 4, "memory all-gather": 2, "memory reduce-scatter": 3}
    assert dict(group.counts) == counts  # none went over gloo


def test_collectives_are_those_of_gloo() -> None:
    run_distributed(as_on_gloo, 4)


def sums(rank: int, world: int) -> list[torch.Tensor]:
    group = dist.new_group(backend=node_group.NAME)
    out = []
    # The large ones are reduced together by more than two ranks, each its part.
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (1000, 50_001)):
        x = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
        every = [torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        expected = every[0].float()
        for other in every[1:]:
            expected = expected + other.float()
        dist.all_reduce(x, group=group)
        assert torch.equal(x, expected.to(dtype))  # in the order of ranks, and rounded once
        out.append(x)
    for call in range(200):  # each rank is slow at other calls
        time.sleep(1e-3 * (call % world == rank))
        x = torch.full((5000,), float(call + rank))
        dist.all_reduce(x, group=group)
        assert x.unique().tolist() == [world * call + sum(range(world))]
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_in_the_order_of_ranks_and_the_same_on_all(world: int) -> None:
    first, *others = run_distributed(sums, world)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


CALLS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "size": (lambda g, _: dist.all_reduce(torch.ones(20), group=g), "all-reduce of 80 bytes (float32, SUM)"),
    "chunks": (lambda g, _: dist.all_reduce(torch.ones(5000), group=g), "all-reduce of 20,000 bytes (float32, SUM)"),
    "none": (lambda g, _: dist.all_reduce(torch.ones(0), group=g), "all-reduce of 0 bytes (float32, SUM)"),
    "dtype": (
        lambda g, _: dist.all_reduce(torch.ones(20, dtype=torch.bfloat16), group=g),
        "all-reduce of 40 bytes (bfloat16, SUM)",
    ),
    "operation": (lambda g, _: dist.all_reduce(torch.ones(10), AVG, group=g), "all-reduce of 40 bytes (float32, AVG)"),
    "gather": (
        lambda g, world: dist.all_gather_into_tensor(torch.ones(10 * world), torch.ones(10), group=g),
        "all-gather of 40 bytes (float32)",
    ),
    "scatter": (
        lambda g, world: dist.reduce_scatter_tensor(torch.ones(10), torch.ones(10 * world), group=g),
        "reduce-scatter of 120 bytes (float32, SUM)",
    ),
    "largest": (
        lambda g, _: dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX, group=g),
        "all-reduce of 40 bytes (float32, MAX)",
    ),
    "broadcast": (
        lambda g, _: dist.broadcast(torch.ones(10), 2, group=g),
        "broadcast of 40 bytes (float32, from rank 2)",
    ),
    "barrier": (lambda g, _: dist.barrier(group=g), "barrier"),
    "all-to-all": (
        lambda g, world: dist.all_to_all_single(torch.ones(world), torch.ones(world), group=g),
        "all-to-all",
    ),
}
"""What one rank calls while others sum ten numbers."""


def call_differently(rank: int, world: int) -> None:
    """Rank 1 calls something else after sums that all take part in."""
    shared_memory.SLOT_BYTES = 1 << 12
    for name, (call, says) in CALLS.items():
        group = dist.new_group(backend=node_group.NAME)
        for _ in range(2):
            dist.all_reduce(torch.full((1000,), 9.0), group=group)
        with pytest.raises(CollectiveError, match="call different collectives") as caught:
            call(group, world) if rank == 1 else dist.all_reduce(torch.ones(10), group=group)
        others = "rank 0 all-reduce of 40 bytes (float32, SUM)" if rank == 1 else f"rank {rank} all-reduce of 40 bytes"
        assert f"rank 1 {says}" in str(caught.value) and others in str(caught.value), (name, str(caught.value))
        with pytest.raises(CollectiveError, match="an earlier collective of this group failed: ranks of a group"):
            dist.all_reduce(torch.ones(10), group=group)


def test_ranks_that_call_different_collectives_all_get_an_error() -> None:
    run_distributed(call_differently, 3)


def interrupt(rank: int, world: int) -> None:
    """Rank 0 is interrupted in the first of four chunks, and rank 1 comes only then. It does not wait for rank 0."""
    shared_memory.SLOT_BYTES = 1 << 12
    group = dist.new_group(backend=node_group.NAME, timeout=timedelta(hours=1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(4096), group=group)
        store.set("interrupted", "")
    else:
        store.wait(["interrupted"])
        with pytest.raises(CollectiveError, match="rank 0 of the group has not come: .* interrupted there"):
            dist.all_reduce(torch.ones(4096), group=group)
    with pytest.raises(CollectiveError, match="it was interrupted" if rank == 0 else "rank 0 of the group"):
        dist.all_reduce(torch.ones(4096), group=group)


def test_an_interrupted_rank_gives_no_wrong_numbers() -> None:
    run_distributed(interrupt, 2)


def exchange(rank: int, world: int) -> None:
    """Parts of random sizes, empty ones too, and around a ring, in several chunks; all dtypes; ranks that disagree."""
    shared_memory.SLOT_BYTES = 1 << 8
    group: Any = dist.new_group(backend=node_group.NAME)
    random = np.random.default_rng(0)
    for dtype in (*shared_memory.DTYPES, torch.bfloat16):
        rows = random.integers(0, 40, (world, world))  # from, to
        given = (torch.arange(int(rows[rank].sum()) * 3) % 7 + rank).to(dtype).view(-1, 3)
        into = [torch.empty(int(rows[:, rank].sum()), 3, dtype=dtype) for _ in range(2)]
        for output, one in zip(into, (group, None), strict=True):
            # gloo knows no 8-bit floats: as bytes
            received, sent = (x if one is group else x.view(torch.uint8) for x in (output, given))
            dist.all_to_all_single(received, sent, rows[:, rank].tolist(), rows[rank].tolist(), group=one)
        assert torch.equal(*(x.view(torch.uint8) for x in into)), dtype
        x, shifted = torch.full((100,), rank + 1).to(dtype), torch.zeros(100).to(dtype)
        assert group.shift(shifted, x, (rank - 1) % world) is not None
        assert (
            shifted.to(torch.complex64) == torch.full((100,), (rank - 1) % world + 1).to(dtype).to(torch.complex64)
        ).all()
    for count in (0, 1):  # as few elements, whose strides say nothing
        lone, into_lone = torch.full((4,), float(rank))[::3][:count], torch.zeros(4)[::3][:count]
        dist.all_to_all_single(into_lone, lone, [count, 0][:: 1 - 2 * rank], [count, 0][:: 1 - 2 * rank], group=group)
        assert into_lone.tolist() == [float(rank)] * count
    assert set(group.counts) == {"memory all-to-all", "memory shift"}
    if rank == 0:  # it sends itself two, and expects one
        with pytest.raises(CollectiveError, match="rank 0 sends 8 bytes to rank 0, which expects 4"):
            dist.all_to_all_single(torch.empty(2), torch.ones(3), [1, 1], [2, 1], group=group)
    else:
        dist.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [1, 1], group=group)
    with pytest.raises(CollectiveError, match="an earlier collective" if rank == 0 else "rank 0 of the group"):
        dist.barrier(group=group)


def test_parts_go_to_all_ranks_and_around_a_ring() -> None:
    run_distributed(exchange, 2)


def overlap(rank: int, world: int) -> None:
    """What is sent and what arrives share memory, in every position, over several chunks."""
    shared_memory.SLOT_BYTES = 1 << 6
    group = dist.new_group(backend=node_group.NAME)
    n = 40
    every = [torch.arange(float(world * n)) * (r + 1) for r in range(world)]
    for start in range((world - 1) * n + 1):
        x = every[rank].clone()
        dist.reduce_scatter_tensor(x[start : start + n], x, group=group)
        assert torch.equal(x[start : start + n], sum(every)[rank * n : (rank + 1) * n]), start  # type: ignore[index]
        x = every[rank].clone()
        dist.all_gather_into_tensor(x, x[start : start + n], group=group)
        assert torch.equal(x, torch.cat([other[start : start + n] for other in every])), start


def test_results_may_lie_in_the_memory_of_the_input() -> None:
    run_distributed(overlap, 3)


def on_two_threads(rank: int, world: int) -> None:
    """Both call the same, so any order of theirs is right."""
    group: Any = dist.new_group(backend=node_group.NAME)

    def sum_often(_: int) -> set[float]:
        found = set()
        for call in range(100):
            time.sleep(2e-3 * (rank == 1 and call % 20 == 0))
            dist.all_reduce(x := torch.ones(100_000), group=group)
            found |= set(x.unique().tolist())
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sum_often, range(2))) == [{float(world)}] * 2
    assert dict(group.counts) == {"memory all-reduce": 200}


def test_threads_of_one_process_share_a_group() -> None:
    run_distributed(on_two_threads, 2)


def nested(rank: int, world: int) -> None:
    """The handler of a signal calls a collective inside of another: an error at once, and the outer one goes on."""
    group = dist.new_group(backend=node_group.NAME)
    store = dist.distributed_c10d._get_default_store()

    def call(*_: Any) -> None:
        with pytest.raises(CollectiveError, match="or has not ended"):
            dist.all_reduce(torch.ones(10), group=group)
        store.set("called", "")

    if rank == 0:
        signal.signal(signal.SIGALRM, call)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        store.wait(["called"])
    for _ in range(2):
        dist.all_reduce(x := torch.ones(10), group=group)
        assert x.tolist() == [world] * 10


def test_a_collective_inside_of_another_is_an_error() -> None:
    run_distributed(nested, 2)


def lose(rank: int, world: int, how: str) -> str:
    """Rank 1 takes no part in the second sum, or only after rank 0 has given up, or not, for ten seconds."""
    limit = LIMIT if how in ("late", "stopped") else 60
    group: Any = dist.new_group(backend=node_group.NAME, timeout=timedelta(seconds=limit))
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(10), group=group)
    if rank == 1:
        store.set("process", str(os.getpid()))
        time.sleep(0.2)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "left":
            dist.destroy_process_group(group)
        if how == "own timeout":
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["gave up"], timedelta(seconds=10))
            dist.all_reduce(torch.ones(10), group=group)
        store.wait(["gave up"])
        return ""
    options = dist.AllreduceOptions()
    if how == "own timeout":
        options.timeout = timedelta(seconds=LIMIT)
    with pytest.raises(CollectiveError) as caught:
        group.allreduce([torch.ones(10)], options)
    with pytest.raises(CollectiveError, match="an earlier collective of this group failed"):
        dist.all_reduce(torch.ones(10), group=group)
    if how == "stopped":
        os.kill(int(store.get("process")), signal.SIGCONT)
    store.set("gave up", "")
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("left", "ended, or it left the group"),
        ("late", "it is late"),
        ("stopped", "it is late"),
        ("own timeout", "it is late"),
    ],
)
def test_a_rank_that_does_not_come_is_named(how: str, why: str) -> None:
    said = run_distributed(lose, 2, how)[0]
    assert "all-reduce of 40 bytes (float32, SUM) failed after" in said
    assert "rank 1 of the group has not come" in said and why in said


def test_a_killed_rank_ends_the_others_before_their_timeout() -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9") as caught:
        run_distributed(lose, 2, "killed")
    assert "rank 0:" not in str(caught.value)  # it got its error, long before its timeout of 60 seconds


def refused(number: int) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def without_memory(rank: int, world: int, what: str) -> None:
    """One rank cannot: as in another container, by a filter of system calls, without room."""
    if what == "open" and rank == 1:
        shared_memory._open = lambda path, secret: None
    elif what == "memfd_create" and rank == 0:
        os.memfd_create = refused(errno.EPERM)
    elif what == "ftruncate" and rank == 0:
        os.ftruncate = refused(errno.EFBIG)
    elif what == "pidfd_open" and rank == 2:
        os.pidfd_open = refused(errno.ENOSYS)
    elif what == "mmap" and rank == 1:
        mmap.mmap = refused(errno.ENOMEM)  # type: ignore[misc, assignment]
    elif what == "room":
        shared_memory._MOST = 2
    before = len(os.listdir("/proc/self/fd"))
    assert shared_memory.join(rank, world, dist.PrefixStore(what, dist.distributed_c10d._get_default_store())) is None
    assert len(os.listdir("/proc/self/fd")) == before
    group: Any = dist.new_group(backend=node_group.NAME)
    dist.all_reduce(x := torch.ones(10), group=group)
    assert x.tolist() == [world] * 10
    assert group.memory is None and dict(group.counts) == {"gloo all-reduce": 1}


@pytest.mark.parametrize("what", ["open", "memfd_create", "ftruncate", "pidfd_open", "mmap", "room"])
def test_ranks_of_which_one_cannot_share_memory_send_over_gloo(what: str) -> None:
    run_distributed(without_memory, 3, what)


def test_there_is_room_for_the_numbers_of_all_ranks() -> None:
    used = shared_memory._MOST * shared_memory._LINE * 8
    assert used <= shared_memory.HEADER - shared_memory._SECRET < used + shared_memory._LINE * 8


def test_memory_of_another_group_is_not_taken() -> None:
    secret = "0123456789abcdef" * 2
    descriptor = shared_memory._create_memory(shared_memory.HEADER, secret)
    other, pipe = os.pipe()
    try:
        assert shared_memory._open(f"/proc/self/fd/{descriptor}", secret) is not None
        assert shared_memory._open(f"/proc/self/fd/{descriptor}", secret[::-1]) is None
        assert shared_memory._open(f"/proc/self/fd/{pipe}", secret) is None
        assert shared_memory._open("/proc/self/fd/12345", secret) is None
    finally:
        for opened in (descriptor, other, pipe):
            os.close(opened)


def backends(rank: int, world: int, hosts: list[str], cannot: list[int]) -> tuple[str, str]:
    import smp.hf.state as module

    module.socket.gethostname = lambda: hosts[rank]
    if rank in cannot:
        os.pidfd_open = refused(errno.ENOSYS)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        smp.init({"tensor_parallel_degree": 2})
    return dist.get_backend(smp.state.tp_process_group), said.getvalue()


@pytest.mark.parametrize(
    ("hosts", "cannot", "backend", "through"),
    [
        ("aabb", [], "smp_node", "shared memory"),
        ("abab", [], "gloo", "gloo (some are on different hosts)"),
        ("aabb", [0, 2], "smp_node", "gloo (their memory is not shared)"),
        ("aabb", [2], "smp_node", "gloo on ranks 2, 3 (their memory is not shared)"),
    ],
)
def test_tensor_parallel_ranks_of_one_machine_share_memory_and_init_says_so(
    hosts: str, cannot: list[int], backend: str, through: str
) -> None:
    (_, said), *_ = made = run_distributed(backends, 4, list(hosts), cannot)
    assert [name for name, _ in made] == [backend] * 4
    assert said.splitlines()[0].endswith(f"on cpu; tensor-parallel ranks exchange through {through}")
