"""Seconds from SIGKILL of a worker to the first new step, by phase: inside the process, and by a restart of torchrun
from the memory of nodes and from a file, in turn.

    python -m benchmarks.recovery --times 5

Two processes on this machine; each kind has a job of its own, which is struck four times before the next kind's turn.
Phases, each in seconds after the kill. By a restart: "detected", torchrun has seen it; "met", new worker processes
exist (torchrun has stopped the others and met again); "state", the copy or checkpoint is loaded (Python, torch, data
and model come before); "step", the first new step is logged. Inside the process: "detected", the other process has
noticed it; "let go", that has let go of groups and model; "met", both are there again; "state" and "step" as before.

    python -m benchmarks.recovery --cost --times 20

What the means of recovery cost while nothing fails, with a copy every 10 steps: processor time of making copies in the
thread that trains, of the threads that write them, of all other threads, of the keepers, and of the processes that are
held ready, as shares of the processor time of the thread that trains. (Other work on the machine changes that little;
by the clock two runs of which one has no copies differ by more than copies take.)
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
PHASES = ("detected", "let go", "met", "state", "step")
TRAINS = "trains"
_TOLD = re.compile(r"rank \d+: restart \d+ in process: after the loss let go ([\d.]+) s, all there ([\d.]+) s, state")
EACH = 4
"""Failures of one job, before the next kind has its turn."""
STEPS = 40
"""Of a run that is measured while nothing fails: with 4 copies."""
TIMED = """
import os, sys, time
if "SMP_KEEPER" in os.environ:
    from smp.checkpoint import peers
    from smp.training.faults import copies
    file = open("copies" + os.environ["RANK"], "a", buffering=1)
    def timed(of, name, word, clock):
        inner = getattr(of, name)
        def outer(*args, **more):
            began = clock()
            try:
                return inner(*args, **more)
            finally:
                file.write(f"{word} {clock() - began}\\n")
        setattr(of, name, outer)
    timed(copies.RunCopies, "make", "stop", time.thread_time)
    timed(copies.RunCopies, "poll", "stop", time.thread_time)
    timed(peers.PeerCopies, "_work", "thread", time.thread_time)
"""
"""First lines of a program: what processor time copies take."""


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
        before, ticks = ticks, _ticks(Path(f"/proc/{pid}/stat"))


def costs(times: int, folder: Path) -> None:
    """Processor time of copies, of the keepers, of the processes that are held ready, and of other threads, as shares
    of that of the threads that train."""
    shares: dict[str, list[float]] = {}
    for number in range(times):
        job = Job(
            folder / f"cost{number}", f"{FLAGS} {INSIDE.format(10)} --global-batch-size 16", 1, 1, step=0.0, each=2
        )
        (job.folder / "program.py").write_text(TIMED + (job.folder / "program.py").read_text())
        job.start()
        try:
            job.reach(6)
            job.until(lambda job=job: all(len(children_of(keeper)) > 1 for keeper in job.workers(0)))
            keepers, trainers = job.workers(0), job.trainers(0)
            ready = [children_of(keeper)[-1] for keeper in keepers]
            for pid in ready:
                wait_until_idle(pid)

            def spent(of: tuple[list[int], ...] = (keepers, ready, trainers), job: Job = job) -> dict[str, float]:
                stops, threads = zip(*(copies_of(path) for path in job.folder.glob("copies*")), strict=True)
                main, others = used(of[2], "main"), used(of[2], "others") - sum(threads)
                own = {"keepers": used(of[0]), "held ready": used(of[1]), "other threads": others}
                return {TRAINS: main, "copies, in training": sum(stops), "copies, beside it": sum(threads)} | own

            job.reach(job.iteration + 1)
            first, before = job.iteration, spent()
            job.reach(first + STEPS)
            taken = {kind: of_it - before[kind] for kind, of_it in spent().items()}
            trained = taken.pop(TRAINS)
            print(f"{1000 * trained / len(keepers) / (job.iteration - first):.0f} ms a step and rank:", end=" ")
            for kind, of_it in taken.items():
                shares.setdefault(kind, []).append(of_it / trained)
        finally:
            job.close()
        print({kind: f"{100 * found[-1]:.2f} %" for kind, found in shares.items()}, flush=True)
    for kind, found in shares.items():
        print(f"{kind:20} {100 * statistics.median(found):.2f} % of a step, median of {times}")
    print(f"{'together':20} {100 * statistics.median(map(sum, zip(*shares.values(), strict=True))):.2f} %")


def copies_of(path: Path) -> tuple[float, float]:
    """Seconds of processor time so far that copies took of the thread that trains, and of their own."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return tuple(sum(float(line[1]) for line in lines if line[0] == kind) for kind in ("stop", "thread"))  # type: ignore[return-value]


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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (costs if asked.cost else recoveries)(asked.times, Path(folder))


if __name__ == "__main__":
    main()
