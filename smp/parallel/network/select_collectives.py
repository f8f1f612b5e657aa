"""--data-parallel-collectives: choose at the start which collectives of FSDP are hierarchical, and print the choice."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from smp.config import ConfigError
from smp.parallel.agree import gather, on_rank_zero
from smp.parallel.network.collective_schedule import Kind
from smp.parallel.network.cost import FLAT, Policy
from smp.parallel.network.group import NetworkGroup
from smp.parallel.network.measure import measure_links
from smp.parallel.network.quantize import BLOCK, Quantization
from smp.parallel.network.secondary import Parts, SecondaryShards, neighbours_of, secondary_shards
from smp.parallel.network.topology import Links, Topology, read_topology

Setting = Literal["auto", "flat", "hierarchical"]
SHOWN = 16 << 20
"""Bytes of the collective whose predicted time is printed."""
SMALLEST = 64 << 10
"""Bytes below which collectives stay flat where no links are known: messages of the posting process show."""


@dataclass(frozen=True)
class NetworkCollectives:
    """The collectives of a run's data-parallel groups.

    Attributes:
        groups: by the name of a process group; other groups are flat.
        lines: what was picked for each group and why, to be printed.
        quantization: of what FSDP's hierarchical collectives send between nodes; None: nothing is coded.
        secondary: by the name of a group that shards, what backward passes gather from; see
            :func:`with_secondary_shards`.
    """

    groups: Mapping[str, NetworkGroup] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    quantization: Quantization | None = None
    secondary: Mapping[str, SecondaryShards] = field(default_factory=dict)

    def of(self, group: dist.ProcessGroup) -> NetworkGroup | None:
        """The network group of one process group; None: its collectives are flat."""
        return self.groups.get(group.group_name)


def choose_collectives(
    meshes: Mapping[str, DeviceMesh | None],
    setting: Setting,
    timeout: timedelta = default_pg_timeout,
    topology_file: str | None = None,
    quantization: Quantization | None = None,
) -> NetworkCollectives:
    """Decide for the groups of some meshes; every rank of the default group calls this.

    Gathers have the bits of flat ones whatever is picked; sums are taken in another order. ``auto`` measures, so that
    it may pick otherwise when a run is started again: links in ``topology_file`` make the choice repeatable.

    Args:
        meshes: the meshes that FSDP shards or replicates over, by a name for messages: 1-D ``(shard)`` or 2-D
            ``(replicate, shard)``. Sums over replicas are hierarchical where their group has the backend ``smp``.
        setting: ``flat``, ``hierarchical``, or ``auto``: by predicted time, for each size.
        timeout: of a collective.
        topology_file: see :func:`read_topology`; by default ranks with one hostname are on one node, and ``auto``
            measures the links.
        quantization: which messages between nodes are quantized; with ``hierarchical`` only.

    Raises:
        ConfigError: no group that shards has several ranks on one of several nodes, and something is to be coded there;
            ``hierarchical`` where no group has several ranks on one of several nodes, or on GPUs. (Without any
            group, of one data-parallel process, the setting has no effect, which its checks say.)
    """
    groups = _groups(meshes)
    # Collective: a rank without groups takes part in every decision, or the others would wait for it.
    if setting == "flat" or not any(gather(bool(groups))):
        return NetworkCollectives()
    if any(mesh is not None and mesh.device_type != "cpu" for mesh in meshes.values()):
        return _on_gpus(setting)
    network, links = _network(topology_file)
    # Each group has a topology of its own, with its ranks numbered from 0.
    parts = {name: network.part(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    useful = any(gather(any(part.several_levels for part in parts.values())))
    where = "--network-topology" if topology_file else "hostnames"
    if not useful:
        why = f"by {where}, no data-parallel group has several ranks on one of several nodes"
        if setting == "hierarchical":
            raise ConfigError(
                f"--data-parallel-collectives hierarchical: {why}; auto and flat work, and "
                "--network-topology FILE says which ranks are on a node"
            )
        # Groups of the backend "smp" have a policy of their own, which would decide otherwise.
        for name, group in groups.items():
            _network_group(group, Policy(parts[name], hierarchical=False), timeout)
        return NetworkCollectives(lines=(f"data-parallel collectives: flat: {why}",))
    source = f"links of {topology_file}"
    if links is None and setting == "auto":
        started = time.perf_counter()
        links = measure_links(network)
        source = f"links measured in {max(gather(time.perf_counter() - started)):.1f} s"
    made: dict[str, NetworkGroup] = {}
    lines = []
    for name, group in groups.items():
        policy = _policy(parts[name], links, setting)
        lines.append(_describe_policy(name, policy, source))
        made[group.group_name] = _network_group(group, policy, timeout)
    if quantization is not None:
        # By the names that :func:`_groups` gives.
        shards = [part for name, part in parts.items() if name.endswith("sharded")]
        lines.append(_describe_quantization(quantization, any(gather(any(part.several_levels for part in shards)))))
    return NetworkCollectives(made, tuple(lines), quantization)


def _describe_quantization(quantization: Quantization, useful: bool) -> str:
    flags = {"--zero-quantized-weights": quantization.weights, "--zero-quantized-gradients": quantization.gradients}
    given = [flag for flag, wanted in flags.items() if wanted]
    if not useful:
        raise ConfigError(
            f"{' and '.join(given)}: no group that shards weights has several ranks on one of several nodes; leave out"
        )
    what = {"--zero-quantized-weights": "gathers of weights", "--zero-quantized-gradients": "reductions of gradients"}
    return (
        f"{' and '.join(what[flag] for flag in given)} are rounded to int8 between nodes, blocks of {BLOCK} with a "
        "scale: training is not exact; the relative error is logged"
    )


def with_secondary_shards(
    collectives: NetworkCollectives,
    parts: Parts,
    timeout: timedelta | None = None,
    topology_file: str | None = None,
) -> NetworkCollectives:
    """``collectives`` with secondary shards, from which backward passes gather within a node, on CPUs and on GPUs;
    every rank of the default group calls this.

    Args:
        collectives: flat or not.
        parts: number of neighbours of each mesh that hold a second copy of the weights.
        timeout: of their collectives.
        topology_file: as of :func:`choose_collectives`.

    Raises:
        ConfigError: neighbours are on several nodes, or all that share weights are on one.
    """
    topology = _network(topology_file)[0]
    where = "--network-topology" if topology_file else "hostnames"
    problem, spared, lines = None, False, []
    for name, (mesh, size) in parts.items():
        if mesh is None:
            continue
        if size < 2:
            lines.append(f"secondary shards of {name}: none: of each node's neighbours one holds them")
            continue
        group = mesh.get_group(mesh.ndim - 1)
        near = neighbours_of(group, size)
        hosts = {topology.name_of(rank): rank for rank in near}
        if len(hosts) > 1:
            said = " and ".join(f"rank {rank} on {host}" for host, rank in hosts.items())
            problem = problem or f"by {where} {said} would share secondary shards of {name}"
        # Something is spared only where a gather over all ranks would cross nodes.
        spared = spared or len({topology.name_of(rank) for rank in dist.get_process_group_ranks(group)}) > 1
        lines.append(
            f"secondary shards of {name}: {size} neighbours in a node hold the weights once more; forward passes "
            f"gather over {group.size()} ranks, backward passes over these {size}"
        )
    # Two collectives on every rank, before anything is raised: all ranks raise alike.
    found, several = next((said for said in gather(problem) if said), None), any(gather(spared))
    if found or not several:
        why = found or f"by {where} all processes that share weights are on one node, so nothing would be spared"
        raise ConfigError(f"--zero-hpz-partition-size: {why}")
    made = secondary_shards(parts, timeout)
    return replace(collectives, secondary=made, lines=(*collectives.lines, *lines))


def _groups(meshes: Mapping[str, DeviceMesh | None]) -> dict[str, dist.ProcessGroup]:
    """Process groups of two or more ranks, by "<mesh name>, sharded" or "<mesh name>, replicated"."""
    found = {}
    for name, mesh in meshes.items():
        if mesh is None:
            continue
        last = mesh.ndim - 1
        if mesh.size(last) > 1:
            found[f"{name}, sharded"] = mesh.get_group(last)
        if last and mesh.size(0) > 1:
            found[f"{name}, replicated"] = mesh.get_group(0)
    return found


def _on_gpus(setting: Setting) -> NetworkCollectives:
    if setting == "hierarchical":
        raise ConfigError(
            "--data-parallel-collectives hierarchical runs over gloo, on CPUs; on GPUs auto and flat work, which leave "
            "collectives to NCCL"
        )
    return NetworkCollectives(lines=("data-parallel collectives: flat: on GPUs they are left to NCCL",))


def topology_of(file: str | None = None) -> Topology:
    """Nodes of the default group, by a file or by hostnames. Every rank of the default group calls this."""
    return _network(file)[0]


def _network(topology_file: str | None) -> tuple[Topology, Links | None]:
    """Topology and links of the default group; what a file says comes from rank 0."""
    nodes, links = None, None
    if topology_file is not None:
        # Read once: ranks that read different files would run different schedules.
        nodes, links = on_rank_zero(lambda: read_topology(topology_file, dist.get_world_size()), ConfigError)
    return nodes or Topology.of(gather(socket.gethostname())), links


def _policy(topology: Topology, links: Links | None, setting: Setting) -> Policy:
    policy = Policy(topology, links, allow_flat=setting == "auto", hierarchical=topology.several_levels)
    # Without links there is no prediction: a limit in bytes decides.
    return replace(policy, smallest=SMALLEST) if links is None else policy


def _network_group(group: dist.ProcessGroup, policy: Policy, timeout: timedelta) -> NetworkGroup:
    """The network group of ``group`` with ``policy``. A group of the backend ``smp`` takes over the policy itself."""
    # Groups of the backends ``smp`` and ``smp_node`` have a network group already.
    if hasattr(group, "network"):
        group.network.policy = policy
        return group.network
    return NetworkGroup.of(group, policy, timeout)


def _describe_policy(name: str, policy: Policy, source: str) -> str:
    """A line for the log: the choice for one group, and the reason."""
    begin = f"data-parallel collectives of {name} over {policy.topology}:"
    if not policy.hierarchical:
        level = "one node" if len(policy.topology.nodes) == 1 else "one rank on each node"
        return f"{begin} flat: {level} has one kind of link"
    if policy.links is None:
        return f"{begin} hierarchical from {SMALLEST >> 10} KiB on, as asked for"
    # FSDP sums over replicas, gathers and reduces over shards.
    kinds: Sequence[Kind] = ["all-reduce"] if name.endswith("replicated") else ["all-gather", "reduce-scatter"]
    picked = []
    for kind in kinds:
        way = policy.way(kind, SHOWN)
        # Flat is timed once where it is the chosen way itself.
        times = {w: 1e3 * policy.seconds(kind, SHOWN, w) for w in dict.fromkeys((way, FLAT))}
        flat = "" if way == FLAT else f", flat {times[FLAT]:.3g} ms"
        picked.append(f"{kind} of {SHOWN >> 20} MiB {way} {times[way]:.3g} ms{flat}")
    rates = " and ".join(
        f"{text} {link.rate * 8e-9:.3g} Gbit/s, {link.latency * 1e6:.3g} us"
        for text, link in (("between nodes", policy.links.between), ("inside", policy.links.inside))
    )
    return f"{begin} {'; '.join(picked)} (predicted; {source}: {rates})"
