"""Predict the time and the traffic of a training step's data-parallel collectives on 2 to 4,096 nodes.

    python tools/plan_collectives.py --model llama3-8b --ranks-per-node 8 --between-gbit 400 --inside-gbit 1600
    python tools/plan_collectives.py --model llama3-70b --between-gbit 3200 --inside-gbit 2800 --nodes 2 16 512

For each number of nodes: bytes that cross a node's uplink and seconds of all gathers of weights (bf16, for the forward
and for the backward pass) and reductions of gradients (fp32) of one micro-batch. Full sharding by flat rings, by
hierarchical collectives (for each size the way that --data-parallel-collectives auto takes by its formula, but never a
flat one), these with secondary shards (hpZ: --zero-hpz-partition-size of all ranks of a node), and hybrid sharding
within nodes with a sum over replicas. A unit is a layer, or embedding and output layer; of the largest one the table
says how its gather runs: round all nodes (ring) or straight to each (mesh), in how many chunks. Nothing is overlapped
with computation here. It is the formula of docs/collectives.md; nothing is run.

Next to what was measured, by the tables that benchmarks/collectives.py printed into a file (from 1 MiB on; each run's
rate as the uplink's, and the same other numbers for all):

    python tools/plan_collectives.py --measured benchmarks/results/collectives_netlab.txt --inside-gbit 1.6 \\
        --between-latency-us 400 --inside-latency-us 400 --call-us 20 --add-gb 3
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.resolve import resolve_model
from smp.models.arithmetic import count_parameters
from smp.models.inventory import block_parameters
from smp.models.presets import PRESETS
from smp.parallel.network.collective_schedule import Kind
from smp.parallel.network.cost import FLAT, Way, flat_ring, least_chunks, two_levels, ways, weight
from smp.parallel.network.topology import Link, Links, Topology

NODES = tuple(2**i for i in range(1, 13))
MOST_RANKS = 1 << 20
"""Most ranks of a prediction that takes seconds."""
RATES = (1e-6, 1e9)
"""Gbit/s, and GB/s of sums, between which times have digits to show."""
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Predicted:
    """What is predicted of all collectives of one micro-batch.

    Attributes:
        seconds: one after the other.
        uplink: bytes that a node sends.
    """

    seconds: float
    uplink: float


def calls(units: Sequence[int]) -> list[tuple[Kind, int]]:
    """The collectives of a fully sharded step: kind and bytes of the whole buffer."""
    gathers: list[tuple[Kind, int]] = [("all-gather", BF16 * unit) for unit in units] * 2
    return [*gathers, *(("reduce-scatter", FP32 * unit) for unit in units)]


def flat(units: Sequence[int], network: Topology, links: Links, gloo: bool) -> Predicted:
    """Rings over all ranks, in the order of nodes."""
    ranks = network.size
    seconds = _total(calls(units), lambda kind, size: flat_ring(kind, network, links, size, gloo=gloo))
    if len(network.nodes) == 1:
        return Predicted(seconds, 0.0)
    rounds = {"all-gather": 1, "reduce-scatter": 1 + gloo}
    return Predicted(seconds, sum(rounds[kind] * size * (ranks - 1) / ranks for kind, size in calls(units)))


def hierarchical(
    units: Sequence[int], network: Topology, links: Links, *, secondary: bool = False, gloo: bool = False
) -> tuple[Predicted, Way]:
    """Each size by its best way; also which that is for the largest gather. With ``secondary`` shards the gathers of
    the backward pass are flat ones within nodes. On one node, or nodes of one rank, all is flat, as runs are there."""
    if not network.several_levels:
        return flat(units, network, links, gloo), FLAT
    nodes, within = len(network.nodes), Topology.even(1, len(network.nodes[0]))
    again: list[tuple[Kind, int]] = [("all-gather", BF16 * unit) for unit in units] if secondary else []
    between = calls(units)[len(again) :]

    def best(kind: Kind, size: int) -> tuple[float, Way]:
        tried = [(two_levels(kind, network, links, size, way), way) for way in ways(network, size // network.size)]
        return min(tried, key=lambda pair: pair[0] * weight(pair[1], network))

    seconds = _total(between, lambda kind, size: best(kind, size)[0])
    seconds += _total(again, lambda kind, size: flat_ring(kind, within, links, size, gloo=gloo))
    sent = sum(size * (nodes - 1) / nodes for _, size in between)
    return Predicted(seconds, sent), best("all-gather", BF16 * max(units))[1]


def _total(of: Sequence[tuple[Kind, int]], seconds: Callable[[Kind, int], float]) -> float:
    """Seconds of collectives, most of which are alike."""
    return sum(times * seconds(*call) for call, times in Counter(of).items())


def hybrid(units: Sequence[int], network: Topology, links: Links, gloo: bool) -> Predicted:
    """Sharded within a node; then each rank's shard is summed over nodes, all of a node's ranks at the same time."""
    nodes, local = len(network.nodes), len(network.nodes[0])
    node = Topology.even(1, local)
    inside = _total(calls(units), lambda kind, size: flat_ring(kind, node, links, size, gloo=gloo))
    shared = replace(links, between=Link(links.between.latency, links.between.rate / local))
    replicas = Topology.even(nodes, 1)
    sums = _total(
        [("all-reduce", FP32 * unit // local) for unit in units],
        lambda kind, size: flat_ring(kind, replicas, shared, size),
    )
    return Predicted(inside + sums, 2 * (nodes - 1) / nodes * FP32 * sum(units))


def units_of(model: str) -> list[int]:
    """Parameters of what is gathered together."""
    if model not in PRESETS:
        raise ConfigError(f"--model {model}: give one of {', '.join(PRESETS)}")
    config = resolve_model(ModelConfig(model=model, **PRESETS[model]))
    if config.vocab_size is None:
        raise ConfigError(f"--model {model} has no vocabulary of its own; give another one")
    count = count_parameters(config, config.vocab_size)
    layers = [sum(p.numel for p in block_parameters(config, layer)) for layer in range(config.num_layers)]
    return [*layers, count.total - sum(layers)]


def links_of(given: Any, between_gbit: float) -> Links:
    """Those of a command line."""
    return Links(
        between=Link(given.between_latency_us * 1e-6, between_gbit * 1e9 / 8),
        inside=Link(given.inside_latency_us * 1e-6, given.inside_gbit * 1e9 / 8),
        call=given.call_us * 1e-6,
        add=given.add_gb * 1e9,
    )


def table(given: Any) -> str:
    """Rows by number of nodes."""
    units = units_of(given.model)
    links = links_of(given, given.between_gbit)
    gloo, local = given.flat == "gloo", given.ranks_per_node
    each = f"{local} rank{'' if local == 1 else 's'}"
    lines = [
        f"{given.model}, {sum(units):,} parameters; nodes of {each}, uplink {given.between_gbit:g} Gbit/s, "
        f"inside {given.inside_gbit:g} Gbit/s of a rank; seconds of a micro-batch, GB that a node sends",
        "",
        "nodes | ranks  | flat s    GB    | hierarchical s    GB    gain  largest gather  |   hpZ s     GB | "
        "hybrid s    GB",
    ]
    for nodes in given.nodes:
        network = Topology.even(nodes, local)
        ring, (best, way) = flat(units, network, links, gloo), hierarchical(units, network, links)
        inside = hybrid(units, network, links, gloo)
        kept, _ = hierarchical(units, network, links, secondary=True, gloo=gloo)
        lines.append(
            f"{nodes:>5} | {network.size:>6} | {ring.seconds:>6.3f} {ring.uplink / 1e9:>7.2f} | "
            f"{best.seconds:>14.3f} {best.uplink / 1e9:>7.2f} {ring.seconds / best.seconds:>6.2f}  "
            f"{_in_words(way):<15} | "
            f"{kept.seconds:>7.3f} {kept.uplink / 1e9:>6.2f} | {inside.seconds:>8.3f} {inside.uplink / 1e9:>6.2f}"
        )
    return "\n".join(lines)


def _in_words(way: Way) -> str:
    if way.route is None:
        return "flat"
    return f"{way.route}, {way.chunks} chunk{'' if way.chunks == 1 else 's'}"


def measured_table(text: str, links_at: Callable[[float], Links]) -> str:
    """Predicted over measured time, of flat and of hierarchical collectives, as a table of Markdown.

    Args:
        text: what ``benchmarks/collectives.py`` printed, of any number of runs.
        links_at: from Gbit/s of an uplink.
    """
    errors: dict[tuple[str, str, float, str], list[str]] = {}
    found: list[float] = []
    run: re.Match[str] | None = None
    sizes: list[float] = []
    for line in text.splitlines():
        run = re.match(r"(\d+) nodes of (\d+) ranks, uplinks of (\d+) Mbit/s", line) or run
        cells = re.match(
            r"(all-gather|reduce-scatter|all-reduce) +([\d.]+) +[\d.]+ +([\d.]+) .*?\) +[\d.]+ +([\d.]+) ", line
        )
        if run is None or cells is None or float(cells[2]) < 1:
            continue
        kind: Kind = cells[1]  # type: ignore[assignment]
        network, size = Topology.even(int(run[1]), int(run[2])), int(float(cells[2]) * (1 << 20))
        links = links_at(float(run[3]) / 1e3)
        way = least_chunks(network, size // network.size)
        predicted = {
            "gloo": flat_ring(kind, network, links, size),
            "hierarchical": two_levels(kind, network, links, size, way),
        }
        sizes += [float(cells[2])] if float(cells[2]) not in sizes else []
        for (name, seconds), taken in zip(predicted.items(), (cells[3], cells[4]), strict=True):
            error = seconds * 1e3 / float(taken) - 1
            found.append(error)
            text_of = f"{round(100 * error):+d}" if abs(error) <= 0.15 else f"**{round(100 * error):+d}**"
            errors.setdefault((f"{run[1]} x {run[2]}", name, float(run[3]), kind), []).append(text_of)
    if not found:
        raise ConfigError("--measured: there is no table of benchmarks/collectives.py in this file")
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    head = f"% of {', '.join(f'{size:g}' for size in sorted(sizes))} MiB"
    lines = [f"| {head} | Mbit/s | | {' | '.join(kinds)} |", "|---|---:|---|" + "---|" * len(kinds)]
    for layout, name, rate in dict.fromkeys((layout, name, rate) for layout, name, rate, _ in errors):
        cells_of = (", ".join(errors.get((layout, name, rate, kind), [])) for kind in kinds)
        lines.append(f"| {layout} | {rate:g} | {name} | {' | '.join(cells_of)} |")
    near = sum(abs(error) <= 0.15 for error in found)
    return "\n".join([*lines, "", f"{near} of {len(found)} are within 15 %; the others are bold."])


def plan(argv: Sequence[str] | None) -> int:
    """Read the command line and print the table."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", help="named model size")
    parser.add_argument(
        "--measured",
        type=Path,
        help="in place of --model: file of benchmarks/collectives.py to compare predictions with",
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="numbers of nodes")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="ranks on each node")
    parser.add_argument(
        "--between-gbit", type=float, help="Gbit/s of a node's uplink (with --measured: taken from each run)"
    )
    parser.add_argument(
        "--between-latency-us", type=float, default=15.0, help="latency of a message between nodes, microseconds"
    )
    parser.add_argument("--inside-gbit", type=float, required=True, help="Gbit/s of one rank inside its node")
    parser.add_argument(
        "--inside-latency-us", type=float, default=3.0, help="latency of a message inside a node, microseconds"
    )
    parser.add_argument(
        "--call-us", type=float, default=2.0, help="time in which a process posts one message, microseconds"
    )
    parser.add_argument(
        "--add-gb", type=float, default=500.0, help="GB/s at which a rank adds up the parts of a reduction"
    )
    parser.add_argument(
        "--flat", choices=("nccl", "gloo"), default="nccl", help="library whose flat rings are compared with"
    )
    given = parser.parse_args(argv)
    if (given.measured is None) == (given.model is None) or (given.model is None) != (given.between_gbit is None):
        raise ConfigError("give --model and --between-gbit, or --measured alone")
    given.between_gbit = 1.0 if given.between_gbit is None else given.between_gbit
    _check_numbers(given)
    if given.measured is None:
        print(table(given))
    else:
        try:
            text = given.measured.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"--measured {given.measured}: this is not a text file") from None
        print(measured_table(text, lambda rate: links_of(given, rate)))
    return 0


def _check_numbers(given: Any) -> None:
    least, most = RATES
    for name in ("between_gbit", "inside_gbit", "add_gb"):
        if not least <= (value := getattr(given, name)) <= most:
            raise ConfigError(f"{_flag(name)} {value:g}: give a rate of {least:g} to {most:g}")
    for name in ("between_latency_us", "inside_latency_us", "call_us"):
        if not 0 <= (value := getattr(given, name)) < math.inf:
            raise ConfigError(f"{_flag(name)} {value:g}: give at least 0 microseconds")
    if not 1 <= given.ranks_per_node <= MOST_RANKS:
        raise ConfigError(f"--ranks-per-node {given.ranks_per_node}: give 1 to {MOST_RANKS:,}")
    for nodes in given.nodes:
        if not 1 <= nodes <= MOST_RANKS // given.ranks_per_node:
            raise ConfigError(
                f"--nodes {nodes}: give 1 to {MOST_RANKS // given.ranks_per_node:,} nodes of "
                f"{given.ranks_per_node:,} ranks, {MOST_RANKS:,} ranks in all"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    return run_tool(lambda: plan(argv))


if __name__ == "__main__":
    sys.exit(main())
