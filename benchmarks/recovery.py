"""Seconds from SIGKILL of a worker to the first new step, by phase: inside the process, and by a restart of torchrun
from the memory of nodes and from a file, in turn.

    python -m benchmarks.recovery --times 5

Two processes on this machine; each kind has a job of its own, which is struck four times before the next kind's turn.
Phases, each in seconds after the kill. By a restart: "detected", torchrun has seen it; "met", new worker processes
exist (torchrun has stopped the others and met again); "state", the copy or checkpoint is loaded (Python, torch, data
and model come before); "step", the first new step is logged. Inside the process: "detected", the other process has
noticed it; "let go", that has let go of groups and model; "met", both are there again; "state" and "step" as before.

    python -m benchmarks.recovery --cost --times 20

What the means of recovery cost while nothing fails, at a copy every 10 steps. By the clock: of every 20 steps of a run
the first ten begin with a copy, and the next ten do not; their difference, in turn and in the same processes. By
processor time: of making copies in the thread that trains, of the threads that write them, of all other threads, of the
keepers, and of the processes that are held ready, as shares of that of the thread that trains.

With --results FILE both add to what the file has, and with --seconds begin nothing new after that time: so they can be
measured in pieces, when a machine has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
PHASES = ("detected", "let go", "met", "state", "step")
_TOLD = re.compile(r"rank \d+: restart \d+ in process: after the loss let go ([\d.]+) s, all there ([\d.]+) s, state")
EACH = 4
"""Failures of one job, before the next kind has its turn."""
BLOCK = 10
"""Steps of a copy."""
BLOCKS = 12
"""Of a run that is measured while nothing fails: every other one begins with a copy."""
TIMED = """
import os, sys, time
if "SMP_KEEPER" in os.environ:
    from smp.checkpoint import peers
    from smp.training.faults import copies
    file = open("copies" + os.environ["RANK"], "a", buffering=1)
    def timed(of, name):
        inner = getattr(of, name)
        def outer(*args, **more):
            began = time.thread_time()
            try:
                return inner(*args, **more)
            finally:
                file.write(f"{name} {time.thread_time() - began}\\n")
        setattr(of, name, outer)
    timed(copies.RunCopies, "make")
    timed(copies.RunCopies, "poll")
    timed(peers.PeerCopies, "_work")
    def due(self, iteration):
        file.write(f"step{iteration} {time.monotonic()}\\n")
        return iteration % 20 == 0
    copies.RunCopies.due = due
"""
"""First lines of a program: when steps end, what processor time copies take, and a copy every 20 steps."""


class Results:
    """Measurements by kind, also those of earlier calls.

    Args:
        path: of a file; None: nothing is kept.
        until: when nothing new is to begin.
    """

    def __init__(self, path: Path | None, until: float) -> None:
        self._path, self._until = path, until
        self.found: dict[str, list[dict[str, Any]]] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            kind, values = json.loads(line)
            self.found.setdefault(kind, []).append(values)

    def add(self, kind: str, values: dict[str, Any]) -> None:
        self.found.setdefault(kind, []).append(values)
        print(kind, {name: round(value, 4) for name, value in values.items() if isinstance(value, float)}, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([kind, values]) + "\n")

    def count(self, kind: str) -> int:
        return len(self.found.get(kind, ()))

    @property
    def over(self) -> bool:
        return time.monotonic() > self._until


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


def recoveries(times: int, folder: Path, results: Results) -> None:
    """One job at a time: others that train meanwhile would take its processors."""
    while not results.over and (count := min(map(results.count, KINDS))) < times:
        kind = next(kind for kind in KINDS if results.count(kind) == count)  # interleaved
        job = started(folder / f"{kind}{count}", KINDS[kind], 0.05)
        try:
            for _ in range(min(EACH, times - count)):
                job.reach(job.iteration + 6)
                if kind == "in process":
                    wait_until_ready(job)
                results.add(kind, recover(job, kind == "in process"))
        finally:
            job.close()
    table({kind: results.found.get(kind, []) for kind in KINDS})


def wait_until_ready(job: Job) -> list[int]:
    """Wait until each keeper holds a process ready; returns those."""
    job.until(lambda: all(len(children_of(keeper)) > 1 for keeper in job.workers(0)))
    ready = [children_of(keeper)[-1] for keeper in job.workers(0)]
    for pid in ready:
        wait_until_idle(pid)
    return ready


def wait_until_idle(pid: int) -> None:
    """Wait until a process that is held ready has imported what there is."""
    ticks, before = 0, -2
    while ticks > before + 1:
        time.sleep(1)
        before, ticks = ticks, _ticks(Path(f"/proc/{pid}/stat"))


def costs(times: int, folder: Path, results: Results) -> None:
    """By the clock, and by processor time as shares of that of the threads that train."""
    while not results.over and (count := results.count("cost")) < times:
        flags = f"{FLAGS} {INSIDE.format(BLOCK)} --global-batch-size 16"
        job = Job(folder / f"cost{count}", flags, 1, 1, step=0.0, each=2)
        (job.folder / "program.py").write_text(TIMED + (job.folder / "program.py").read_text())
        job.start()
        try:
            results.add("cost", cost_of(job))
        finally:
            job.close()
    found = results.found.get("cost", [])
    print(f"medians of {len(found)} runs:")
    for kind in found[0] if found else ():
        print(f"{kind:40} {statistics.median(run[kind] for run in found):.4f}")


def cost_of(job: Job) -> dict[str, float]:
    """Of one run: seconds of ten steps, and shares of them."""
    job.reach(3)
    ready = wait_until_ready(job)
    keepers, trainers = job.workers(0), job.trainers(0)

    def spent() -> dict[str, float]:
        own = {"keepers": used(keepers), "held ready": used(ready)}
        return own | {"main": used(trainers, "main"), "others": used(trainers, "others")}

    first = (job.iteration // (2 * BLOCK) + 1) * 2 * BLOCK
    job.reach(first)
    before, began = spent(), job.iteration
    job.reach(first + BLOCKS * BLOCK + 1)
    taken, steps = {kind: of_it - before[kind] for kind, of_it in spent().items()}, job.iteration - began
    share = {f"{kind}, share": taken[kind] / taken["main"] for kind in ("keepers", "held ready")}
    stop = thread = copies = 0.0
    ends: dict[int, float] = {}
    for path in sorted(job.folder.glob("copies*")):
        for word, value in (line.split() for line in path.read_text().splitlines() if line.count(" ") == 1):
            if word.startswith("step"):
                ends[int(word[4:])] = float(value)
            elif word == "_work":
                thread += float(value)
            else:
                stop, copies = stop + float(value), copies + (word == "make")
    ten_steps = BLOCK * taken["main"] / steps / len(trainers)  # of one process
    in_copies = len(trainers) * steps / (2 * BLOCK) * thread / copies  # of the other threads' time
    blocks = [ends[first + BLOCK * (n + 1)] - ends[first + BLOCK * n] for n in range(BLOCKS)]
    with_copy, without = blocks[::2], blocks[1::2]
    more = statistics.median(a / b - 1 for a, b in zip(with_copy, without, strict=True))
    return {
        "seconds of ten steps": statistics.median(without),
        "by the clock, share": more,
        "copies in training, share": stop / copies / ten_steps,
        "copies beside it, share": thread / copies / ten_steps,
        "other threads, share": (taken["others"] - in_copies) / taken["main"],
        **share,
    }


def used(pids: list[int], threads: str = "all") -> float:
    """Seconds of processor time of processes so far: of "all" threads, of the "main" ones, or of the "others", also of
    those that have ended."""
    ticks = 0
    for pid in pids:
        whole, main = (_ticks(Path(f"/proc/{pid}") / path) for path in ("stat", f"task/{pid}/stat"))
        ticks += {"all": whole, "main": main, "others": whole - main}[threads]
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(path: Path) -> int:
    """utime and stime, behind "pid (name)"."""
    return sum(map(int, path.read_text().rsplit(")", 1)[1].split()[11:13]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="failures of each kind")
    parser.add_argument("--cost", action="store_true", help="of a run in which nothing fails")
    parser.add_argument("--results", type=Path, help="file of results: new ones are added to those that it has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after that time")
    asked = parser.parse_args()
    results = Results(asked.results, time.monotonic() + asked.seconds)
    with tempfile.TemporaryDirectory() as folder:
        (costs if asked.cost else recoveries)(asked.times, Path(folder), results)


if __name__ == "__main__":
    main()
