"""The process that keeps torch's store stops while a run starts. Its clients wait for answers without a time limit, so
the ranks end themselves, each with a line that names the place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smp.pipeline.failure import LOST
from smp.training import runtime
from smp.training.process import Process
from smp.training.runtime import Watchdog
from tests.programs import run_program
from tests.training.flag_runs import TINY

STORE = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
STOPS = """
import os, signal, sys
import pretrain_gpt
from smp.parallel import context
from smp.training import pipelined, run, runtime
from torch.distributed import distributed_c10d

owner, name = {
    "start": (distributed_c10d, "_new_process_group_helper"),
    "groups": (context, "_make_group"),
    "links": (pipelined, "Links"),
}[os.environ["MOMENT"]]
function = getattr(owner, name)

def stopping(*args, **options):
    os.kill(int(os.environ["STORE"]), signal.SIGSTOP)
    return function(*args, **options)

setattr(owner, name, stopping)
runtime.GRACE = 0.5
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
FLAGS = f"{TINY} --train-iters 1 --distributed-timeout-minutes 0.05 --status-file why.json"
# what starts to make groups, the function that each line names, flags
PLACES = {
    "start": ("start_process_group", ""),
    "groups": ("_make_group", ""),
    "links": (r"Links\.__init__", "--pipeline-model-parallel-size 2 --global-batch-size 4"),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a store in a process of its own, whose number is STORE in the environment."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        monkeypatch.setenv("STORE", str(keeper.pid))
        yield int(keeper.stdout.readline())
        keeper.kill()


@pytest.mark.parametrize("moment", [pytest.param(m, marks=[] if m == "groups" else pytest.mark.slow) for m in PLACES])
def test_all_ranks_end_themselves(moment: str, store: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, flags = PLACES[moment]
    monkeypatch.setenv("MOMENT", moment)
    (tmp_path / "stops.py").write_text(STOPS)
    words = [*FLAGS.split(), *flags.split()]
    done = run_program(tmp_path / "stops.py", words, tmp_path, processes=2, port=store, grace=60.0)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert len(lines) == 2, done.stderr
    for rank, line in enumerate(lines):
        why = rf"{function} failed: no answer and no error for \d+ s, so this process ends; {LOST}"
        assert re.fullmatch(rf"error: rank {rank}: rank {rank} on \S+: {why}", line), line
    status = json.loads((tmp_path / "why.json").read_text())
    assert status["status"] == "failed" and any(line.endswith(status["reason"]) for line in lines)


def test_only_a_standstill_where_torch_has_a_time_limit_ends_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long and healthy does not: a part that is made after the other, and all that is not inside."""
    monkeypatch.setattr(runtime, "GRACE", 0.5)
    ends: list[str] = []
    watchdog = Watchdog(Process(3, 8, 0), 2 / 60, ends.append)  # two seconds, and half as much again
    with watchdog.ending():
        for _ in range(40):
            time.sleep(0.1)
            watchdog.progress()
    time.sleep(4)  # an evaluation
    assert not ends
    with watchdog.ending():
        deadline = time.monotonic() + 60
        while not ends:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    watchdog.close()
    why = rf"no answer and no error for \d+ s, so this process ends; {LOST}"
    assert re.fullmatch(f"a function of another package failed: {why}", ends[0])


def test_a_watchdog_that_may_not_end_the_process_only_reports(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "GRACE", 0.1)
    watchdog = Watchdog(Process(0, 1, 0), 1 / 600)
    with watchdog.ending():
        time.sleep(1.0)
    watchdog.close()
    said = capfd.readouterr().err
    assert "has made no progress" in said and "Exception in thread" not in said
