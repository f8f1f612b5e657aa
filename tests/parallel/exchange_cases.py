"""Random collectives through memory and by gloo, and ranks that are killed at any moment; the tests take few of each.

python -m tests.parallel.exchange_cases --collectives 1000000 --kills 300
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp.parallel import node_group, shared_memory
from smp.parallel.mailboxes import ROOM, ROOMS, Mailboxes, _rooms_at
from smp.parallel.network.group import CollectiveError
from smp.parallel.shared_memory import join, share
from tests.distributed import run_distributed

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
REDUCED = ("SUM", "MAX", "MIN")
AT_ONCE = 50
"""Collectives through memory for each one of gloo, of what all of them send."""
ENDED = 7
"""Exit code of a rank that noticed that another one is lost."""
HANGS = 200.0
"""Seconds after which a rank that is alive hangs. It waits for a lost one no longer than this, either."""


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype, whole: bool, seed: int) -> torch.Tensor:
    """Numbers of this rank; ``whole``: such that sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if whole or not dtype.is_floating_point:
        return torch.randint(0, 8, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare_batch(rank: int, world: int, group: Any, seed: int) -> int:
    """Some collectives of random sizes, and one of gloo of all they send; how many."""
    choice = random.Random(seed)
    kind = choice.choice(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "shift"))
    dtype, op = choice.choice(DTYPES), getattr(dist.ReduceOp, choice.choice(REDUCED))
    sizes = [int(10 ** choice.uniform(0, 3.3)) - 1 for _ in range(AT_ONCE)]
    root = choice.randrange(world)
    wide = kind in ("reduce-scatter", "all-to-all")
    given = drawn(rank, (world if wide else 1, sum(sizes)), dtype, world > 2, seed)
    parts = [part.contiguous() for part in given.split(sizes, 1)]
    rows = world if kind in ("all-gather", "all-to-all") else 1
    found, expected = [given.new_empty(rows, size) for size in sizes], given.new_empty(rows, sum(sizes))

    def run(into: torch.Tensor, x: torch.Tensor, through: Any) -> None:
        if kind == "all-reduce":
            dist.all_reduce(into.copy_(x), op, group=through)
        elif kind == "broadcast":
            dist.broadcast(into.copy_(x), root, group=through)
        elif kind == "all-gather":
            through.all_gather_single(into.view(-1), x.view(-1)).wait()
        elif kind == "reduce-scatter":
            opts = dist.ReduceScatterOptions()
            opts.reduceOp = op
            through.reduce_scatter_single(into.view(-1), x.view(-1), opts).wait()
        elif kind == "all-to-all":
            dist.all_to_all_single(into, x, group=through)
        elif through is group:
            assert group.shift(into.view(-1), x.view(-1), (rank - 1) % world) is not None
        else:
            both = dist.isend(x, (rank + 1) % world), dist.irecv(into, (rank - 1) % world)
            for work in both:
                assert work is not None and work.wait()

    run(expected, given, dist.group.WORLD)
    for into, x, wanted in zip(found, parts, expected.split(sizes, 1), strict=True):
        run(into, x, group)
        assert same_bits(into, wanted), (kind, dtype, op, into.shape, seed)
    return len(sizes)


def compare(rank: int, world: int, count: int, seed: int) -> int:
    """At least ``count`` random collectives, many in several chunks, in two groups of the same ranks by turns."""
    shared_memory.SLOT_BYTES, shared_memory._SHARED_WORK = 1 << 12, 1 << 9
    groups = [dist.new_group(backend=node_group.NAME) for _ in range(2)]
    done = 0
    while done < count:
        done += compare_batch(rank, world, groups[seed % 2], seed)
        seed += 1
    return done


def exchange_for_ever(rank: int, world: int, path: str, seed: int) -> None:
    """Collectives and messages around a ring, until one fails."""
    store = dist.FileStore(path, world)
    store.set_timeout(timedelta(seconds=HANGS))
    memory = join(rank, world, dist.PrefixStore("collectives", store))
    channels = [(r, (r + 1) % world) for r in range(world)]
    found = share(rank, world, dist.PrefixStore("messages", store), _rooms_at(world) + world * ROOMS * ROOM)
    assert memory is not None and found is not None
    boxes = Mailboxes(rank, world, channels, *found, memory.gone, timedelta(seconds=HANGS))
    choice, limit = random.Random(seed), lambda: HANGS
    calls: tuple[Callable[[torch.Tensor], None], ...] = (
        lambda x: memory.all_reduce(x, limit),
        lambda x: memory.all_gather(x.new_empty(world * x.numel()), x, limit),
        lambda x: memory.broadcast(x, world - 1, limit),
        lambda x: memory.barrier(limit),
        lambda x: pass_on(boxes, x, (rank + 1) % world, (rank - 1) % world),
    )
    store.add("ready", 1)
    while True:
        choice.choice(calls)(torch.ones(choice.choice((10, 1000, 300_000))))


def pass_on(boxes: Mailboxes, x: torch.Tensor, to: int, source: int) -> None:
    """A message to the next rank of a ring, and one of the rank before."""
    boxes.send(x, to)
    boxes.receive(x, source, lambda tag: dist.Work()).wait()


def end_in_error(rank: int, world: int, path: str, seed: int) -> None:
    """In a process of its own, which ends with ENDED where the loss of another one was noticed."""
    try:
        torch.set_num_threads(1)
        exchange_for_ever(rank, world, path, seed)
    except CollectiveError:
        os._exit(ENDED)
    except BaseException as error:
        print(f"rank {rank}: {error!r}", file=sys.stderr)
    finally:
        os._exit(1)


def kill(rank: int, world: int, count: int, seed: int) -> int:
    """Kill one of three ranks that exchange, so many times, at any moment; the others end by themselves."""
    ranks = 3
    for turn in range(seed, seed + count):
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for one in range(ranks):
                if (child := os.fork()) == 0:
                    end_in_error(one, ranks, f"{folder}/store", turn)
                children.append(child)
            store = dist.FileStore(f"{folder}/store", ranks)
            while store.add("ready", 0) < ranks:
                time.sleep(1e-3)
            time.sleep(random.Random(turn).uniform(0, 0.02))
            os.kill(children[turn % ranks], signal.SIGKILL)
            ended = [_status(child) for child in children]
            expected = [ENDED] * ranks
            expected[turn % ranks] = -signal.SIGKILL
            if ended != expected:
                raise AssertionError(f"turn {turn}: ranks ended with {ended}, not {expected}")
    # By its name: other programs have files there, which come and go.
    assert not [name for name in os.listdir("/dev/shm") if "smp_node" in name]
    assert "smp_node" not in Path("/proc/self/maps").read_text()
    return count


def _status(child: int) -> int:
    """How a process ended; -SIGALRM: it hangs."""
    deadline = time.monotonic() + HANGS / 2
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(1e-3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def main() -> None:
    """Many of each, and how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for what, run, ranks, count in (
        ("collectives with gloo's bits", compare, args.ranks, args.collectives),
        ("kills of a rank: the others ended, nothing is left", kill, 1, args.kills),
    ):
        if count:
            started = time.monotonic()
            done = run_distributed(run, ranks, count, args.seed, timeout=36_000)[0]
            print(f"{done:,} {what}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
