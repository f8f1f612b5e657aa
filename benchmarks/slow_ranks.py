"""Record the times of a quiet run, and count how often --log-straggler names a rank that sleeps, and one that does not.

    python benchmarks/slow_ranks.py --ranks 4 --steps 1000 --sleeps 200

Runs ``pretrain_gpt.py --log-straggler`` with torchrun, keeps what all ranks took for their own computation, for their
data, and without a processor, and counts who is named for each. Being named for own computation is a false alarm; on a
machine with more to do than processors ranks do wait for one. Then, so many times, a random rank sleeps 50 to 500 ms in
each of 20 steps from a random one on: the times are the recorded ones, the sleep is added to own computation. Named
right is the rank within these 20 steps, and no other but those that are named without the sleep.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from smp.training.reporting.slow_ranks import KINDS
from smp.training.reporting.stragglers import WINDOW, Detector, Numbers

FLAGS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 64 --micro-batch-size 2 --log-interval 100 --no-tensorboard --no-progress-bar --log-straggler"
)


def worker(argv: list[str]) -> int:
    """One rank of the run; rank 0 keeps the times."""
    import pretrain_gpt
    from smp.training.reporting.slow_ranks import SlowRanks

    kept: list[Numbers] = []
    compare = SlowRanks._compare

    def keep(self: Any, iteration: int, times: Numbers) -> None:
        kept.append(times.copy())
        compare(self, iteration, times)

    SlowRanks._compare = keep  # type: ignore[method-assign]
    code = pretrain_gpt.main(argv[1:])
    if kept:
        np.save(argv[0], np.concatenate(kept, axis=1))
    return code


def named(times: Numbers, of: Numbers) -> list[tuple[int, int]]:
    """(window, rank) of all findings in times (steps, ranks), as a run has them; ``of``: those of own computation."""
    detector, found = Detector([0] * times.shape[1]), list[tuple[int, int]]()
    for i in range(len(times) // WINDOW):
        window = slice(WINDOW * i, WINDOW * (i + 1))
        usual = np.full(times.shape[1], np.median(of[window]))
        found += [(i, finding.rank) for finding in detector.slow(times[window], usual)]
    return found


def named_right(times: Numbers, draw: np.random.Generator) -> bool:
    """Whether a rank that sleeps is named, and no other."""
    steps, ranks = times.shape
    rank, start = int(draw.integers(ranks)), int(draw.integers(2 * WINDOW, steps - 20))
    slept = times.copy()
    slept[start : start + 20, rank] += draw.uniform(0.05, 0.5)
    more = sorted(set(named(slept, slept)) - set(named(times, times)))
    return bool(more) and {one for _, one in more} == {rank} and WINDOW * (more[0][0] + 1) <= start + 20


def record(args: argparse.Namespace, path: Path, folder: str) -> int:
    """A quiet run, whose times go to ``path``; returns the exit code."""
    flags = f"{FLAGS} --global-batch-size {2 * args.ranks} --train-iters {args.steps} --log-dir {folder}/logs"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    words += [__file__, "--worker", str(path), *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    return done.returncode


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        return worker(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sleeps", type=int, default=200)
    parser.add_argument("--times", type=Path, help="file of recorded times: made if it is not there, else read")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.times or Path(folder, "times.npy")
        if not path.exists() and (code := record(args, path, folder)):
            return code
        kinds = np.load(path)  # (kinds, steps, ranks)
    times = kinds[0]
    median, noise = np.median(times), 1.4826 * np.median(np.abs(times - np.median(times, axis=0)))
    draw = np.random.default_rng(1)
    right = sum(named_right(times, draw) for _ in range(args.sleeps))
    load = os.getloadavg()[0]
    print(f"own computation: median {1000 * median:.1f} ms, noise {100 * noise / median:.1f} %, load {load}")
    for kind, numbers in zip(KINDS, kinds, strict=True):
        found, share = len(named(numbers, times)), numbers.mean() / times.mean()
        print(
            f"named in {len(times)} quiet steps of {args.ranks} ranks for {kind} ({100 * share:.0f} %): {found} times"
        )
    print(f"ranks that slept 50 to 500 ms in 20 steps, named right: {right} of {args.sleeps}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
