"""Files of --network-topology, groups of a topology, and the pictures that the documentation shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.parallel.network.collective_picture import pictures
from smp.parallel.network.cost import FLAT, Policy
from smp.parallel.network.topology import Link, Links, Topology, read_topology

LINK = {"gbit_per_s": 8, "latency_us": 50}
ROOT = Path(__file__).resolve().parents[2]


def read(folder: Path, said: Any, world: int = 4) -> Any:
    path = folder / "nodes.json"
    path.write_text(said if isinstance(said, str) else json.dumps(said))
    return read_topology(str(path), world)


def test_nodes_and_links_are_read(tmp_path: Path) -> None:
    nodes, links = read(tmp_path, {"nodes": [[0, 3], [1, 2]], "between": LINK, "inside": {**LINK, "gbit_per_s": 80}})
    assert nodes.nodes == ((0, 3), (1, 2))
    assert links == Links(between=Link(50e-6, 1e9), inside=Link(50e-6, 1e10))
    nodes, links = read(tmp_path, {"nodes": [[0, 1, 2, 3]]})
    assert not nodes.several_levels and links is None


WRONG = {
    "no JSON": ("nodes: x", "Expecting value"),
    "nodes twice": ('{"nodes": [[0, 1], [2, 3]], "nodes": [[0, 1, 2, 3]]}', "(?<!, )nodes is given twice"),
    "a rate twice": (
        '{"inside": {"gbit_per_s": 1, "gbit_per_s": 2, "latency_us": 1}}',
        "(?<!, )gbit_per_s is given twice",
    ),
    "too deep": ("[" * 100_000, "recursion"),
    "of bytes": ("\x00\x01", "Expecting value"),
    "of more ranks": ({"nodes": [[0, 1, 2, 3], [4, 5, 6, 7]]}, "each of the ranks 0 to 3 of this run once"),
    "of hosts": ({"nodes": [["left", "right"], ["a", "b"]]}, "each of the ranks 0 to 3 of this run once"),
    "of a host": ({"nodes": {"left": [0, 1], "right": [2, 3]}}, "each of the ranks 0 to 3 of this run once"),
    "infinite": ('{"between": {"gbit_per_s": Infinity, "latency_us": 1}, "inside": {}}', "between needs gbit_per_s"),
    "no number": ('{"between": {"gbit_per_s": NaN, "latency_us": 1}, "inside": {}}', "between needs gbit_per_s"),
    "nothing": ({}, "a JSON object with nodes, or between and inside"),
    "an unknown key": ({"node": [[0, 1, 2, 3]]}, "a JSON object with nodes"),
    "half of the links": ({"between": LINK}, "a JSON object with nodes"),
    "a missing rank": ({"nodes": [[0, 1], [2]]}, "each of the ranks 0 to 3 of this run once"),
    "a rank twice": ({"nodes": [[0, 1], [1, 2, 3]]}, "each of the ranks 0 to 3 of this run once"),
    "a fraction": ({"nodes": [[0.0, 1], [2, 3]]}, "each of the ranks 0 to 3 of this run once"),
    "a truth": ({"nodes": [[False, True], [2, 3]]}, "each of the ranks 0 to 3 of this run once"),
    "an empty node": ({"nodes": [[0, 1], [2, 3], []]}, "no empty node"),
    "a name": ({"nodes": [[0, 1], [2, "3"]]}, "each of the ranks 0 to 3 of this run once"),
    "another key": (
        {"between": {**LINK, "latency_ms": 1}, "inside": LINK},
        "between needs gbit_per_s above 0 and latency_us of at least 0, no other key",
    ),
    "no rate": ({"between": {"latency_us": 1}, "inside": LINK}, "between needs gbit_per_s above 0"),
    "rate 0": ({"between": LINK, "inside": {**LINK, "gbit_per_s": 0}}, "inside needs gbit_per_s above 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    said, message = WRONG[name]
    with pytest.raises(ConfigError, match=f"^--network-topology .*nodes.json: .*{message}") as caught:
        read(tmp_path, said)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_file_of_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--network-topology .*: .*No such file"):
        read_topology(str(tmp_path / "none.json"), 4)
    with pytest.raises(ConfigError, match="--network-topology .*: .*Is a directory"):
        read_topology(str(tmp_path), 4)
    (tmp_path / "latin.json").write_bytes(b'{"n\xf6des": []}')
    with pytest.raises(ConfigError, match="--network-topology .*: .*can't decode"):
        read_topology(str(tmp_path / "latin.json"), 4)


def test_groups_are_parts_of_it() -> None:
    network = Topology.even(2, 4)
    assert network.part([0, 1, 4, 5]).nodes == ((0, 1), (2, 3))
    assert network.part([0, 1, 4, 5]).several_levels
    assert not network.part([0, 4]).several_levels, "one rank on each node"
    assert not network.part([0, 2]).several_levels, "one node"
    assert network.part([4, 0, 5]).nodes == ((0, 2), (1,))
    assert network.part([0, 4, 1, 5]).crossings == 2, "a ring in this order leaves each node twice"


def test_a_policy_is_a_function_of_kind_and_size() -> None:
    links = Links(between=Link(1e-4, 12.5e6), inside=Link(2e-5, 500e6))
    policy = Policy(Topology.even(2, 2), links)
    assert policy.way("all-gather", 16 << 20).route is not None
    assert policy.way("reduce-scatter", 16 << 20) == Policy(Topology.even(2, 2), links).way("reduce-scatter", 16 << 20)
    assert Policy(Topology.even(2, 2), hierarchical=False).way("all-reduce", 16 << 20) == FLAT
    assert Policy(Topology.even(2, 2), smallest=1024).way("all-reduce", 1023) == FLAT


def test_the_pictures_are_those_of_today() -> None:
    page = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8")
    assert pictures() in page, "run: python tools/write_docs.py"
