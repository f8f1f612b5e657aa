"""The slow rank is named, and nobody else: on recorded times, and in runs whose ranks sleep."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smp.training.reporting import own_time
from smp.training.reporting.own_time import HostTime
from smp.training.reporting.stragglers import WINDOW, Detector, roles_of
from tests.training.flag_runs import TINY, proves, run_here
from tests.training.preloaded import python_path

RANKS, STEPS = 8, 1000


def quiet(seed: int, median: float = 0.2, spread: float = 0.05) -> np.ndarray:
    """Times of steps (steps, ranks): log-normal, some common to all ranks, and pauses of 2 to 5 steps' length in one
    of 200."""
    draw = np.random.default_rng(seed)
    times = median * draw.lognormal(0, spread, (STEPS, RANKS)) * draw.lognormal(0, spread, (STEPS, 1))
    pauses = draw.random(times.shape) < 1 / 200
    return times + pauses * median * draw.uniform(2, 5, times.shape)


def named(times: np.ndarray, detector: Detector) -> list[tuple[int, int]]:
    """(window, rank) of all findings."""
    windows = times.reshape(-1, WINDOW, times.shape[1])
    return [(i, found.rank) for i, window in enumerate(windows) for found in detector.slow(window)]


def test_no_false_alarm_in_quiet_steps() -> None:
    for seed in range(20):
        assert named(quiet(seed), Detector([0] * RANKS)) == []


def test_a_slow_rank_is_named_within_20_steps() -> None:
    """200 times: from some step on a random rank sleeps 50 to 500 ms; steps take 200 ms."""
    right = 0
    for seed in range(200):
        draw = np.random.default_rng(1000 + seed)
        times, rank, start = quiet(seed), int(draw.integers(RANKS)), int(draw.integers(20, STEPS - 20))
        times[start : start + 20, rank] += draw.uniform(0.05, 0.5)
        found = named(times, Detector([0] * RANKS))
        right += bool(found) and {one for _, one in found} == {rank} and WINDOW * (found[0][0] + 1) <= start + 20
    assert right >= 196


def test_ranks_of_a_stage_are_compared_with_each_other_only() -> None:
    """The last stage takes twice as long, as it may; a rank of it that takes more is named, and so is one that has
    become slower than it was and has no peers."""
    times = quiet(3)
    times[:, 4:7] *= 2
    times[500:, 6] *= 1.5
    times[:, 7] *= 3
    times[500:, 7] *= 1.5
    found = named(times, Detector([0, 0, 0, 0, 1, 1, 1, 2]))
    assert {rank for _, rank in found} == {6, 7} and min(window for window, _ in found) == 102


def test_of_two_ranks_the_slower_one_is_named_also_when_it_always_was() -> None:
    times = quiet(4)[:, :2] * np.array([1.0, 1.3])
    assert {rank for _, rank in named(times, Detector([0, 0]))} == {1}


class Clocks:
    """A step of a rank: seconds that pass, that it runs, and that it has no processor in."""

    def __init__(self) -> None:
        self.wall = self.ran = self.delay = self.waited = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.ran

    def seconds(self) -> float:
        return self.delay

    def pass_by(self, *, runs: float = 0.0, sleeps: float = 0.0, delayed: float = 0.0, waits: float = 0.0) -> None:
        self.wall += runs + sleeps + delayed + waits
        self.ran += runs
        self.delay += delayed
        self.waited += waits


def test_what_another_process_takes_is_not_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(own_time, "time", clocks)
    monkeypatch.setattr(own_time, "_Delay", lambda: clocks)
    host = HostTime([], None)
    monkeypatch.setattr(host, "_waited", lambda: clocks.waited)
    with host.measured(1):
        clocks.pass_by(runs=3, sleeps=5, delayed=7, waits=11)
    assert (host.seconds, host.delayed) == (8, 7)
    with host.measured(2):  # woken from a wait the rank has no processor at first: that is a part of the wait
        clocks.pass_by(runs=3, waits=11)
        clocks.delay += 6
    assert (host.seconds, host.delayed) == (3, 0)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not say")
def test_the_system_says_how_long_a_thread_had_no_processor() -> None:
    delay = own_time._Delay()
    first = delay.seconds()
    sum(range(200_000))
    assert 0 < first <= delay.seconds()
    delay.close()


SLEEPS = """
import os, sys, time
import pretrain_gpt
from smp.training import trainer

rank, step, first = int(os.environ["RANK"]), trainer.Trainer.start_step, []

def start_step(self, *arguments):
    if not first:
        self.model.register_forward_pre_hook(
            lambda *_: time.sleep(0.2) if rank == 2 and self.progress.iteration >= 24 else None
        )
        first.append(True)
    return step(self, *arguments)

trainer.Trainer.start_step = start_step
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
"""Rank 2 sleeps 200 ms in each forward pass from iteration 25 on."""


@pytest.mark.usefixtures("forked")
@proves("log_straggler", "straggler_minmax_count")
def test_a_run_names_the_rank_that_is_slow(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    flags = "--train-iters 60 --global-batch-size 8 --hidden-size 64 --log-straggler --straggler-minmax-count 2"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "sleeps.py"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, *TINY.split(), *flags.split()], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "logs/stragglers.jsonl").read_text().splitlines()]
    first = {(one["rank"], one["what"]): one["iteration"] for one in reversed(found)}
    assert 24 < first[2, "own computation"] <= 24 + 20
    said = [line for line in done.stdout.splitlines() if "is slow: own computation takes" in line]
    # On a machine with more to do than processors others may be slow as well, and are.
    assert any(line.startswith(f"WARNING: rank 2 on {socket.gethostname()} is slow: ") for line in said)
    records = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    slowest = {r["iteration"]: r["slowest rank"] for r in records if "slowest rank" in r}
    assert slowest[40] == slowest[50] == slowest[60] == 2


def test_one_process_tells_its_own_computation(tmp_path: Path) -> None:
    run = run_here(tmp_path, "--train-iters 20 --log-straggler --straggler-minmax-count 1")
    told = [line for line in run.out.splitlines() if line.startswith(" own computation of a step: fastest ")]
    assert len(told) == 4 and " rank 0 on " in told[0] and "| median " in told[0]
    assert len(run.records("own seconds, slowest rank")) == 4
    assert "own computation" not in run_here(tmp_path / "b", "--train-iters 20").out


def test_ranks_with_the_same_experts_are_peers_where_they_are_several() -> None:
    assert roles_of([0, 0, 0, 0], [0, 1, 0, 1]) == [0, 1, 0, 1]
    assert roles_of([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert roles_of([0, 0, 0, 0], [0, 1, 2, 3]) == [0, 0, 0, 0]
    assert roles_of([0, 1], [0, 0]) == [0, 1]
