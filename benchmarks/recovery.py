"""Seconds from SIGKILL of a worker to the first new step, by phase: inside the process, and by a restart of torchrun
from the memory of nodes and from a file, in turn.

    python -m benchmarks.recovery --times 5

Two processes on this machine; each kind has a job of its own, which is struck five times before the next kind's turn.
Phases, each in seconds after the kill. By a restart: "detected", torchrun has seen it; "met", new worker processes
exist (torchrun has stopped the others and met again); "state", the copy or checkpoint is loaded (Python, torch, data
and model come before); "step", the first new step is logged. Inside the process: "detected", the other process has
noticed it; "let go", that has let go of groups and model; "met", both are there again; "state" and "step" as before.

    python -m benchmarks.recovery --cost --times 20

What the means of recovery cost while nothing fails: seconds of a step without copies and without a keeper, and with
both (an interval of 10), in turn.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.training.elastic_lab import Job, children_of

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000 --mock-data --seq-length 128 "
    "--global-batch-size 4 --train-iters 1000000 --lr-decay-style constant --log-interval 1 --no-tensorboard "
    "--no-progress-bar --log-dir logs --distributed-timeout-minutes 1"
)
INSIDE = "--inprocess-restart --peer-snapshot-interval {}"
KINDS = {
    "in process": INSIDE.format(1),
    "restart, memory": "--peer-snapshot-interval 1",
    "restart, file": "--save ck --load auto --save-interval 1 --keep-last-k 2",
}
COSTS = {"without": "", "copies": "--peer-snapshot-interval 10", "copies and keeper": INSIDE.format(10)}
PHASES = ("detected", "let go", "met", "state", "step")
_TOLD = re.compile(r"rank \d+: restart \d+ in process: after the loss let go ([\d.]+) s, all there ([\d.]+) s, state")
EACH = 5
"""Failures of one job, before the next kind has its turn."""
FIRST, STEPS = 20, 100
"""Of a run whose steps are measured: those that are not, and those that are."""


def recover(job: Job, inside: bool) -> dict[str, float]:
    """Kill the process of rank 1 that trains; seconds until each phase is over."""
    before, mark = job.iteration, job.mark()
    old = set(job.workers(0))
    os.kill((job.trainers if inside else job.workers)(0)[1], signal.SIGKILL)
    killed = time.monotonic()
    waits = {
        "detected": lambda: ("process is lost" if inside else "exitcode: -9") in job.since(mark),
        "met": lambda: inside or (len(workers := job.workers(0)) == 2 and not set(workers) & old),
        "state": lambda: "resumed from" in job.since(mark),
        "step": lambda: job.iteration > before,
    }
    out = {}
    for phase, done in waits.items():
        job.until(done)
        out[phase] = time.monotonic() - killed
    if inside:
        job.until(lambda: _TOLD.search(job.since(mark)) is not None)
        told = _TOLD.search(job.since(mark))
        assert told is not None
        out |= {phase: out["detected"] + float(s) for phase, s in zip(("let go", "met"), told.groups(), strict=True)}
    return out


def started(folder: Path, flags: str, step: float) -> Job:
    """A job of one node with two processes, which trains."""
    job = Job(folder, f"{FLAGS} {flags}", 1, 1, step=step, each=2)
    job.start()
    return job


def table(found: Mapping[str, list[dict[str, float]]]) -> None:
    """Medians of each kind and phase."""
    times = min(len(runs) for runs in found.values())
    print(f"{'seconds after SIGKILL, medians of ' + str(times):40}" + "".join(f"{phase:>12}" for phase in PHASES))
    for kind, runs in found.items():
        cells = [[run[phase] for run in runs if phase in run] for phase in PHASES]
        print(f"{kind:40}" + "".join(f"{statistics.median(cell):12.2f}" if cell else f"{'':12}" for cell in cells))


def recoveries(times: int, folder: Path) -> None:
    """One job at a time: others that train meanwhile would take its processors."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(0, times, EACH):
        for kind, flags in KINDS.items():  # interleaved
            job = started(folder / f"{kind}{number}", flags, 0.05)
            try:
                for _ in range(min(EACH, times - number)):
                    job.reach(job.iteration + 6)
                    if kind == "in process":
                        job.until(lambda job=job: all(len(children_of(keeper)) > 1 for keeper in job.workers(0)))
                        for keeper in job.workers(0):
                            wait_until_idle(children_of(keeper)[-1])
                    found[kind].append(recover(job, kind == "in process"))
                    print(kind, {phase: round(seconds, 2) for phase, seconds in found[kind][-1].items()}, flush=True)
            finally:
                job.close()
    table(found)


def wait_until_idle(pid: int) -> None:
    """Wait until a process that is held ready has imported what there is."""
    ticks, before = -1, -2
    while ticks > before + 1:
        time.sleep(1)
        before = ticks
        # utime and stime, behind "pid (name)".
        ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def costs(times: int, folder: Path) -> None:
    """Seconds of a step, but for the first ones: of each place in the interval of copies the median, and of these the
    mean, for copies come in one step of ten."""
    means: dict[str, list[float]] = {kind: [] for kind in COSTS}
    for number in range(times):
        for kind, flags in COSTS.items():  # interleaved
            job = started(folder / f"{kind}{number}", f"{flags} --train-iters {FIRST + STEPS}", 0.0)
            try:
                job.finish()
                places: dict[int, list[float]] = {}
                for i, record in job.records().items():
                    if i > FIRST:
                        places.setdefault(i % 10, []).append(record["seconds per iteration"])
                means[kind].append(statistics.mean(statistics.median(took) for took in places.values()))
            finally:
                job.close()
        print({kind: round(runs[-1], 4) for kind, runs in means.items()}, flush=True)
    for kind, runs in means.items():
        against = statistics.median(run / first for run, first in zip(runs, means["without"], strict=True))
        print(
            f"{kind:20} {statistics.median(runs):.4f} s a step, median of {times}; {against:.3f} of without, in pairs"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="failures of each kind")
    parser.add_argument("--cost", action="store_true", help="of a run in which nothing fails")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (costs if asked.cost else recoveries)(asked.times, Path(folder))


if __name__ == "__main__":
    main()
