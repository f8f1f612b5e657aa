"""A rank that is dead or late ends a hierarchical collective on the others in time, with its number and node named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp.parallel.network.cost import Policy
from smp.parallel.network.group import CollectiveError, NetworkGroup
from smp.parallel.network.topology import Topology
from tests.distributed import run_distributed

NODES = Topology.of(["left", "left", "right", "right"])
LIMIT = 3.0


def lose(rank: int, world: int, folder: str, killed: bool) -> None:
    """Rank 3 takes no part in the second gather; the others write down when they end, and what they say."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    network = NetworkGroup.of(group, Policy(NODES), timedelta(seconds=LIMIT))
    given, output = torch.full((100_000,), float(rank)), torch.empty(400_000)
    way = network.way("all-gather", output)
    network.all_gather(output, given, way).finish()
    assert output[::100_000].tolist() == [0.0, 1.0, 2.0, 3.0]
    if rank == 3:
        time.sleep(0.5)  # the others are in the middle of it
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * LIMIT)
        return
    started = time.monotonic()
    running = network.all_gather(output, given, way)
    queued = network.all_gather(output.clone(), given, way)
    with pytest.raises(CollectiveError) as caught:
        if rank == 0:
            works = running.work(output), queued.work(output)
            works[0].wait()  # the error of the thread comes back here
        else:
            running.finish()
    taken = time.monotonic() - started
    with pytest.raises(CollectiveError, match="an earlier collective of this group failed: all-gather of 1,6"):
        works[1].wait() if rank == 0 else queued.finish()  # it ends at once, and says why
    with pytest.raises(CollectiveError, match="an earlier collective of this group failed"):
        network.all_gather(output, given, way)
    Path(folder, str(rank)).write_text(json.dumps([taken, str(caught.value)]))
    time.sleep(1.0)  # an exit would be one more lost rank
    if killed:
        os._exit(0)  # without waiting for the lost rank in the end of the default group


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_ranks_end_and_say_where(killed: bool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ranks without an answer") if killed else contextlib.nullcontext():
        run_distributed(lose, 4, str(tmp_path), killed, timeout=60.0)
    said = {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)}
    for taken, text in said.values():
        assert taken < LIMIT + 5.0, "a busy machine; the groups' own timeout is 60 s"
        assert text.startswith("all-gather of 1,600,000 bytes over 2 nodes of 2 ranks failed after ")
    for rank in (1, 2):  # those that rank 3 sends to, or takes from
        assert f"on rank {rank} ({NODES.name_of(rank)}): rank 3 on right has not" in said[rank][1]


FORGETS = """
import time, torch
import torch.distributed as dist
import smp.parallel.backend

dist.init_process_group("smp", store=dist.HashStore(), rank=0, world_size=1)
dist.group.WORLD.network.in_background(lambda: (time.sleep(0.5), print("done", torch.ones(3).sum().item())))
"""


def test_a_program_that_destroys_no_group_ends_in_order() -> None:
    """What a group's thread does when the interpreter ends is done first: C++ aborted the process."""
    done = subprocess.run([sys.executable, "-c", FORGETS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done 3.0\n"), done.stderr
