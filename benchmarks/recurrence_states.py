"""A layer with a recurrence over a sequence that is cut over processes, forward and backward, one thread each: what the
exchange of states costs, and how much of it runs while something is computed.

Hidden is the part of the transfers' own time that no process stands still for. Of each message the process counts
that waits least: the other one waits for a neighbour that computes longer, not for the link; the waits of the one that
waits most stand next to it. Rounds of all entries take turns; times are the slowest process's, medians. Bytes are those
of a run's formula, and where the link is eth0 (netlab) what went over it.

    torchrun --nproc-per-node 2 benchmarks/recurrence_states.py
    # over a slow link
    netlab run --nodes 2 --procs 1 --rate 200mbit --launcher env -- benchmarks/recurrence_states.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from smp.config import Layout
from smp.kernels import TORCH, Kernels
from smp.kernels.token_layout import TokenLayout
from smp.layers import GatedDeltaNet, Mamba2, cut_sequences
from smp.layers.recurrences.mixer import RecurrentMixer
from smp.layers.token_needs import with_needs
from smp.parallel import collectives
from smp.parallel.collectives import Group, gather_tokens, start_gather
from smp.parallel.context import ParallelContext, build_context

Step = Callable[[], object]
"""Forward and backward pass of a layer, or transfers alone."""


def mixer_of(sizes: argparse.Namespace, context: ParallelContext, kernels: Kernels) -> RecurrentMixer:
    """A part of the heads of Qwen3-Next, or of Nemotron-H 8B."""
    share, hidden = sizes.heads, 64 * sizes.heads
    if sizes.mixer == "mamba2":
        return Mamba2(hidden, share, max(1, share // 16), context, head_dim=64, state_dim=128, kernels=kernels)
    return GatedDeltaNet(hidden, share // 2, share, context, key_dim=128, value_dim=128, kernels=kernels)


def step_of(sizes: argparse.Namespace, context: ParallelContext, kernels: Kernels = TORCH) -> Step:
    """Of this process's tokens, of the whole sequence where the context has no context parallelism."""
    mixer = mixer_of(sizes, context, kernels)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02, generator=generator)  # type: ignore[operator]
    cp = 1 if context.cp is None else context.cp.size()
    length = sizes.length // cp
    cut = None if cp == 1 else cut_sequences(1, sizes.length, cp)
    layout = TokenLayout(1, length, cut=cut, position_ids=torch.arange(length))
    layout = with_needs(layout, mixer.needs, lambda: torch.full((length,), sizes.length))
    x = torch.randn(length, 64 * sizes.heads, requires_grad=True)
    grad = torch.randn_like(x)
    return lambda: torch.autograd.grad(mixer(x, layout), [x, *mixer.parameters()], grad)


@contextmanager
def timed_waits(times: list[float]) -> Iterator[None]:
    """Adds the seconds that this process stands still for each message."""
    waited = collectives.wait

    def timed(x: torch.Tensor, group: Group) -> torch.Tensor:
        started = time.perf_counter()
        x = waited(x, group)
        times.append(time.perf_counter() - started)
        return x

    collectives.wait = timed
    yield
    collectives.wait = waited


def without_transfers(step: Step) -> Step:
    """The same work on whatever is there."""

    def alone() -> None:
        started, waited = collectives.start_shift, collectives.wait
        collectives.start_shift, collectives.wait = (lambda x, *_: x.clone()), (lambda x, _: x)
        step()
        collectives.start_shift, collectives.wait = started, waited

    return alone


def transfers_alone(sent: list[tuple[int, ...]], group: Group) -> Step:
    """What a step sends, one message after the other."""

    def step() -> None:
        for shape in sent:
            for distance in range(1, group.size):
                collectives.wait(collectives.start_shift(torch.zeros(shape), group, distance), group)

    return step


def shapes_sent(step: Step, group: Group) -> list[tuple[int, ...]]:
    """Shapes of the messages that a step sends to the next process."""
    found, started = list[tuple[int, ...]](), collectives.start_shift

    def noted(x: torch.Tensor, to: Group, distance: int) -> torch.Tensor:
        found.extend([tuple(x.shape)] if distance % group.size == 1 else [])
        return started(x, to, distance)

    collectives.start_shift = noted
    step()
    collectives.start_shift = started
    return found


def uplink() -> int:
    """Bytes that this node has sent over eth0; 0 where there is none."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(lines[0][9]) if lines else 0


Taken = tuple[float, float, float, float, float]
"""Seconds of the slowest process, of the clock and of the CPU; waits for messages, of each message the shorter and in
all the longer; bytes sent."""


def taken(step: Step, *, alone: bool) -> Taken:
    """Of one step; ``alone``: only the first process works."""
    waits = list[float]()
    dist.barrier()
    before, started, processor = uplink(), time.perf_counter(), time.process_time()
    if not alone or dist.get_rank() == 0:
        with timed_waits(waits):
            step()
    times = torch.tensor([time.perf_counter() - started, time.process_time() - processor, sum(waits)])
    dist.barrier()
    sent = uplink() - before
    dist.all_reduce(times, dist.ReduceOp.MAX)
    least = torch.tensor([0.0, *waits])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(times[0]), float(times[1]), float(least.sum()), float(times[2]), float(sent)


def at_once(x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """As before the exchange was begun early: by gloo's gather, and its reduce-scatter in the backward pass."""
    rows = gather_tokens(x, group)
    return lambda: rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", choices=["gated_delta_net", "mamba2"], default="gated_delta_net")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--heads", type=int, default=8, help="of values; Qwen3-Next has 32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="entries to leave out, such as heads")
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    context = build_context(Layout(cp=world), "cpu")
    assert context.cp is not None
    group, states = Group.of(context.cp), step_of(sizes, context)
    whole = step_of(sizes, ParallelContext(context.tp))
    sent = shapes_sent(states, group)
    steps: dict[str, Step] = {
        "one process": whole,
        "states": states,
        "states, waited for at once": with_gather(states),
        "heads": step_of(sizes, context, Kernels(recurrence_exchange="heads")),
        "states without transfers": without_transfers(states),
        "transfers of states alone": transfers_alone(sent, group),
    }
    steps = {name: step for name, step in steps.items() if name not in sizes.without}
    found: dict[str, list[Taken]] = {name: [] for name in steps}
    for turn in range(sizes.rounds + 1):
        for name, step in steps.items():
            once = taken(step, alone=name == "one process")
            found[name] += [once] if turn else []
    if dist.get_rank() == 0:
        report(sizes, found, 4 * (world - 1) * sum(torch.Size(shape).numel() for shape in sent))
    dist.destroy_process_group()


def with_gather(step: Step) -> Step:
    """``step`` as it was."""
    from smp.layers.context_parallel import states

    def before() -> None:
        states.start_gather = at_once
        step()
        states.start_gather = start_gather

    return before


def report(sizes: argparse.Namespace, found: dict[str, list[Taken]], sent: int) -> None:
    """Medians; of both ways to wait for states how much of the transfers is hidden."""
    middle = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    print(
        f"{sizes.mixer}, {sizes.heads} heads of values, {sizes.length:,} tokens, fp32, forward and backward, "
        f"{dist.get_world_size()} processes of one thread, median of {sizes.rounds}\n"
    )
    print(f"{'':<28} {'ms':>8} {'CPU ms':>8} {'waits, ms':>10} {'of the later, ms':>17} {'MiB sent':>9}")
    for name, (clock, processor, least, most, size) in middle.items():
        times = f"{1e3 * clock:>8.0f} {1e3 * processor:>8.0f} {1e3 * least:>10.1f} {1e3 * most:>17.1f}"
        print(f"{name:<28} {times} {size / 2**20:>9.2f}")
    transfers = middle["transfers of states alone"][0]
    print(
        f"\nby formula {sent / 2**20:.2f} MiB of states and tokens before them; "
        f"{100 * (1 - middle['states'][2] / transfers):.0f} % of their transfers is hidden"
    )


if __name__ == "__main__":
    main()
