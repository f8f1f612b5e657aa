"""How the tables of ``benchmarks/`` measure: times, ceilings, and the header that says of what."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("SMP_BENCHMARK_RESULTS", ROOT / "benchmarks" / "results"))
"""Where tables go; a check that they can be made writes them elsewhere."""


def commit() -> str:
    """Short name of the checkout's commit, with a + where files differ from it; unknown without git."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{name}{'+' * bool(changed)}" if name else "unknown"


def header(device: str) -> str:
    """Date, commit, versions and device of a table."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("triton", "transformers", "liger-kernel"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
        versions.append(f"CUDA {torch.version.cuda}")
    return f"{date.today()}, commit {commit()}, {', '.join(versions)}, {name}"


class Report:
    """A table, on the screen and in its file at the same time: a run that is cut short leaves the rows that it has."""

    def __init__(self, name: str, device: str) -> None:
        self.path = RESULTS / f"{name}_{'gpu' if device == 'cuda' else device}.txt"
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("")
        self.say(header(device))

    def say(self, line: str) -> None:
        """One more line."""
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def warm_up(run: Callable[[], object], groups: int) -> None:
    """Untimed calls before ``groups`` timed ones: three, or fewer where nothing but that it runs is asked."""
    for _ in range(min(3, groups)):
        run()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Median time of single calls with cold caches.

    Before each call a buffer larger than any cache is read and written (a CPU's zeroing goes around its caches), on a
    GPU so often that the device is busy for about a millisecond, while the host issues the call: events on a starved
    stream time the host.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        rounds: timed calls; three more come first.
    """

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self._buffer = torch.empty(256 << 20, dtype=torch.int8, device=device)

    def seconds(
        self,
        run: Callable[[], object],
        prepare: Callable[[], object] = lambda: None,
        pick: Callable[[list[float]], float] = statistics.median,
    ) -> float:
        """Median seconds of ``run``, or what else ``pick`` makes of them; ``prepare`` comes before each call and is not
        timed."""
        times = []
        for turn in range(self.rounds + 3):
            prepare()
            for _ in range(8 if self.device == "cuda" else 1):
                self._buffer.add_(1)
            elapsed = self._device_seconds(run) if self.device == "cuda" else self._host_seconds(run)
            if turn >= 3:
                times.append(elapsed)
        return pick(times)

    @staticmethod
    def _host_seconds(run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    @staticmethod
    def _device_seconds(run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def copy_bandwidth(clock: Clock) -> float:
    """Bytes per second, read and written, of a large copy, the fastest of several: the ceiling of everything that only
    moves memory."""
    size = (2 << 30) if clock.device == "cuda" else (256 << 20)
    source = torch.randint(0, 100, (size,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source), pick=min)


def product_rate(clock: Clock, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of random numbers into memory that is there, the fastest of several: what no training
    step exceeds."""
    a = torch.randn(rows, inner).to(clock.device, dtype)
    b, out = torch.randn(inner, columns).to(clock.device, dtype), torch.empty(rows, columns).to(clock.device, dtype)
    return 2 * rows * inner * columns / clock.seconds(lambda: torch.mm(a, b, out=out), pick=min)
