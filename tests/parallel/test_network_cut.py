"""An uplink that is cut in mid-collective: all ranks end in time, each with rank and node named, and the run goes on.

Needs a network of namespaces, see ``tests.parallel.netlab``; skipped where there is none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.parallel.netlab import run_on_nodes
from tests.parallel.test_network_faults import FLAGS

SCRIPT = """
import os, subprocess, sys, time
import pretrain_gpt
from smp.parallel.network.group import NetworkGroup

start, left = NetworkGroup._start, [None] * int(os.environ["LIVES"])

def cutting(*args, **options):  # the uplink of rank 3's node, when rank 3 begins one more collective
    if os.environ["RANK"] == "3" and left:
        left.pop()
        if not left:
            assert os.readlink("/proc/self/ns/net") != os.environ["OUTSIDE"], "that is the machine's own network"
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            print("cut", flush=True)
    return start(*args, **options)

NetworkGroup._start = cutting
started = time.monotonic()
code = 1
try:
    code = pretrain_gpt.main(sys.argv[1:])
finally:
    print(f"ended with {code} after {time.monotonic() - started:.1f} s", flush=True)
    sys.exit(code)
"""
LIMIT = 12.0  # seconds of --distributed-timeout-minutes
FLAGS_HERE = FLAGS.replace(" --network-topology nodes.json", "").replace(
    "--distributed-timeout-minutes 0.3", f"--distributed-timeout-minutes {LIMIT / 60}"
)


@pytest.mark.slow
def test_a_cut_uplink_ends_all_ranks_with_the_place_and_a_new_start_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    words = ["run.py", *FLAGS_HERE.split()]
    outside = f"--env OUTSIDE={os.readlink('/proc/self/ns/net')}"
    done = run_on_nodes(f"--grace 30 {outside} --env LIVES=25", words, tmp_path, 120.0)
    said = done.stdout + done.stderr
    assert done.returncode not in (0, 124), f"124: it was ended from outside\n{said[-4000:]}"
    found = re.findall(
        r"\[node(\d\.\d)\] error: .*over 2 nodes of 2 ranks failed after ([\d.]+) s on rank (\d) \((\w+)\): "
        r"rank (\d) on (\w+) has not",
        said,
    )
    assert sorted({rank for _, _, rank, _, _, _ in found}) == ["0", "1", "2", "3"], said[-4000:]
    for _, seconds, rank, node, other, place in found:
        assert float(seconds) < LIMIT + 3
        assert node == f"node{int(rank) // 2}" and place == f"node{int(other) // 2}"
    # those whose message had to cross name the other side
    assert any(node != place for *_, node, _, place in found)
    ends = [float(after) for after in re.findall(r"\] ended with \d+ after ([\d.]+) s", said)]
    assert len(ends) == 4 and max(ends) - min(ends) < LIMIT, ends
    assert "iteration 2/6" in said and "iteration 6/6" not in said and "] cut" in said
    again = run_on_nodes(f"{outside} --env LIVES=0", words, tmp_path, 120.0)
    assert again.returncode == 0 and "iteration 6/6" in again.stdout, (again.stdout + again.stderr)[-4000:]
