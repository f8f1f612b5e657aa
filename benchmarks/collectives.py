"""Hierarchical collectives beside gloo's own, over a shaped network: seconds, and bytes over each node's uplink.

Every size and way runs in turns, so that what else the machine does hits all alike; medians of the slowest process, and
bytes of node 0's interface, which do not depend on how busy the machine is. --step times steps of a small Llama with
hybrid FSDP instead, and the same without transfers: from that and from the links a step's time is predicted. Needs a
network of nodes with names of their own, such as namespaces with shaped uplinks:

    netlab run --nodes 2 --procs 2 --rate 100mbit --launcher env -- benchmarks/collectives.py --rate 100
    netlab run --nodes 2 --procs 2 --rate 100mbit --launcher env -- benchmarks/collectives.py --rate 100 --step
    netlab run --nodes 2 --procs 2 --rate 100mbit --launcher env -- benchmarks/collectives.py --rate 100 --step --hpz 2

On one node, where there is nothing to gain and nothing may be lost:

    torchrun --nproc-per-node 2 benchmarks/collectives.py --rate 0 --step auto [--replicas 2]
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
from smp.parallel import backend
from smp.parallel.agree import gather
from smp.parallel.context import build_context
from smp.parallel.network.collective_schedule import Kind
from smp.parallel.network.cost import Policy, Way, least_chunks, simulated
from smp.parallel.network.group import CollectiveWork, NetworkGroup
from smp.parallel.network.measure import measure_links
from smp.parallel.network.select_collectives import choose_collectives, topology_of, with_secondary_shards
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
            way = least_chunks(topology, size // topology.size)
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


@dataclasses.dataclass
class TrainingStep:
    """A forward and a backward pass of a Llama in bf16 with fp32 sums, sharded over ranks and replicated.

    Attributes:
        calls: kind and bytes of each collective of a step whose transfers were left out, in the forward, then in the
            backward pass.
    """

    setting: Any
    options: argparse.Namespace
    hpz: int = 1
    calls: tuple[list[tuple[Kind, int]], list[tuple[Kind, int]]] = ([], [])

    def __post_init__(self) -> None:
        config = resolve_model(
            ModelConfig(num_layers=self.options.layers, hidden_size=256, num_attention_heads=4, vocab_size=1024)
        )
        replicas, world = self.options.replicas, dist.get_world_size()
        layout = Layout(dp_replicate=replicas, dp_shard=world // replicas)
        spans = self.setting != "flat" and len(topology_of().nodes) > 1
        context = build_context(layout, "cpu", replica_backend=backend.NAME if spans else None)
        self.collectives = choose_collectives({"parameters": context.fsdp}, self.setting)
        if self.hpz > 1:
            self.collectives = with_secondary_shards(self.collectives, context.secondary_parts(self.hpz))
        context = dataclasses.replace(context, collectives=self.collectives)
        with torch.device("meta"):
            self.model = GPT(config, context, compute_dtype=torch.bfloat16)
        parallelize(self.model, context, ParallelConfig(bf16=True))
        self.model.to_empty(device="cpu")
        init_weights(self.model, 0)
        ids = torch.arange(256).view(1, 256) % 1024
        self.batch = MicroBatch(input_ids=ids, labels=ids, loss_weights=torch.full((1, 256), 1 / 256 / world))

    def forward(self) -> torch.Tensor:
        loss = self.model(self.batch).loss
        assert loss is not None
        return loss

    def __call__(self) -> None:
        self.forward().backward()
        self.model.zero_grad()

    def compute_alone(self) -> None:
        """The same without transfers: values differ, work does not. Fills ``calls``."""
        started, (forward, backward) = NetworkGroup._start, self.calls
        forward.clear()
        backward.clear()
        noted = forward

        def no_transfer(group: NetworkGroup, kind: Kind, pieces: Any, *_: Any) -> Any:
            noted.append((kind, sum(piece.nbytes for piece in pieces)))
            return _Nothing()

        NetworkGroup._start = no_transfer  # type: ignore[method-assign, assignment]
        loss = self.forward()
        noted = backward
        loss.backward()
        self.model.zero_grad()
        NetworkGroup._start = started  # type: ignore[method-assign]


class _Nothing:
    def finish(self) -> None:
        pass

    def work(self, result: Any, then: Callable[[], None] = lambda: None) -> CollectiveWork:
        done = CollectiveWork(result)
        done.end(None)
        return done


def predicted_step(step: TrainingStep, policy: Policy, computing: float) -> float:
    """Seconds. Gathers travel while blocks compute, of which the backward pass has two thirds; sums are waited for."""
    gathers, sums = [0.0, 0.0], 0.0
    for half, calls in enumerate(step.calls):
        for kind, size in calls:
            taken = policy.seconds(kind, size, policy.way(kind, size))
            gathers[half] += taken if kind == "all-gather" else 0.0
            sums += 0.0 if kind == "all-gather" else taken
    return max(gathers[0], computing / 3) + max(gathers[1], 2 * computing / 3) + sums


def compare_steps(options: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    made = {setting: TrainingStep(setting, options) for setting in ("flat", options.step)}
    steps: dict[str, Callable[[], None]] = dict(made)
    chosen = made[options.step]
    if options.hpz > 1:
        steps[f"{options.step}, hpZ {options.hpz}"] = TrainingStep(options.step, options, options.hpz)
    if chosen.collectives.groups:
        steps["computing alone"] = chosen.compute_alone
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    for turn in range(options.rounds + 1):
        for name, step in steps.items():
            found[name] += [measured(step)] if turn else []
            if not turn:
                step()
    lines = [
        f"a step of a Llama of {options.layers} layers of 256, {dist.get_world_size()} ranks, {options.replicas} "
        f"replicas, uplinks of {options.rate:g} Mbit/s, median of {options.rounds}",
        *chosen.collectives.lines,
    ]
    for name, values in found.items():
        taken = sorted(seconds for seconds, _ in values)
        sent = statistics.median(count for _, count in values) / MIB
        lines.append(
            f"{name:<20} {statistics.median(taken):>7.3f} s (least {taken[0]:.3f}) {sent:>8.2f} MiB per uplink"
        )
    if chosen.collectives.groups:
        policy = next(iter(chosen.collectives.groups.values())).policy
        if policy.links is None:
            policy = dataclasses.replace(policy, links=measure_links(policy.topology))
        computing = statistics.median(seconds for seconds, _ in found["computing alone"])
        lines.append(f"{'predicted':<20} {predicted_step(chosen, policy, computing):>7.3f} s")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, required=True, help="Mbit/s of an uplink, for the limit")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 1, 4, 16, 64], help="MiB of the whole buffer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--step", nargs="?", const="hierarchical", choices=["hierarchical", "auto"], help="whole training steps by this"
    )
    parser.add_argument("--replicas", type=int, default=1, help="of the model, with --step")
    parser.add_argument("--hpz", type=int, default=1, help="with --step, also with secondary shards over so many ranks")
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
