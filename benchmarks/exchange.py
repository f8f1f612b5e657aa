"""Latency of each collective between processes of one machine: gloo, memory that they share, and a plain copy.

Microseconds of a call that is waited for, of the slowest rank: medians of turns in which all ways alternate. Sizes are
what a rank gives (all-reduce, all-to-all, broadcast, message), or what all ranks have together (all-gather,
reduce-scatter). A message goes from rank 0 to rank 1 and back, and counts as two.

    torchrun --nproc-per-node 2 benchmarks/exchange.py [--turns 20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.parallel import node_group
from smp.parallel.collectives import all_gather_flat
from smp.parallel.links import Links
from smp.sharding.network import _flat_reduce

SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "16 MiB": 1 << 24}
_Call = Callable[[], object]


def calls_of(size: int, group: Any, links: Links) -> dict[str, _Call]:
    """Collectives of ``size`` bytes of float32, by name."""
    whole, other = torch.ones(size // 4), torch.ones(size // 4)
    part = torch.ones(size // 4 // dist.get_world_size())
    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: all_gather_flat(whole, part, group=group),
        "reduce-scatter": lambda: _flat_reduce(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "message": lambda: there_and_back(whole, links),
    }


def there_and_back(x: torch.Tensor, links: Links) -> None:
    """From rank 0 to rank 1, and one back; others do nothing."""
    if links.rank < 2:
        work = links.send(x, 1) if links.rank == 0 else None
        links.receive(x, 1 - links.rank).wait()
        work = work or links.send(x, 0)
        work.wait()


def measure(call: _Call, calls: int) -> float:
    """Microseconds of one call of several, of the slowest rank."""
    call()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    taken = torch.tensor([(time.perf_counter() - started) / calls * 1e6], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def connected(group: Any) -> Links:
    """Links between ranks 0 and 1 of a group, as a pipeline has them."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    return Links(mesh, [(0, 1), (1, 0)], timedelta(minutes=1))


def row(kind: str, ways: dict[str, _Call], turns: int, calls: int) -> list[float]:
    """Medians of all ways."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, call in ways.items():
            messages = 2 if kind == "message" and way != "copy" else 1
            found[way].append(measure(call, calls) / messages)
    return [statistics.median(times) for times in found.values()]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = {"gloo": dist.new_group(backend="gloo"), "memory": dist.new_group(backend=node_group.NAME)}
    links = {way: connected(group) for way, group in groups.items()}
    if dist.get_rank() == 0:
        print("| | bytes | gloo | memory | gloo / memory | copy |\n|---|---:|---:|---:|---:|---:|", flush=True)
    for name, size in SIZES.items():
        calls = {way: calls_of(size, group, links[way]) for way, group in groups.items()}
        source, target = torch.ones(size // 4), torch.ones(size // 4)
        copy = {"copy": lambda target=target, source=source: target.copy_(source)}
        for kind in calls["gloo"]:
            ways = {way: of_way[kind] for way, of_way in calls.items()} | copy
            gloo, memory, plain = row(kind, ways, turns, 50 if size < 1 << 20 else 5)
            if dist.get_rank() == 0:
                ratio = f"{gloo / memory:.1f}"
                print(f"| {kind} | {name} | {gloo:,.0f} | {memory:,.0f} | {ratio} | {plain:,.1f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
