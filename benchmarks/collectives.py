"""Hierarchical collectives beside gloo's own, over a shaped network: seconds, and bytes over each node's uplink.

Every size and way runs in turns, so that what else the machine does hits all alike; medians of the slowest process, and
bytes of node 0's interface, which do not depend on how busy the machine is. --step times steps of a small Llama with
hybrid FSDP instead. Needs a network of nodes with names of their own, such as namespaces with shaped uplinks:

    netlab run --nodes 2 --procs 2 --rate 100mbit --launcher env -- benchmarks/collectives.py --rate 100
    netlab run --nodes 2 --procs 2 --rate 100mbit --launcher env -- benchmarks/collectives.py --rate 100 --step
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp.config import Layout, ModelConfig, ParallelConfig
from smp.config.resolve import resolve_model
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.agree import gather
from smp.parallel.context import build_context
from smp.parallel.network.choose import choose_collectives
from smp.parallel.network.cost import Way, least_chunks, simulated
from smp.parallel.network.group import NetworkGroup
from smp.parallel.network.schedule import Kind
from smp.parallel.network.topology import Topology
from smp.sharding.parallelize import parallelize

KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce")
MIB = 1 << 20


def uplink_bytes() -> int:
    """Sent so far by this node's uplink (interface eth0); 0 where there is none."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    sent = [int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:")]
    return sum(sent)


def measured(step: Callable[[], object]) -> tuple[float, int]:
    """(seconds of the slowest process, bytes that this node's uplink sent)."""
    before = uplink_bytes()
    dist.barrier()  # after it others may send already
    started = time.perf_counter()
    step()
    taken = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    dist.barrier()
    return float(taken), uplink_bytes() - before


def collective(kind: Kind, size: int, network: NetworkGroup, way: Way | None) -> Callable[[], object]:
    """A call of one collective whose whole buffer has ``size`` bytes; without a ``way`` gloo's."""
    ranks = dist.get_world_size()
    whole = torch.ones(size // 4 // ranks * ranks)
    part = torch.ones(whole.numel() // ranks)
    if way is None:
        gathers: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatters: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        calls: dict[Kind, Callable[[], object]] = {
            "all-gather": lambda: gathers(whole, part),
            "reduce-scatter": lambda: scatters(part, whole),
            "all-reduce": lambda: dist.all_reduce(whole),
        }
    else:
        calls = {
            "all-gather": lambda: network.all_gather(whole, part, way).finish(),
            "reduce-scatter": lambda: network.reduce_scatter(part, whole, way).finish(),
            "all-reduce": lambda: network.all_reduce(whole, way).finish(),
        }
    return calls[kind]


def compare_collectives(options: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    topology = Topology.of(gather(socket.gethostname()))
    plan = choose_collectives({"all": dist.init_device_mesh("cpu", (dist.get_world_size(),))}, "auto")
    network = next(iter(plan.groups.values()))
    lines = [
        f"{topology}, uplinks of {options.rate:g} Mbit/s, median of {options.rounds} (least); x: times the limit",
        plan.lines[0],
        "",
        f"{'':<15} {'MiB':>6} {'limit ms':>9} {'gloo ms':>17} {'x':>5} {'hierarchical ms':>17} {'x':>5} "
        f"{'predicted':>9} {'limit MiB':>9} {'gloo MiB':>9} {'hier. MiB':>9}",
    ]
    nodes = len(topology.nodes)
    for kind in KINDS:
        for mib in options.sizes:
            size = int(mib * MIB)
            way = least_chunks(size // topology.size)
            steps = {"gloo": collective(kind, size, network, None), "hier": collective(kind, size, network, way)}
            found: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
            for turn in range(options.rounds + 1):
                for name, step in steps.items():
                    found[name] += [measured(step)] if turn else []
                    if not turn:
                        step()
            least = (2 if kind == "all-reduce" else 1) * (nodes - 1) / nodes * size
            limit = least * 8 / options.rate / 1e6
            cells = f"{kind:<15} {mib:>6g} {1e3 * limit:>9.1f}"
            for values in found.values():
                taken = sorted(seconds for seconds, _ in values)
                middle = statistics.median(taken)
                cells += f" {1e3 * middle:>8.1f} ({1e3 * taken[0]:>6.1f}) {middle / limit:>5.2f}"
            links = network.policy.links
            assert links is not None, "auto measures them"
            cells += f" {1e3 * simulated(kind, topology, links, size, way):>9.1f} {least / MIB:>9.2f}"
            for values in found.values():
                cells += f" {statistics.median(count for _, count in values) / MIB:>9.2f}"
            lines.append(cells)
    return lines


def training_step(setting: Any, options: argparse.Namespace) -> tuple[Callable[[], object], tuple[str, ...]]:
    """A forward and a backward pass of a Llama that is sharded over all ranks, in bf16 with fp32 sums."""
    config = resolve_model(
        ModelConfig(num_layers=options.layers, hidden_size=256, num_attention_heads=4, vocab_size=1024)
    )
    world = dist.get_world_size()
    context = build_context(Layout(dp_shard=world), "cpu")
    collectives = choose_collectives({"parameters": context.fsdp}, setting)
    context = dataclasses.replace(context, collectives=collectives)
    with torch.device("meta"):
        model = GPT(config, context, compute_dtype=torch.bfloat16)
    parallelize(model, context, ParallelConfig(bf16=True))
    model.to_empty(device="cpu")
    init_weights(model, 0)
    ids = torch.arange(256).view(1, 256) % 1024
    batch = MicroBatch(input_ids=ids, labels=ids, loss_weights=torch.full((1, 256), 1 / 256 / world))

    def step() -> None:
        out = model(batch)
        assert out.loss is not None
        out.loss.backward()
        model.zero_grad()

    return step, collectives.lines


def compare_steps(options: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    made = {setting: training_step(setting, options) for setting in ("flat", "hierarchical")}
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in made}
    for turn in range(options.rounds + 1):
        for name, (step, _) in made.items():
            found[name] += [measured(step)] if turn else []
            if not turn:
                step()
    lines = [
        f"a step of a Llama of {options.layers} layers of 256, {dist.get_world_size()} ranks, {options.rate:g} Mbit/s"
    ]
    for name, values in found.items():
        taken = sorted(seconds for seconds, _ in values)
        sent = statistics.median(count for _, count in values) / MIB
        lines.append(
            f"{name:<14} {statistics.median(taken):>7.3f} s (least {taken[0]:.3f}) {sent:>8.2f} MiB per uplink"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, required=True, help="Mbit/s of an uplink, for the limit")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 1, 4, 16, 64], help="MiB of the whole buffer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", action="store_true", help="whole training steps")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = compare_steps(options) if options.step else compare_collectives(options)
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
