"""``make gpu``: everything that a GPU is needed for, with this python and nothing installed, in parts.

Builds the CUDA C++ kernels where nvcc is, runs the tests marked ``gpu``, layouts of several processes on the one card
among them, and writes the tables of a step's parts, of experts, of kernels, of training beside other programs, of
blocks, and of memory with a profile trace to ``benchmarks/results/``; last, where the toolkit is, it looks over the
kernels with compute-sanitizer. A part that fails does not keep the others from running; the exit code tells.

A GPU is often there for minutes. ``make gpu MINUTES=8`` begins with the parts that have not run on this code (the
sources' contents, not the commit, which tables change, too), then those that fell; starts none that it has no time for;
ends one whose time is up; and the next call goes on. A part's tables come to ``benchmarks/results/`` when it has ended
well, what another one wrote lies in ``benchmarks/results/fallen/``. The last lines say of every part what it did.

``make gpu-check`` is the same without a GPU: the tests are collected, by one process, layouts run on the processor,
kernels are compiled for a GPU ahead of time, and every table is made of small sizes, into a folder of its own. It says
what it leaves out.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARGIN = 10.0
"""Seconds of MINUTES that are left for the end."""
PYTEST = ("-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider")
MARKER = "pytest.mark.gpu"
COLLECT = ("-m", "pytest", "-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """Something that a GPU is needed for.

    Attributes:
        name: of the part.
        words: what python is given.
        seconds: that it takes on an H100, about.
        check: what stands for it without a GPU, by the same python; empty: nothing, but that tests are collected.
        workers: of pytest, where xdist is installed: most of a test is the host's time, imports and compilers.
    """

    name: str
    words: tuple[str, ...]
    seconds: int
    check: tuple[str, ...] = ()
    workers: int = 0


def _tests(name: str, seconds: int, *files: str, workers: int = 6, check: tuple[str, ...] = ()) -> Part:
    return Part(f"tests: {name}", (*PYTEST, *files), seconds, check, workers)


def files_with_marker(root: Path = ROOT) -> list[str]:
    """Files of tests marked ``gpu``, but for those of ``tests/gpu``, of which each has a part: to collect all tests
    takes as long as it takes to run these."""
    found = sorted((root / "tests").rglob("test_*.py"))
    marked = [path.relative_to(root) for path in found if MARKER in path.read_text()]
    return [str(path) for path in marked if not path.is_relative_to("tests/gpu")]


def _table(name: str, seconds: int, file: str, *options: str, small: tuple[str, ...] | None = None) -> Part:
    words = (f"benchmarks/{file}.py", "--device")
    checked = () if small is None else (*words, "cpu", *small)
    return Part(f"table: {name}", (*words, "cuda", *options), seconds, checked)


_COMPILED = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/kernels/test_triton.py", "-k", "compile")
_ON_CPU = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/test_one_card.py")
_ONE_STEP = ("--steps", "1", "--groups", "1", "--only", "bf16")
_LAYOUTS = ("tests/gpu/test_layouts.py", "tests/hf/test_one_card.py")
_FEATURES, _EXPERTS = "tests/gpu/test_features.py", "::test_compiled_experts_are_as_on_a_cpu"
PARTS = [
    Part("CUDA C++ kernels", ("-m", "smp.kernels.cuda.build"), 60),
    _tests("compiled experts", 60, _FEATURES + _EXPERTS),
    _tests("layouts on one card", 150, *_LAYOUTS, workers=0, check=_ON_CPU),
    _tests("kernels", 60, "tests/gpu/test_kernels.py", "tests/gpu/test_fp8.py", check=_COMPILED),
    _tests("features", 90, _FEATURES, f"--deselect={_FEATURES}{_EXPERTS}"),
    _tests("runs and steps", 60, "tests/gpu/test_pretrain.py", "tests/gpu/test_step.py"),
    _tests("others", 60, *(name for name in files_with_marker() if name not in _LAYOUTS)),
    _table("a step's parts", 45, "step_profile", small=("--rounds", "1")),
    _table("experts", 135, "moe", small=("--repeats", "1", "--groups", "1")),
    _table("kernels", 100, "kernels", small=("--rounds", "1")),
    _table("training, 8B shape", 250, "training_table", "--only", "llama3-8b", small=_ONE_STEP),
    _table("blocks", 60, "blocks", small=("--repeats", "1", "--groups", "1")),
    _table("training, 1B shape", 180, "training_table", "--only", "llama3.2-1b"),
    _table("memory and traces", 180, "gpu_memory", small=()),
    Part("compute-sanitizer", ("benchmarks/sanitize.py",), 240),
]
"""In the order in which they run: short ones that answer a question first."""
LEFT_OUT = (
    "left out without a GPU: the CUDA C++ kernels' build, compute-sanitizer, every test marked gpu (collected only; "
    "layouts run on the processor), Triton's kernels but for their compilation, NCCL (make gpu-multi), all times and "
    "all figures of device memory"
)


@dataclass(frozen=True)
class Outcome:
    """How a part ended, the last time.

    Attributes:
        code: of the sources it ran on.
        end: passed, fell, or cut (its time was up).
        seconds: that it took.
        device, day: where and when.
        fallen: tests that failed.
    """

    code: str
    end: str
    seconds: float
    device: str
    day: str
    fallen: tuple[str, ...] = ()


def code_of_sources(root: Path = ROOT) -> str:
    """Of all that a part runs: any change of a file is another one."""
    digest = hashlib.sha256()
    folders = [root / name for name in ("smp", "tests", "tools", "benchmarks")]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".j2")]
    for path in sorted([*found, *root.glob("*.py"), *root.glob("pyproject.toml")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def known(results: Path) -> dict[str, Outcome]:
    """What earlier calls noted, by part."""
    path = results / "gpu_parts.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: Outcome(**{**row, "fallen": tuple(row["fallen"])}) for name, row in rows.items()}


def note(results: Path, outcomes: dict[str, Outcome]) -> None:
    """Likewise, whole or not at all."""
    results.mkdir(parents=True, exist_ok=True)
    new = results / ".gpu_parts.json"
    new.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1) + "\n")
    new.replace(results / "gpu_parts.json")


def in_order(parts: Sequence[Part], outcomes: dict[str, Outcome], code: str) -> list[Part]:
    """Those that did not run on this code, then those that did not end well, then the others."""

    def turn(part: Part) -> int:
        outcome = outcomes.get(part.name)
        return 0 if outcome is None or outcome.code != code else 2 if outcome.end == "passed" else 1

    return sorted(parts, key=turn)


def needed(part: Part, outcomes: dict[str, Outcome]) -> float:
    """Seconds that it will take: as the last time that it ended by itself, else the estimate."""
    outcome = outcomes.get(part.name)
    return part.seconds if outcome is None or outcome.end == "cut" else outcome.seconds


def run_part(words: Sequence[str], limit: float | None, results: Path, **environment: str) -> tuple[str, list[str]]:
    """(How it ended, the tests that failed.) Its tables come to ``results`` when it ended well."""
    results.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=results, prefix=".running-") as folder:
        tests = Path(folder, "tests.xml")
        words = [*words, f"--junitxml={tests}"] if "pytest" in words and "--collect-only" not in words else words
        told = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "SMP_BENCHMARK_RESULTS": folder, **environment}
        print("+ python", *words, flush=True)
        # A session of its own: what it started ends with it.
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, **told}, start_new_session=True
        )
        try:
            end = "fell" if process.wait(limit) else "passed"
        except subprocess.TimeoutExpired:
            end = "cut"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        fallen = failed_tests(tests)
        tests.unlink(missing_ok=True)
        _keep(Path(folder), results if end == "passed" else results / "fallen")
    return end, fallen


def failed_tests(report: Path) -> list[str]:
    """Of a file of pytest's."""
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def _keep(folder: Path, target: Path) -> None:
    """Move what is in ``folder``, over what was there."""
    for path in sorted(folder.iterdir()):
        target.mkdir(parents=True, exist_ok=True)
        if (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)


class Session:
    """One call: runs parts until they end or its time does.

    Args:
        parts: all of them.
        minutes: that it has; None: as long as it takes, and parts that have passed run again.
        device: what it runs on.
        results: where tables and outcomes go.
        run: what runs a part within a limit, :func:`run_part`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        minutes: float | None,
        device: str,
        results: Path = RESULTS,
        run: Callable[..., tuple[str, list[str]]] = run_part,
    ) -> None:
        self.parts, self.device, self.results, self._run = list(parts), device, results, run
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes - MARGIN
        self.code, self.outcomes = code_of_sources(), known(results)
        self.said: dict[str, str] = {}

    def left(self) -> float | None:
        """Seconds; None: no end."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def run(self) -> int:
        """All that there is time for; 1 if a part did not end well."""
        for part in in_order(self.parts, self.outcomes, self.code):
            before, left = self.outcomes.get(part.name), self.left()
            done = before is not None and before.code == self.code and before.end == "passed"
            if left is not None and done:
                self.said[part.name] = "passed before, on this code"
            elif left is not None and needed(part, self.outcomes) > left:
                self.said[part.name] = f"not run: {left:.0f} s were left"
            else:
                self._run_one(part, left)
        print("\n".join(self.table()), flush=True)
        return int(any(said.startswith(("fell", "cut")) for said in self.said.values()))

    def _run_one(self, part: Part, left: float | None) -> None:
        started = time.monotonic()
        end, fallen = self._run(with_workers(part), left, self.results)
        seconds = round(time.monotonic() - started, 1)
        made = Outcome(self.code, end, seconds, self.device, str(date.today()), tuple(fallen))
        self.outcomes[part.name] = made
        note(self.results, self.outcomes)
        self.said[part.name] = end

    def table(self) -> list[str]:
        """Of each part what this call did with it, what it takes and took, and below the tests that failed."""
        lines = [f"\n{'part':30s}{'about s':>9s}{'took s':>9s}  what became of it, on code {self.code}"]
        for part in self.parts:
            outcome = self.outcomes.get(part.name)
            here = outcome is not None and outcome.code == self.code
            took = f"{outcome.seconds:9.1f}" if here and outcome is not None else f"{'-':>9s}"
            where = f" ({outcome.device}, {outcome.day})" if here and outcome is not None else ""
            lines.append(f"{part.name:30s}{part.seconds:9d}{took}  {self.said.get(part.name, 'not run')}{where}")
            lines += [f"    fell: {test}" for test in outcome.fallen] if here and outcome is not None else []
        return lines


def with_workers(part: Part) -> tuple[str, ...]:
    """A part's words, for pytest with as many workers as it takes and the machine has."""
    workers = min(part.workers, os.cpu_count() or 1)
    several = workers > 1 and importlib.util.find_spec("xdist") is not None
    # Tests that fill the card are one group: one process runs them, one after the other.
    return (*part.words, "-n", str(workers), "--dist", "loadgroup") if several else part.words


def on_gpu() -> list[Part]:
    """The parts that this machine can run; says what it cannot."""
    from smp.kernels.cuda.build import nvcc_path

    if nvcc_path() is not None:
        return PARTS
    print("no nvcc: the CUDA C++ kernels are not built, and their tests and rows are left out", flush=True)
    return PARTS[1:]


def device_name() -> str:
    """Of the card; asked in a process of its own, which gives back what it takes of the card."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def checks(parts: Sequence[Part]) -> list[Part]:
    """What stands for ``parts`` without a GPU. All tests are collected by one process: most of the time goes to
    imports."""
    length = len(PYTEST)
    words = [word for part in parts if part.words[:length] == PYTEST for word in part.words[length:]]
    files = dict.fromkeys(word for word in words if not word.startswith("--"))
    made = [replace(part, words=part.check, workers=0) for part in parts if part.check]
    return [Part("tests: collected", (*COLLECT, *files), 60), *made]


def check() -> int:
    """What can be checked of every part without a GPU; 1 if one fell."""
    parts = checks(PARTS)
    with TemporaryDirectory() as folder:
        run = lambda *given: run_part(*given, CUDA_VISIBLE_DEVICES="")  # noqa: E731
        fell = Session(parts, None, "no GPU", Path(folder), run).run()
    print(LEFT_OUT)
    return fell


def main() -> int:
    """Run the parts in order; 1 if one fell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="without a GPU: what can be checked of every part")
    parser.add_argument("--minutes", type=float, help="that there are; by default as many as it takes")
    parser.add_argument("--only", default="", help="parts whose name contains this, such as 'layouts' or 'table'")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part ends with this process
    if arguments.check:
        return check()
    parts = [part for part in on_gpu() if arguments.only in part.name]
    return Session(parts, arguments.minutes, device_name()).run()


if __name__ == "__main__":
    sys.exit(main())
