"""Attention over a sequence that is cut over processes beside one process, forward and backward, one thread each.

Ideal is one process's time over their number, of the clock and of the CPU, which a busy machine changes less. Of the
ring also what its transfers cost: how long it stands still for each message, the same blocks without transfers, and the
same transfers without blocks. Hidden is the part of the latter that it does not stand still for. Of each message the
process counts that waits least: the other one waits for a neighbour that computes longer, not for the link; the longest
wait stands beside it. Rounds of all entries take turns;
a time is the slowest process's, the table has medians of the clock and least times of the CPU.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py
    netlab run --nodes 2 --procs 1 --rate 400mbit --launcher env -- benchmarks/context_parallel.py    # over a slow link
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.token_layout import TokenLayout
from smp.layers import context_parallel_attention, cut_sequences
from smp.layers.context_parallel import ring
from smp.layers.context_parallel.make_core import CommType
from smp.parallel.collectives import Group, start_shift, wait

METHODS: tuple[CommType, ...] = ("p2p", "all_gather", "a2a")
Step = Callable[[], object]


def attention_step(core: AttentionCore, layout: TokenLayout, sizes: argparse.Namespace) -> Step:
    """Forward and backward of one layer."""
    dtype = torch.bfloat16 if sizes.bf16 else torch.float32
    counts = (sizes.heads, sizes.groups, sizes.groups)
    given = [torch.randn(layout.num_queries, n, sizes.head_dim).to(dtype).requires_grad_() for n in counts]
    grad, spec = torch.randn_like(given[0]), AttentionSpec()
    layout = core.prepare(layout, [spec], dtype, torch.device("cpu"))

    def step() -> None:
        torch.autograd.grad(core(*given, layout, spec)[0], given, grad)

    return step


def without_transfers(step: Step) -> Step:
    """The same blocks, of a rank's own keys again and again: values differ, work does not."""

    def alone() -> None:
        started, waited = ring.start_shift, ring.wait
        ring.start_shift, ring.wait = (lambda x, *_: x.clone()), (lambda x, _: x)
        step()
        ring.start_shift, ring.wait = started, waited

    return alone


@contextmanager
def timed_waits() -> Iterator[list[float]]:
    """Seconds that the ring stands still for each of its messages."""
    waited, times = ring.wait, list[float]()

    def timed(x: torch.Tensor, group: Group) -> torch.Tensor:
        started = time.perf_counter()
        x = waited(x, group)
        times.append(time.perf_counter() - started)
        return x

    ring.wait = timed
    yield times
    ring.wait = waited


def transfers_alone(sizes: argparse.Namespace, group: Group) -> Step:
    """What a ring sends in the forward and in the backward pass, one message after the other."""
    dtype = torch.bfloat16 if sizes.bf16 else torch.float32
    keys = torch.zeros(2, sizes.length // group.size, sizes.groups, sizes.head_dim, dtype=dtype)

    def step() -> None:
        for _ in range(group.size - 1):
            for sent in (keys, keys, keys.float()):
                wait(start_shift(sent, group, 1), group)

    return step


Taken = tuple[float, float, float, float]
"""Seconds of the slowest process, of the clock and of the CPU, and waits for messages: by the process that waits least
for each, and by the one that waits most in all."""


def seconds(step: Step, alone: bool = False) -> Taken:
    """What a step takes; ``alone``: only the first process works."""
    dist.barrier()
    with timed_waits() as waits:
        clock, processor = time.perf_counter(), time.process_time()
        if not alone or dist.get_rank() == 0:
            step()
        taken = torch.tensor([time.perf_counter() - clock, time.process_time() - processor, sum(waits)])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    least = torch.tensor([0.0, *waits])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(taken[0]), float(taken[1]), float(least.sum()), float(taken[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4, help="key/value heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps = entries(sizes, mesh)
    times: dict[str, list[Taken]] = {name: [] for name in steps}
    for turn in range(sizes.rounds + 1):
        for name, step in steps.items():
            taken = seconds(step, alone=name == "one process")
            times[name] += [taken] if turn else []
    if dist.get_rank() == 0:
        clock = {name: statistics.median(taken[0] for taken in values) for name, values in times.items()}
        processor = {name: min(taken[1] for taken in values) for name, values in times.items()}
        waits = (
            statistics.median(taken[2] for taken in times["p2p"]),
            statistics.median(taken[3] for taken in times["p2p"]),
        )
        print(table(sizes, clock, processor, waits))
    dist.destroy_process_group()


def entries(sizes: argparse.Namespace, mesh: dist.DeviceMesh) -> dict[str, Step]:
    """By name."""
    core, group = FusedAttention("flash", grouped=sizes.groups < sizes.heads and not sizes.bf16), Group.of(mesh)
    cut = cut_sequences(1, sizes.length, group.size)
    part = functools.partial(TokenLayout, 1, sizes.length // group.size, cut=cut)
    steps = {"one process": attention_step(core, TokenLayout(1, sizes.length), sizes)}
    for method in METHODS:
        steps[method] = attention_step(context_parallel_attention(core, mesh, method), part(), sizes)
    steps["p2p without transfers"] = without_transfers(steps["p2p"])
    steps["transfers of p2p alone"] = transfers_alone(sizes, group)
    return steps


def table(
    sizes: argparse.Namespace, times: dict[str, float], processor: dict[str, float], waits: Sequence[float]
) -> str:
    """What was measured: medians of the clock, least times of the CPU."""
    ranks, dtype = dist.get_world_size(), "bf16" if sizes.bf16 else "fp32"
    ideals = times["one process"] / ranks, processor["one process"] / ranks
    lines = [
        f"attention of {sizes.length:,} tokens, {sizes.heads} heads of {sizes.head_dim}, {sizes.groups} key/value "
        f"heads, {dtype}, forward and backward, {ranks} processes of one thread, median of {sizes.rounds}",
        "",
        f"{'':<24} {'ms':>9} {'ideal / it':>11} {'CPU ms':>9} {'ideal / it':>11}",
    ]
    for name in times:
        pairs = zip((times[name], processor[name]), ideals, strict=True)
        lines.append(f"{name:<24}" + "".join(f" {1e3 * taken:>9.1f} {ideal / taken:>11.3f}" for taken, ideal in pairs))
    transfers, alone = times["transfers of p2p alone"], times["p2p without transfers"]
    messages, steps = 3 * (ranks - 1), 3 * ranks  # the backward pass takes two thirds of the time of blocks
    return "\n".join(
        [
            *lines,
            "",
            f"the ring waits {1e3 * waits[0]:.0f} ms for messages, {1e3 * waits[1]:.0f} ms with those for a late "
            f"neighbour: {100 * (1 - waits[0] / transfers):.0f} % of its transfers is hidden; a message takes "
            f"{1e3 * transfers / messages:.0f} ms alone, blocks of a step of the forward pass about "
            f"{1e3 * alone / steps:.0f} ms",
        ]
    )


if __name__ == "__main__":
    main()
