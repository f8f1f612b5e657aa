"""The backend ``smp`` beside gloo: tensors that share memory or lie in it otherwise, sizes of 0 and 1, works that are
waited for in any order, and groups of unequal nodes or without one of the nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.parallel.test_backend import numbers, same

N = 20_001
LINKS = {"between": {"gbit_per_s": 0.1, "latency_us": 500}, "inside": {"gbit_per_s": 8, "latency_us": 20}}
"""With known links the cost model decides at every size, so that also single numbers are hierarchical."""


def sizes(rank: int, world: int, group: Any) -> list[torch.Tensor]:
    """0 to 5 elements, of which some ranks own none."""
    out = []
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for count in (0, 1, 3, 5):
            dist.all_reduce(x := numbers(rank, count, dtype), group=group)
            dist.all_gather_into_tensor(whole := torch.empty(count * world, dtype=dtype), x + rank, group=group)
            dist.reduce_scatter_tensor(part := torch.empty(count, dtype=dtype), whole * rank, group=group)
            out += [x, whole, part]
    dist.all_reduce(scalar := torch.tensor(float(rank)), group=group)
    return [*out, scalar]


def works_in_any_order(rank: int, world: int, group: Any) -> list[Any]:
    """Many at the same time, of both backends; the last one is waited for first."""
    out, works = [], []
    for number in range(60):
        x = numbers(rank + number)
        kind = number % 4
        if kind == 0:
            works.append(dist.all_reduce(x, group=group, async_op=True))
        elif kind == 1:
            works.append(dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True))
        elif kind == 2:
            given, x = x, torch.empty(world * x.numel())
            works.append(dist.all_gather_into_tensor(x, given, group=group, async_op=True))
        else:
            given, x = x.repeat(world), torch.empty(x.numel())
            works.append(dist.reduce_scatter_tensor(x, given, group=group, async_op=True))
        out.append(x)
    for work in reversed(works):
        assert work is not None
        work.wait()
    return [*out, [works[number].get_future().value()[0].clone() for number in (0, 1)]]  # type: ignore[union-attr]


def shared_memory(rank: int, world: int, group: Any) -> list[torch.Tensor]:
    """What is read is a part of what is written, or the other way round."""
    me, out = dist.get_rank(group), []
    for start in (0, me * N, me * N + 3 if me < world - 1 else me * N - 3):
        whole = torch.zeros(world * N)
        given = whole[start : start + N]
        given.copy_(numbers(rank, N))
        dist.all_gather_into_tensor(whole, given, group=group)
        out.append(whole)
    for start in (0, me * N, 5):
        whole = numbers(rank, world * N)
        part = whole[start : start + N]
        dist.reduce_scatter_tensor(part, whole, group=group)
        out.append(part.clone())
    return out


def other_memory(rank: int, world: int, group: Any) -> list[torch.Tensor]:
    """Strides without gaps, which ranks may have otherwise, and views whose memory has other numbers."""
    last = numbers(rank, 2 * 3 * 80 * 90).view(2, 3, 80, 90).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(last, group=group)
    flat = numbers(rank, 20_000)
    unlike = flat.view(100, 200).t() if rank == 0 else flat
    dist.all_reduce(unlike, group=group)
    dist.all_gather_into_tensor(whole := torch.empty(world * N), torch._neg_view(numbers(rank, N)), group=group)
    dist.reduce_scatter_tensor(part := torch.empty(N), torch._neg_view(numbers(rank, world * N)), group=group)
    return [last, flat, whole, part]


def several_in_one_call(rank: int, world: int, group: Any) -> list[torch.Tensor]:
    """By torch's coalescing and by functional collectives. They are not waited for where they begin: rank 1 of the
    group needs something from rank 0 before it takes part."""
    import torch.distributed._functional_collectives as functional

    me, out = dist.get_rank(group), []
    message, peers = torch.tensor([7.0]), [dist.get_global_rank(group, r) for r in (0, 1)]
    if me == 1:
        dist.recv(message, peers[0], group=group)
    xs = [numbers(rank, N), numbers(rank + 1, 5)]
    with dist._coalescing_manager(group, async_ops=True) as sums:
        for x in xs:
            dist.all_reduce(x, group=group)
    wholes = [torch.empty(world * N), torch.empty(world * 5)]
    with dist._coalescing_manager(group, async_ops=True) as gathers:
        for whole, count in zip(wholes, (N, 5), strict=True):
            dist.all_gather_into_tensor(whole, numbers(rank, count), group=group)
    parts = [torch.empty(N), torch.empty(5)]
    with dist._coalescing_manager(group, async_ops=True) as reductions:
        for part, count in zip(parts, (N, 5), strict=True):
            dist.reduce_scatter_tensor(part, numbers(rank, world * count), group=group)
    if me == 0:
        dist.send(message, peers[1], group=group)
    for works in (sums, gathers, reductions):
        works.wait()
    x = numbers(rank, 4 * world * 3000).view(4 * world, 3000)
    both = [x, x[:, :3].contiguous()]
    for made in (
        functional.all_reduce_coalesced(both, "sum", group),
        functional.all_gather_into_tensor_coalesced(both, group),
        functional.reduce_scatter_tensor_coalesced(both, "sum", [0, 0], group),
    ):
        out += [t + 0 for t in made]
    return [*xs, *wholes, *parts, *out]


def messages(rank: int, world: int, group: Any) -> list[Any]:
    """From any source, under a large tag; all have come to a barrier that is monitored."""
    me, (first, second) = dist.get_rank(group), (dist.get_global_rank(group, r) for r in (0, 1))
    x = numbers(rank, N)
    source = None
    if me == 0:
        dist.send(x, second, group=group, tag=70_000)
    elif me == 1:
        source = dist.recv(x, None, group=group, tag=70_000)
    group.monitored_barrier(timedelta(seconds=60))
    return [x, source, first]


CASES: dict[str, Callable[[int, int, Any], list[Any]]] = {
    case.__name__: case
    for case in (sizes, works_in_any_order, shared_memory, other_memory, several_in_one_call, messages)
}
GROUPS = {"3 + 1": None, "2 + 1": [0, 2, 3], "one node of two": [0, 1, 2]}
"""Of four ranks, of which the first three are on a node."""


def compare(rank: int, world: int, topology: str) -> dict[str, Any]:
    """By group: the cases that differ from gloo, and what was counted."""
    import smp.parallel.backend  # noqa: F401

    os.environ["SMP_NETWORK_TOPOLOGY"] = topology
    found: dict[str, Any] = {}
    for name, ranks in GROUPS.items():
        gloo, group = dist.new_group(ranks), dist.new_group(ranks, backend="smp")
        if ranks is None or rank in ranks:
            size = gloo.size()
            wrong = [n for n, case in CASES.items() if not same(case(rank, size, gloo), case(rank, size, group))]
            found[name] = wrong, dict(group.counts)  # type: ignore[attr-defined]
    found["late"] = timeout_of_one_call(rank)
    return found


def timeout_of_one_call(rank: int) -> str:
    """Rank 3 does not come; the group's own timeout is that of the tests."""
    group: Any = dist.new_group(backend="smp")
    said = ""
    if rank < 3:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        with pytest.raises(RuntimeError) as caught:
            group.allreduce([numbers(rank, N)], options).wait()
        said = str(caught.value)
    dist.barrier()
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("backend") / "nodes.json"
    path.write_text(json.dumps({"nodes": [[0, 1, 2], [3]], **LINKS}))
    return run_distributed(compare, 4, str(Path(path)), timeout=100.0)


@pytest.mark.parametrize("name", GROUPS)
def test_everything_is_as_on_gloo(name: str, found: list[dict[str, Any]]) -> None:
    ranks = GROUPS[name] or range(4)
    assert [found[rank][name][0] for rank in ranks] == [[]] * len(ranks)
    counts = found[0][name][1]
    large = sum(number for kind, number in counts.items() if kind.startswith("hierarchical"))
    assert (large > 60) == (name != "one node of two") and counts["gloo all-reduce"] > 0


def test_a_work_is_done_once_its_future_is() -> None:
    """Who has waited for it reads the future; torch ends with an assertion of its own if there is nothing."""
    from smp.parallel.network.group import CollectiveWork

    for error in (None, ValueError("lost")):
        work, seen = CollectiveWork(["result"]), []
        work.get_future().add_done_callback(lambda future, work=work, seen=seen: seen.append(work.is_completed()))
        work.end(error)
        assert seen == [False] and work.is_completed() and work.get_future().done()


def test_a_call_may_have_a_timeout_of_its_own(found: list[dict[str, Any]]) -> None:
    for of in found[:3]:
        assert "all-reduce of 80,004 bytes over 2 nodes of 1 to 3 ranks failed after" in of["late"]
    assert found[3]["late"] == ""
