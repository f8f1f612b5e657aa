"""tools/plan_collectives.py: its table, and that its formula is near the simulator where both can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp.models.presets import PRESETS
from smp.parallel.network.collective_schedule import Kind
from smp.parallel.network.cost import Policy, Way, flat_ring, simulated, two_levels
from smp.parallel.network.topology import Link, Links, Topology
from tools.plan_collectives import main, units_of

LINKS = Links(between=Link(1e-4, 12.5e6), inside=Link(2e-5, 500e6), call=2e-5, add=3e9)
KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama3-8b", "--between-gbit", "400", "--inside-gbit", "1840", "--nodes", "2", "16", "4096"]
    assert main(flags) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.split("|")[0].strip().isdecimal()]
    assert [row.split("|")[0].strip() for row in rows] == ["2", "16", "4096"]
    cells = rows[0].split("|")
    sent = 8 * 8_030_261_248 / 1e9  # two gathers in bf16, one reduction in fp32
    assert float(cells[2].split()[1]) == pytest.approx(sent * 15 / 16, abs=0.01)
    assert float(cells[3].split()[1]) == pytest.approx(sent / 2, abs=0.01)
    assert float(cells[4].split()[1]) == pytest.approx(sent * 6 / 8 / 2, abs=0.01), "one gather of two"
    assert float(cells[2].split()[0]) > float(cells[3].split()[0]) > float(cells[4].split()[0])


def test_the_largest_gather_goes_the_way_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """By the formula, which alone decides for so many ranks; a mesh counts as 5 % slower than it is."""
    given = "--between-latency-us 50 --inside-latency-us 3 --call-us 2 --add-gb 500 --nodes 2 64 256 512"
    flags = f"--model llama3-8b --ranks-per-node 4 --between-gbit 10 --inside-gbit 100 {given}"
    assert main(flags.split()) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.split("|")[0].strip().isdecimal()]
    shown = [" ".join(row[3].split()[3:]) for row in rows]
    links = Links(between=Link(50e-6, 1.25e9), inside=Link(3e-6, 12.5e9), call=2e-6, add=500e9)
    size = 2 * max(units_of("llama3-8b"))
    taken = [Policy(Topology.even(n, 4), links, allow_flat=False).way("all-gather", size) for n in (64, 256, 512)]
    assert shown == ["mesh, 16 chunks", *(f"{way.route}, {way.chunks} chunks" for way in taken)]
    assert [way.route for way in taken] == ["ring", "ring", "mesh"]


def test_predictions_beside_measurements_are_those_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    given = "--inside-gbit 1.6 --between-latency-us 400 --inside-latency-us 400 --call-us 20 --add-gb 3"
    links = given.split()
    measured = str(root / "benchmarks/results/collectives_netlab.txt")
    assert main(["--measured", measured, *links]) == 0
    shown = capsys.readouterr().out.strip()
    assert shown.endswith("141 of 144 are within 15 %; the others are bold.") and shown.count("**") == 2 * 3
    assert shown in (root / "docs/measurements/collectives.md").read_text()


def test_a_table_and_its_links_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gather of 4 MiB on two nodes of two ranks without latencies: half of it crosses, by a ring three quarters."""
    row = "all-gather           4     167.8    {:.1f} ( 253.2)  1.58    {:.1f} ( 168.5)  1.01     169.4      2.00"
    title = "2 nodes of 2 ranks, uplinks of 100 Mbit/s, median of 7 (least); x: times the limit"
    (tmp_path / "table.txt").write_text(f"{title}\n\n{row.format(251.7 / 2, 167.8)}\n")
    given = "--inside-gbit 1e6 --between-latency-us 0 --inside-latency-us 0 --call-us 0 --add-gb 1e6"
    links = given.split()
    assert main(["--measured", str(tmp_path / "table.txt"), *links]) == 0
    shown = capsys.readouterr().out
    assert "| 2 x 2 | 100 | gloo | **+100** |" in shown and "| 2 x 2 | 100 | hierarchical | +0 |" in shown
    (tmp_path / "none.txt").write_text(title)
    assert main(["--measured", str(tmp_path / "none.txt"), *links]) == 2
    assert main(["--measured", str(tmp_path / "table.txt"), "--model", "llama3-8b", *links]) == 2
    errors = capsys.readouterr().err
    assert "there is no table" in errors and "give --model and --between-gbit, or --measured alone" in errors


def test_units_are_those_of_each_layer() -> None:
    """Dense layers in front of those with experts are smaller than these."""
    for name in ("llama3-8b", "glm-4.5-air", "qwen3-30b-a3b"):
        units = units_of(name)
        assert min(units) > 0 and len(units) == PRESETS[name]["num_layers"] + 1
    first, second, *_ = units_of("glm-4.5-air")
    assert first < second / 5


WRONG = {
    "--between-gbit 0": "--between-gbit 0: give a rate of 1e-06 to 1e+09",
    "--inside-gbit nan": "--inside-gbit nan: give a rate",
    "--add-gb 1e-320": "--add-gb 9.99989e-321: give a rate",
    "--call-us -1": "--call-us -1: give at least 0 microseconds",
    "--between-latency-us inf": "--between-latency-us inf: give at least 0 microseconds",
    "--ranks-per-node 0": "--ranks-per-node 0: give 1 to 1,048,576",
    "--nodes 2 0": "--nodes 0: give 1 to 131,072 nodes of 8 ranks, 1,048,576 ranks in all",
    "--nodes 100000000": "--nodes 100000000: give 1 to 131,072 nodes",
    "--ranks-per-node 4 8": "unrecognized arguments: 8",
    "--model llama9": "--model llama9: give one of",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_numbers_are_told_in_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "llama3-8b", "--between-gbit", "1", "--inside-gbit", "1", *flags.split()]
    assert main(given) == 2
    assert f"error: {WRONG[flags]}" in capsys.readouterr().err


def test_what_is_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    assert main(["--measured", str(tmp_path / "bytes"), "--inside-gbit", "1"]) == 2
    assert "bytes: this is not a text file" in capsys.readouterr().err


@pytest.mark.parametrize("nodes, local", [(1, 8), (4, 1)])
def test_one_kind_of_link_is_flat(nodes: int, local: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As runs are there; on one node nothing crosses an uplink."""
    flags = f"--model llama3-8b --between-gbit 400 --inside-gbit 1840 --nodes {nodes} --ranks-per-node {local}"
    assert main(flags.split()) == 0
    _, ranks, ring, best, kept, _ = capsys.readouterr().out.splitlines()[-1].split("|")
    assert int(ranks) == nodes * local and best.split()[2:] == ["1.00", "flat"]
    assert ring.split() == best.split()[:2] == kept.split()
    assert (float(ring.split()[1]) == 0) == (nodes == 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes, local", [(2, 2), (2, 4), (4, 2), (3, 3)])
def test_formulas_are_near_the_simulator(kind: Kind, nodes: int, local: int) -> None:
    """Where the uplink is the slower link: within 15 % from 1 MiB on."""
    network = Topology.even(nodes, local)
    for size in (1 << 20, 16 << 20):
        assert flat_ring(kind, network, LINKS, size) == pytest.approx(
            simulated(kind, network, LINKS, size, Way()), rel=0.15
        )
        for way in (Way("mesh", 8), Way("mesh", 1)):
            assert two_levels(kind, network, LINKS, size, way) == pytest.approx(
                simulated(kind, network, LINKS, size, way), rel=0.15
            )
