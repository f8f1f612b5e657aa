"""Measures latencies and rates of links at the start of a run, with all nodes, and all ranks of a node, sending at
once."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from smp.parallel.network.topology import Link, Links, Topology

_SIZES = tuple((256 << 10) * 4**i for i in range(4))  # 256 KiB to 16 MiB
_LONG_ENOUGH = 0.05  # seconds of a transfer whose rate is taken
_ROUNDS = 12


def measure_links(topology: Topology) -> Links:
    """Latency and rate of both kinds of links, the slowest of each kind; every rank of the default group calls this.

    Takes up to a second on links of 10 Mbit/s and above. Every rank gets the same numbers: each is a maximum over all.

    Args:
        topology: of the default group, with several nodes and several ranks on one of them.
    """
    own_node, index = topology.locations[dist.get_rank()]
    heads = [node[0] for node in topology.nodes]
    own = topology.nodes[own_node]
    between = _measure(heads if index == 0 else [])
    inside = _measure(list(own) if len(own) > 1 else [])
    return Links(between=between, inside=inside)


def _measure(ring: list[int]) -> Link:
    """Latency and rate of a ring of ranks to which this one belongs; ranks outside of it wait with the others."""
    # The median: one late rank must not set the latency.
    latency = sorted(_shift(ring, 1) for _ in range(_ROUNDS))[_ROUNDS // 2]
    # Larger and larger until a transfer takes long enough to be timed; the time is the same on all
    # ranks, so all of them stop at the same size.
    for size in _SIZES:
        taken = _shift(ring, size)
        if taken > _LONG_ENOUGH:
            break
    # The median of three, unless the link is so slow that more transfers would take seconds.
    taken = sorted([taken, _shift(ring, size), _shift(ring, size)])[1] if taken < 10 * _LONG_ENOUGH else taken
    return Link(latency, size / max(taken - latency, 1e-9))


def _shift(ring: list[int], size: int) -> float:
    """Seconds until each rank has sent so many bytes to the next one of its ring: the longest of all."""
    taken = torch.zeros(1, dtype=torch.float64)
    # All links carry at the same time, as they will in training.
    dist.barrier()
    if ring:
        here = ring.index(dist.get_rank())
        sent, into = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        started = time.perf_counter()
        # Receive first: with all ranks sending at once no message has to wait for its buffer.
        receiving = dist.irecv(into, ring[here - 1])
        sending = dist.isend(sent, ring[(here + 1) % len(ring)])
        for work in (receiving, sending):
            assert work is not None, "this rank is in the group"
            work.wait()
        taken[0] = time.perf_counter() - started
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)
