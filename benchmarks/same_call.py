"""What it costs that ranks of the backend ``smp`` compare what they call before they call it (docs/collectives.md).

Microseconds of an all-reduce that the caller waits for, of the slowest rank, over turns in which all ways alternate:
the median, the least, and the median of what it is of gloo's in the same turn.

    torchrun --nproc-per-node 2 benchmarks/same_call.py [--turns 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import smp  # noqa: F401 - brings the backend
from smp.parallel.backend import NetworkProcessGroup
from smp.parallel.network.group import NetworkGroup

CALLS = 20
SIZES = {"4 B": 1, "4 KiB": 1 << 10, "60 KiB": 15 << 10, "1 MiB": 1 << 18, "16 MiB": 1 << 22}


def not_compared(*_: object) -> None:
    """In place of ``NetworkGroup.compare``."""


def not_asked(self: Any, call: Any, run: Callable[[], Any], *_: object) -> Any:
    """In place of ``NetworkProcessGroup._ask``: neither compared nor on a thread."""
    return run()


def groups() -> dict[str, tuple[Any, dict[str, Any]]]:
    """A group for each way, and what is replaced while it is measured."""
    group = dist.new_group(backend="smp")
    return {
        "gloo": (dist.new_group(backend="gloo"), {}),
        "smp, gloo's call alone": (group, {"_ask": not_asked}),
        "smp, not compared": (group, {"compare": not_compared}),
        "smp": (group, {}),
    }


def measure(call: Callable[[], object]) -> float:
    """Microseconds of one call of several, of the slowest rank."""
    call()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = torch.tensor([(time.perf_counter() - started) / CALLS * 1e6], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def cell(values: list[float], of_gloo: list[float]) -> str:
    """Of the table."""
    ratio = statistics.median(own / other for own, other in zip(values, of_gloo, strict=True))
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}), {ratio:.2f}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args().turns
    dist.init_process_group("gloo")
    own = {"compare": (NetworkGroup, NetworkGroup.compare), "_ask": (NetworkProcessGroup, NetworkProcessGroup._ask)}
    ways = groups()
    if dist.get_rank() == 0:
        print("| all-reduce of | " + " | ".join(ways) + " |\n|---|" + "---:|" * len(ways), flush=True)
    for size, numbers in SIZES.items():
        found: dict[str, list[float]] = {way: [] for way in ways}
        x = torch.ones(numbers)
        for _ in range(turns if numbers < 1 << 20 else max(turns // 4, 1)):
            for way, (group, replaced) in ways.items():
                for name, (owner, method) in own.items():
                    setattr(owner, name, replaced.get(name, method))
                found[way].append(measure(lambda group=group, x=x: dist.all_reduce(x, group=group)))  # type: ignore[misc]
        if dist.get_rank() == 0:
            cells = [cell(values, found["gloo"]) for values in found.values()]
            print(f"| {size} | " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
