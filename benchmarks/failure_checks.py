"""What injected failures have cost and changed, for ``benchmarks.failures``.

    python -m benchmarks.failure_checks FOLDER

adds up what all runs of that folder have written, and trains once more, with one process and with as many as there
were, without a failure. Every loss and gradient norm that any start has logged, and weights and moments of every
checkpoint, are compared with theirs.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.plain_reader import read_checkpoint
from tests.training.elastic_lab import Job

NODES, BOUND, LONG, RECORDS = 3, 1e-6, 60.0, "failures.jsonl"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 17 --init-method-std 0.2 --hidden-dropout 0.1 --global-batch-size 4 --micro-batch-size 1 "
    "--log-interval 1 --optimizer sgd --lr 0.02 --lr-decay-style constant --no-tensorboard --no-progress-bar "
    "--log-dir logs"
)


@dataclass(frozen=True)
class Record:
    """One failure.

    Attributes:
        kind: how the run goes on after it.
        seconds, still, starved, again: see ``benchmarks.failures.Struck``.
        error: why the job did not go on; empty: it did.
    """

    kind: str
    job: str
    what: str
    part: str
    victims: tuple[int, ...]
    seconds: float
    still: float
    starved: float = 0.0
    again: int = 0
    error: str = ""

    def __str__(self) -> str:
        at = ", ".join(map(str, self.victims))
        cost = self.error or f"{self.seconds:.0f} s, {self.again} steps again, {self.still:.0f} s without a step"
        cost += f" ({self.starved:.0f} of them without a processor)" if self.starved > 1 else ""
        return f"{self.job}, {self.kind}: {self.what} in {self.part} at {at}: {cost}"


def logged(folder: Path) -> list[dict[str, Any]]:
    """Records of the steps of all starts; steps that were trained twice are there twice."""
    found = []
    for path in folder.glob("logs/metrics*.jsonl"):  # of steps that were lost, too
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut off by a kill
                record = json.loads(line)
                if "lm loss" in record:
                    found.append(record)
    return found


def compare(jobs: list[Path], quiet: Path) -> dict[str, Any]:
    """Losses and gradient norms of all steps, and weights and moments of all checkpoints, with those of one process and
    of as many processes that nobody disturbs. Numbers by what was compared: how many, how many of them differ by more
    than the bound from one process, the worst relative difference, and how many have other bits than as many processes.
    """
    steps = [record for folder in jobs for record in logged(folder)]
    saved = [path.parent for folder in jobs for path in sorted(folder.glob("ck/iter_*/manifest.json"))]
    last = max([record["iteration"] for record in steps] + [int(path.name[5:]) for path in saved])
    alone, three = (
        _undisturbed(quiet / str(n), f"{FLAGS} --save ck --save-interval 1 --train-iters {last}", n) for n in (1, NODES)
    )
    found = {}
    for name in ("lm loss", "grad norm"):
        one, many = ({record["iteration"]: record[name] for record in logged(folder)} for folder in (alone, three))
        pairs = [(record[name], one[record["iteration"]], many[record["iteration"]]) for record in steps]
        found[name] = _numbers([(abs(got - want) / abs(want), got == same) for got, want, same in pairs])
    found["weights, moments"] = _numbers([_difference(path, alone, three) for path in saved])
    return found


def _undisturbed(folder: Path, flags: str, processes: int) -> Path:
    if folder.exists():
        return folder
    job = Job(folder, flags, 1, 1, step=0, each=processes)
    try:
        job.start()
        assert job.finish(3600) == [0], job.said()
    finally:
        job.close()
    return folder


def _difference(path: Path, alone: Path, three: Path) -> tuple[float, bool]:
    got, want, same = (
        read_checkpoint(folder)[0] for folder in (path, alone / "ck" / path.name, three / "ck" / path.name)
    )
    assert got.keys() == want.keys() == same.keys()
    worst = max(float(np.abs(got[key] - want[key]).max() / max(np.abs(want[key]).max(), 1e-30)) for key in want)
    return worst, all(np.array_equal(got[key], same[key]) for key in want)


def _numbers(pairs: list[tuple[float, bool]]) -> dict[str, float]:
    return {
        "compared": len(pairs),
        "different": sum(not worst <= BOUND for worst, _ in pairs),
        "worst": max((worst for worst, _ in pairs), default=0.0),
        "other bits": sum(not same for _, same in pairs),
    }


def tell(records: list[Record], compared: dict[str, dict[str, float]]) -> None:
    """Print it."""
    gone_on = [record for record in records if not record.error]
    print(f"failures: {len(records)}, did not go on: {len(records) - len(gone_on)}")
    groups: list[tuple[str, Callable[[Record], str]]] = [
        ("", lambda record: f"{record.kind}: {record.what}"),
        ("in ", lambda record: record.part),
        ("at once: ", lambda record: str(len(record.victims))),
    ]
    for title, name_of in groups:
        for name in sorted({name_of(record) for record in gone_on}):
            found = [record for record in gone_on if name_of(record) == name]
            print(f"{title}{name}: {_spread(found)}")
    for name, numbers in compared.items():
        print(
            f"{name}: {numbers['compared']} compared, {numbers['different']} different, worst {numbers['worst']:.1e}, "
            f"other bits than {NODES} processes: {numbers['other bits']}"
        )


def _spread(found: list[Record]) -> str:
    seconds = sorted(record.seconds for record in found)
    again = Counter(record.again for record in found)
    return (
        f"{len(found)}, s: median {statistics.median(seconds):.0f}, 90th {seconds[int(0.9 * (len(found) - 1))]:.0f}, "
        f"worst {seconds[-1]:.0f}, {sum(s > LONG for s in seconds)} above {LONG:.0f}; without a step at most "
        f"{max(record.still for record in found):.0f}; steps again: {dict(sorted(again.items()))}"
    )


def main() -> None:
    folder, records = Path(sys.argv[1]), []
    for path in sorted(folder.glob(f"*/{RECORDS}")):
        for line in path.read_text().splitlines():
            each = json.loads(line)
            records.append(Record(**{**each, "victims": tuple(each["victims"])}))
    jobs = [path.parent for path in folder.glob("*/*/program.py") if path.parent.parent.name != "quiet"]
    tell(records, compare(jobs, folder / "quiet"))


if __name__ == "__main__":
    main()
