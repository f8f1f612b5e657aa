"""What a cluster's links carry: as the formula for lists of nodes has it, and less where rings meet at the spine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp.parallel.network.cost import flat_ring
from smp.parallel.network.fabric import Fabric
from smp.parallel.network.topology import Link, Links, Topology

FABRIC = Fabric(domain=8, local=400e9, card=50e9, latency=3e-6)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 8), (16, 4), (64, 1)])
def test_a_ring_is_that_of_the_formula_for_lists_of_nodes(nodes: int, per_node: int) -> None:
    """An uplink is all cards of a node's ranks."""
    size, stride = 1 << 30, 8 // per_node
    uplink = min(FABRIC.local, FABRIC.card * per_node)
    links = Links(Link(FABRIC.latency, uplink), Link(FABRIC.latency, FABRIC.local), call=0.0)
    expected = flat_ring("all-gather", Topology.even(nodes, per_node), links, size, gloo=False)
    found = FABRIC.ring(size, nodes * per_node, stride)
    # the other formula counts one hop more between nodes: the ring's last edge
    assert found == pytest.approx(expected, rel=1e-3)


def test_rings_within_a_leaf_do_not_feel_the_spine() -> None:
    wide, narrow = replace(FABRIC, leaf=256), replace(FABRIC, leaf=256, oversubscription=4.0, contention=2.0)
    for ranks, stride in ((8, 1), (256, 1), (32, 8), (2, 128)):
        assert narrow.ring(1e9, ranks, stride) == FABRIC.ring(1e9, ranks, stride)
    # One ring through all of a leaf's GPUs crosses it once; a ring for each GPU of a leaf crosses it 256 times.
    assert narrow.ring(1e9, 1024, 1) == wide.ring(1e9, 1024, 1)
    few, many = (narrow.ring(1e9, 8, stride) / wide.ring(1e9, 8, stride) for stride in (64, 256))
    assert 1 < few < many == pytest.approx(8, rel=0.05)


def test_an_all_to_all_takes_its_slowest_way() -> None:
    assert FABRIC.all_to_all(1e9, 8, 1) == pytest.approx(7 / 8 * 1e9 / 400e9 + 7 * 3e-6)
    assert FABRIC.all_to_all(1e9, 64, 1) == pytest.approx(56 / 64 * 1e9 / 50e9 + 63 * 3e-6)
    rack = replace(FABRIC, domain=72)
    assert rack.all_to_all(1e9, 64, 1) < 0.2 * FABRIC.all_to_all(1e9, 64, 1)
    narrow = replace(FABRIC, leaf=32, oversubscription=3.0)
    assert narrow.all_to_all(1e9, 64, 1) == pytest.approx(32 / 64 * 1e9 * 3 / 50e9 + 63 * 3e-6)
    assert FABRIC.all_to_all(1e9, 1, 1) == 0


def test_a_message_of_a_pipeline_has_one_card() -> None:
    """A ring through the same GPUs has those of all its ranks in a domain."""
    size, latency = 1e8, FABRIC.latency
    assert FABRIC.message(size, 4, 2) == pytest.approx(size / 400e9 + latency)
    assert FABRIC.message(size, 8, 2) == pytest.approx(size / 50e9 + latency)
    assert FABRIC.rate(8, 2) == 4 * 50e9
    # 8 of a leaf's 32 GPUs send over its spine, which is as wide as 32 / 3 cards, or as 32 / 8.
    for narrow, rate in ((3.0, 50e9), (8.0, 25e9)):
        spine = replace(FABRIC, leaf=32, oversubscription=narrow)
        assert spine.message(size, 8, 8) == pytest.approx(size / rate + latency)
        assert spine.message(size, 4, 8) == pytest.approx(size / 50e9 + latency)


def test_a_larger_domain_brings_more_ranks_together() -> None:
    times = [replace(FABRIC, domain=domain).ring(1e9, 64, 8) for domain in (8, 16, 32, 64, 512)]
    assert times == sorted(times, reverse=True) and times[0] > 5 * times[-1]
