"""Seconds from SIGKILL of a worker to the first new step, by phase: from the memory of nodes and from a file, in turn.

    python -m benchmarks.recovery --times 5

Two nodes (torchruns) of one process on this machine; torchrun starts the workers again in both cases, so what differs
is where the state comes from. Phases: "detected", torchrun has seen it; "started", new worker processes exist (torchrun
has stopped the others and met with the other node); "state", the checkpoint or copy is loaded (Python, torch, data and
model come before); "step", the first new step is logged.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.training.elastic_lab import Job

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000 --mock-data --seq-length 128 "
    "--global-batch-size 4 --train-iters 1000000 --lr-decay-style constant --log-interval 1 --no-tensorboard "
    "--no-progress-bar --log-dir logs --distributed-timeout-minutes 1"
)
KINDS = {
    "memory": "--peer-snapshot-interval 2",
    "file": "--save ck --load auto --save-interval 2 --keep-last-k 2",
}
PHASES = ("detected", "started", "state", "step")


def recover(job: Job) -> dict[str, float]:
    """Kill a worker of the second node; seconds until each phase is over."""
    before, mark = job.iteration, job.mark()
    job.kill_worker(1)
    killed = time.monotonic()
    old = set(job.workers(1)) | set(job.workers(0))

    out = {}
    waits = {
        "detected": lambda: "exitcode: -9" in job.since(mark),
        "started": lambda: all(w and not set(w) & old for w in (job.workers(0), job.workers(1))),
        "state": lambda: "resumed from" in job.since(mark),
        "step": lambda: job.iteration > before,
    }
    for phase, done in waits.items():
        job.until(done)
        out[phase] = time.monotonic() - killed
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="failures of each kind")
    times = parser.parse_args().times
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(times):
            for kind, flags in KINDS.items():  # interleaved
                job = Job(Path(folder, f"{kind}{number}"), f"{FLAGS} {flags}", 2, 2, step=0.05)
                try:
                    job.start(2)
                    job.reach(6)
                    found[kind].append(recover(job))
                    print(kind, {phase: round(seconds, 2) for phase, seconds in found[kind][-1].items()}, flush=True)
                finally:
                    job.close()
    print(f"{'seconds after SIGKILL, medians of ' + str(times):40}" + "".join(f"{phase:>12}" for phase in PHASES))
    for kind, runs in found.items():
        medians = (statistics.median(run[phase] for run in runs) for phase in PHASES)
        print(f"{kind:40}" + "".join(f"{median:12.2f}" for median in medians))


if __name__ == "__main__":
    main()
