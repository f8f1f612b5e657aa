"""Ranks of the backend ``smp`` that call different collectives: all of them name the difference, and none ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp.parallel.network.group import CollectiveError
from smp.parallel.network.same_call import first_and_last
from tests.distributed import run_distributed

LARGE = 40_000
"""fp32 numbers that go by a schedule."""
F64 = torch.float64


def _scattered(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(n // 4), torch.ones(n)


def _sparse(size: int, values: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.arange(values)[None], torch.ones(values), (size,))


CASES: dict[str, Callable[[bool, Any], Any]] = {
    "size": lambda odd, g: dist.all_reduce(torch.ones(20 if odd else 10), group=g),
    "dtype": lambda odd, g: dist.all_reduce(torch.ones(10, dtype=F64 if odd else torch.float32), group=g),
    "operation": lambda odd, g: dist.all_reduce(
        torch.ones(10), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=g
    ),
    "kind": lambda odd, g: dist.barrier(g) if odd else dist.all_reduce(torch.ones(10), group=g),
    "root": lambda odd, g: dist.broadcast(torch.ones(10), 1 if odd else 0, group=g),
    "size of a list": lambda odd, g: dist.all_gather(
        [torch.empty(10 + odd) for _ in range(4)], torch.ones(10 + odd), group=g
    ),
    "size of a gather": lambda odd, g: dist.all_gather_into_tensor(
        torch.empty(4 * (10 + odd)), torch.ones(10 + odd), group=g
    ),
    "sizes of several": lambda odd, g: dist.all_reduce_coalesced(
        [torch.ones(n) for n in ((8, 4) if odd else (4, 8))], group=g
    ),
    "sizes of many": lambda odd, g: dist.all_reduce_coalesced(
        [torch.ones(n) for n in (*range(1, 60), *((8, 4) if odd else (4, 8)))], group=g
    ),
    "bits": lambda odd, g: dist.all_reduce(
        torch.ones(10, dtype=torch.int32), dist.ReduceOp.BAND if odd else dist.ReduceOp.BOR, group=g
    ),
    "sparse": lambda odd, g: dist.all_reduce(_sparse(10 + odd, 1), group=g),
    "reduce": lambda odd, g: dist.reduce(torch.ones(10 + odd), 0, group=g),
    "parts": lambda odd, g: dist.all_to_all_single(
        torch.empty(8), torch.ones(9 if odd else 8), [2] * 4, [3, 2, 2, 2] if odd else [2] * 4, group=g
    ),
    "large size": lambda odd, g: dist.all_reduce(torch.ones(LARGE + 10_000 * odd), group=g),
    "large dtype": lambda odd, g: dist.all_reduce(torch.ones(LARGE, dtype=F64 if odd else torch.float32), group=g),
    "large and small": lambda odd, g: dist.all_reduce(torch.ones(100 if odd else LARGE), group=g),
    "large kind": lambda odd, g: (
        dist.reduce_scatter_tensor(*_scattered(LARGE), group=g) if odd else dist.all_reduce(torch.ones(LARGE), group=g)
    ),
    "order": lambda odd, g: [
        dist.all_reduce(torch.ones(n), group=g) for n in ((50_000, LARGE) if odd else (LARGE, 50_000))
    ],
    "order of several at once": lambda odd, g: [
        work.wait()
        for work in [
            dist.all_reduce(torch.ones(n), group=g, async_op=True) for n in ((100, LARGE) if odd else (LARGE, 100))
        ]
    ],
}


def _each_case(rank: int, world_size: int, topology: str) -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMP_NETWORK_TOPOLOGY", topology)
        said = {}
        for name, call in CASES.items():
            group = dist.new_group(backend="smp", timeout=timedelta(seconds=200))
            with pytest.raises(CollectiveError) as first:
                call(rank == 1, group)
            with pytest.raises(CollectiveError) as later:
                dist.all_reduce(torch.ones(3), group=group)
            said[name] = [str(first.value), str(later.value)]
            dist.barrier()
        # Of a sparse tensor each rank may have another number of values.
        x = _sparse(40_000, 1 + rank)
        dist.all_reduce(x, group=dist.new_group(backend="smp"))
        assert x.coalesce().values().tolist() == [4.0, 3.0, 2.0, 1.0]
        return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    path = tmp_path_factory.mktemp("nodes") / "nodes.json"
    path.write_text(json.dumps({"nodes": [[0, 1], [2, 3]]}))
    return run_distributed(_each_case, 4, str(path))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_names_the_difference(name: str, said: list[dict[str, list[str]]]) -> None:
    firsts = {of[name][0] for of in said}
    assert len(firsts) == 1, firsts
    text = firsts.pop()
    assert text.startswith("ranks of a group call different collectives: rank 0 ") and ", rank 1 " in text
    assert all("an earlier collective of this group failed: ranks of a group call" in of[name][1] for of in said)


def test_the_words(said: list[dict[str, list[str]]]) -> None:
    for name, words in {
        "size": "rank 0 all-reduce of 40 bytes (float32, SUM), rank 1 all-reduce of 80 bytes (float32, SUM)",
        "operation": "rank 0 all-reduce of 40 bytes (float32, SUM), rank 1 all-reduce of 40 bytes (float32, MAX)",
        "kind": "rank 0 all-reduce of 40 bytes (float32, SUM), rank 1 barrier",
        "order": "rank 0 all-reduce of 160,000 bytes (float32, SUM), rank 1 all-reduce of 200,000 bytes (float32, SUM)",
        "parts": "rank 0 in an all-to-all where rank 1 sends 12 bytes and 8 are waited for, rank 1 all-to-all",
    }.items():
        assert said[3][name][0].endswith(words)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_every_rank_learns_of_every_other(size: int) -> None:
    """Whichever rank says something else, in groups of any size."""
    for odd in range(size):
        queues: dict[tuple[int, int], Queue[torch.Tensor]] = {(a, b): Queue() for a in range(size) for b in range(size)}

        class Transport:
            def __init__(self, rank: int, queues: Any = queues) -> None:
                self.rank, self.queues = rank, queues

            def send(self, tensor: torch.Tensor, to: int) -> Any:
                self.queues[self.rank, to].put(tensor.clone())

            def receive(self, into: torch.Tensor, source: int) -> Any:
                into.copy_(self.queues[source, self.rank].get(timeout=30))

        def ask(rank: int, odd: int = odd, transport: Any = Transport) -> Any:
            text = "other" if rank == odd else "same"
            return first_and_last(text, rank, size, transport(rank), lambda posted, rank: None)

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(ask, range(size)))
        others = [rank for rank in range(size) if rank != odd]
        first, last = ("other", odd), ("same", others[0]) if others else ("other", odd)
        assert found == [(first, last)] * size


@pytest.mark.parametrize("before", ["", "import torch.distributed\n"])
def test_the_names_are_known_after_import_smp_alone(before: str) -> None:
    """Whether torch is there before or comes after; ``import smp`` itself loads no torch."""
    program = before + (
        "import sys; loaded = 'torch' in sys.modules\n"
        "import smp; assert ('torch' in sys.modules) == loaded\n"
        "import torch.distributed as dist\n"
        "for name in ('smp', 'smddp'):\n"
        "    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)\n"
        "    print(dist.get_backend()); dist.destroy_process_group()\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert found.stdout.split() == ["smp", "smddp"], found.stderr
    assert "the backend smddp is smp's here" in found.stderr
