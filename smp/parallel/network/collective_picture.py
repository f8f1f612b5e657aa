"""Draw schedules of collectives as text; ``tools/write_docs.py`` puts it into the documentation."""

from __future__ import annotations

from smp.parallel.network.collective_schedule import Schedule
from smp.parallel.network.schedules import all_gather, reduce_scatter
from smp.parallel.network.simulate_collective import simulate
from smp.parallel.network.topology import Link, Links, Topology

EXAMPLE = Links(between=Link(0.0, 1.0), inside=Link(0.0, 4.0), call=0.0, add=1e30)
"""Links of the pictures: a message between nodes takes four times as long as one inside."""

LONGEST = 64.0
"""Seconds of a line, with pieces of 16 bytes."""
_COLUMNS = 64


def messages(schedule: Schedule) -> str:
    """A line for each message and sum, in the order of their starts."""
    timeline = simulate(schedule, [16] * schedule.size, EXAMPLE)
    locations = schedule.topology.locations
    lines = []
    for span in sorted(timeline.spans, key=lambda s: (s.start, s.source, s.destination, s.piece)):
        if span.source == span.destination:
            lines.append(f"{span.start:5.1f}  rank {span.source}        adds up piece {span.piece}, chunk {span.chunk}")
            continue
        crosses = locations[span.source][0] != locations[span.destination][0]
        way = "between nodes" if crosses else "inside"
        what = f"piece {span.piece}, chunk {span.chunk}"
        lines.append(f"{span.start:5.1f}  rank {span.source} -> rank {span.destination}  {what}  {way}")
    return "\n".join(lines)


def links_over_time(schedule: Schedule, network: Topology | None = None) -> str:
    """A line for each link: the number of the piece that it carries, to the right the time.

    Args:
        network: where the ranks really are; by default what the schedule was made for.
    """
    network = network or schedule.topology
    timeline = simulate(schedule, [16] * schedule.size, EXAMPLE, network)
    locations = network.locations
    rows: dict[str, list[str]] = {}
    for node, _ in enumerate(network.nodes):
        rows[f"uplink of node {node}"] = ["."] * _COLUMNS
    for rank in range(schedule.size):
        rows[f"rank {rank} inside"] = ["."] * _COLUMNS
    for span in timeline.spans:
        if span.source == span.destination:
            continue
        node, other = locations[span.source][0], locations[span.destination][0]
        # A node has one uplink; inside of a node each rank has a link of its own.
        name = f"uplink of node {node}" if node != other else f"rank {span.source} inside"
        first, last = (round(moment / LONGEST * _COLUMNS) for moment in (span.start, span.end))
        # At least one column, or a short message would not be seen.
        for column in range(first, max(last, first + 1)):
            rows[name][min(column, _COLUMNS - 1)] = str(span.piece)
    return "\n".join(f"{name:<17} {''.join(row)}" for name, row in rows.items())


def pictures() -> str:
    """Pictures of docs/collectives.md, as Markdown."""
    nodes = Topology.even(2, 2)
    parts = [
        (
            "All-gather of 4 ranks on 2 nodes, 4 chunks: what each link carries (digits are pieces, named by their "
            "owners; time runs to the right):",
            links_over_time(all_gather(nodes, [4] * 4)),
        ),
        (
            "The same as a flat ring, which crosses each uplink with 3 pieces of 4:",
            links_over_time(all_gather(nodes.each_alone(), [4] * 4, "ring"), nodes),
        ),
        (
            "Reduce-scatter, 4 chunks: parts meet inside of a node first, one sum crosses:",
            links_over_time(reduce_scatter(nodes, [4] * 4)),
        ),
        ("Reduce-scatter in one chunk, every message and sum:", messages(reduce_scatter(nodes, [1] * 4))),
    ]
    return "\n\n".join(f"{title}\n\n```\n{picture}\n```" for title, picture in parts)
