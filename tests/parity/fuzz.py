"""Random layouts of random problems against one rank: ``python -m tests.parity.fuzz --minutes 20``.

Each seed is a problem (``tests.parity.fuzz_cases``) and some chains of layouts, each of which has to train like one
rank: losses, gradient norms and every gradient of all steps, the validation loss, the first weights bit for bit and the
last ones; and every step has to change all that is trained. The exit code is 1 if a difference is left that nothing
explains.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from smp.config.rules.mtp import MTP_LOSS
from smp.models.auxiliary import DROPPED, EXPERT_LOAD, ROUTER_ENTROPY
from tests.distributed import run_distributed
from tests.parity.fuzz_cases import STEPS, Layout, Problem, draw, write_inputs
from tests.parity.result import TOLERANCE, tensor_errors
from tests.parity.table import FUZZ, PAGE, measured
from tests.parity.worker import fp64
from tests.training.tuning_lab import pretrain, together, tune

RUNS_PER_START = 12
_LOGGED = {"load balancing loss", "z loss", ROUTER_ENTROPY, DROPPED, MTP_LOSS}
SECTION = """## Random layouts against one process

Written by `make fuzz-parity MINUTES=n`, whose exit code is 1 if a difference has no reason. A seed draws a problem
(pretraining, SFT, LoRA or DPO; model, data, optimizer, schedule; four steps of eight samples) and chains of layouts; in
some each layout resumes what the one before has saved after one to three steps. Compared as above, in fp32 and with the
same bound: losses, gradient norms and all gradients (as the optimizer gets them) of every step, what routers and
further predictions log, validation losses, the first and the last weights; and every step has to change every parameter
that has a gradient.

Not compared, with the reason: bf16 (bounds of its own, see above); time and memory. Not seen as a difference: a key's
bias without RoPE adds the same to all scores of a query, so its gradient is rounding; A of an adapter whose B is still
zero has none. A balancing loss of experts that depends on the number of a step's micro-batches ([moe.md](moe.md)) is
compared with as many. Left out of the draw: pairs of DPO that are told apart after two steps, because loss and gradient
are then exp(-margin), whose relative error is the absolute one of a sum of a hundred log-probabilities (seed 19 on one
rank, another attention kernel: at a learning rate of 0.01 the loss falls to 0.0058, with errors of 5.7e-6 and, in a
gradient, 1.1e-5; at 0.001 to 0.20, with 1.2e-6 and 3.1e-6).

Rounding that training amplifies is told apart by fp64: where a chain differs by more than the bound, the problem is
also trained on one rank in fp64, and each measure of each step may differ by 4 times what one rank in fp32 differs from
that. Seed 90873 (GPT-2 style, eight layers of width 18, Adam with lr / eps = 1): in its fourth step a gradient of one
rank in fp32 is 3.2e-4 from fp64 and that of TP 2 3.3e-4, with 7.3e-6 and 8.5e-6 in the third; one rank with another
attention kernel differs by 2.7e-4 in fp32 and by 1.4e-13 in fp64. Such chains are counted, and are not in the table.
"""
AMPLIFIED = 4.0
"""How much further from one rank a layout may be than that is from fp64: both round, in different orders."""
Chain = tuple[Layout, ...]
Found = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One run of a chain.

    Attributes:
        problem, chain: whose.
        part: number of the layout in the chain.
        save: folder of the chain's checkpoints; None: nothing is saved.
    """

    problem: Problem
    chain: Chain
    part: int
    save: Path | None

    @property
    def flags(self) -> str:
        """The command line."""
        return self.problem.command(self.chain[self.part], self.save, self.part > 0)


def run_all(rank: int, world: int, tasks: list[tuple[bool, str]], folder: str, wide: bool = False) -> None:
    """Runs of one start, one after the other, in fp64 if ``wide``; ``<number>.<rank>`` holds what a rank saw."""
    for number, (pretrains, flags) in enumerate(tasks):
        logs = f"--log-dir {folder}/logs{number}"
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with silent[0], silent[1], fp64() if wide else contextlib.nullcontext():
            found = (pretrain if pretrains else tune)(rank, world, f"{flags} {logs}")
        part = Path(folder) / f"{number}.{rank}.part"
        torch.save(found, part)
        part.rename(part.with_suffix(""))  # a file under its final name is whole


def run_tasks(tasks: Sequence[Task], folder: Path, wide: bool = False) -> Iterator[tuple[Task, Found | str]]:
    """Each task with what it did, in fp64 if ``wide``, or why it failed. Tasks behind one that failed get another
    start."""
    left = sorted(tasks, key=lambda task: task.chain[task.part].world)
    starts = itertools.count()
    while left:
        world = left[0].chain[left[0].part].world
        batch = [task for task in left if task.chain[task.part].world == world][:RUNS_PER_START]
        place = folder / f"start{next(starts)}"
        place.mkdir(parents=True)
        failure = ""
        try:
            commands = [(task.problem.pretrains, task.flags) for task in batch]
            run_distributed(run_all, world, commands, str(place), wide, timeout=900)
        except RuntimeError as error:
            failure = str(error)
        for number, task in enumerate(batch):
            paths = [place / f"{number}.{rank}" for rank in range(world)]
            left.remove(task)
            if not all(path.exists() for path in paths):
                yield task, failure
                break
            try:
                yield task, together([torch.load(path, weights_only=False) for path in paths])
            except AssertionError as error:
                yield task, f"ranks disagree: {error}"
        shutil.rmtree(place)


def joined(parts: list[Found]) -> Found:
    """One run from those of a chain."""
    whole = dict(parts[-1])
    for name in ("losses", "norms", "more", "gradients", "moved"):
        whole[name] = [item for part in parts for item in part[name]]
    whole["initial"] = parts[0]["initial"]
    return whole


@dataclass
class Report:
    """What was found so far.

    Attributes:
        worst: by measure, the largest error and the command lines of the chain it is of.
        failures: what nothing explains.
        kinds: chains by kind of problem; ``runs`` counts their runs, and those of one rank.
        rounding: chains that differ as much as one rank in fp32 does from fp64, and by what.
    """

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    rounding: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    resumed: int = 0
    seeds: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def note(
        self,
        problem: Problem,
        chain: Chain,
        errors: dict[str, float],
        still: str,
        explained: Callable[[], bool] = lambda: False,
    ) -> None:
        """Count a chain and what it differs by; ``explained`` tells whether an error above the bound is rounding."""
        name = f"seed {problem.seed}, {problem.kind}: {problem.flags} || " + " -> ".join(
            f"{layout.world} ranks until {layout.until}: {' '.join(layout.flags.split())}" for layout in chain
        )
        self.kinds[problem.kind] += 1
        self.resumed += len(chain) > 1
        if still:
            self.failures.append(f"{still} does not change in {name}")
        large = {measure: f"{error:.1e}" for measure, error in errors.items() if not error <= TOLERANCE}
        if large and explained():
            self.rounding.append(f"{large} in {name}")
            return
        if large:
            self.failures.append(f"{large} in {name}")
        for measure, error in errors.items():
            if error >= self.worst.get(measure, (-1.0, ""))[0]:
                self.worst[measure] = error, name

    def table(self) -> str:
        """For the page and the terminal."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        runs = ", ".join(f"{number} on {world}" for world, number in sorted(self.runs.items()))
        lines = [
            f"{sum(self.kinds.values())} chains ({kinds}; {self.resumed} resume in other layouts), "
            f"{sum(self.runs.values())} runs ({runs} processes), "
            f"seeds {min(self.seeds)} to {max(self.seeds)}, "
            f"{(time.monotonic() - self.started) / 60:.0f} minutes; {len(self.failures)} differences without a reason.",
            *(f"Rounding: {text.partition(': --')[0]}." for text in self.rounding),
            "",
            "| measure | worst | seed |",
            "|---|---|---|",
            *(f"| {m} | {error:.1e} | {where.split(',')[0][5:]} |" for m, (error, where) in self.worst.items()),
        ]
        return "\n".join(lines)


def compare(got: Found, want: Found, same_micro_batches: bool = False) -> dict[str, float]:
    """Errors of a run against one rank's; see ``tests.parity.result``. Of what is logged that which routers and further
    predictions measure, the fullest expert's load with ``same_micro_batches`` only, on whose number it depends."""
    by_step = {name: max(errors, default=0.0) for name, errors in errors_by_step(got, want).items()}
    return by_step | _of_the_whole(got, want, same_micro_batches)


def relative(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Relative errors of ``xs``."""
    return [abs(x - y) / max(abs(y), 1e-30) for x, y in zip(xs, ys, strict=True)]


def errors_by_step(got: Found, want: Found) -> dict[str, list[float]]:
    """Of the losses, gradient norms and gradients of each step."""
    gradients = [
        max(tensor_errors(mine, theirs, theirs).values())
        for mine, theirs in zip(got["gradients"], want["gradients"], strict=True)
    ]
    losses, norms = relative(got["losses"], want["losses"]), relative(got["norms"], want["norms"])
    return {"loss": losses, "gradient norm": norms, "gradient": gradients}


def _of_the_whole(got: Found, want: Found, same_micro_batches: bool) -> dict[str, float]:
    errors: dict[str, float] = {}
    names = {*_LOGGED, EXPERT_LOAD} if same_micro_batches else _LOGGED
    logs = [[step[name] for step in run["more"] for name in sorted(names & step.keys())] for run in (got, want)]
    errors["log"] = max(relative(*logs), default=0.0)
    moved = {name: w.double() - want["initial"][name].double() for name, w in want["final"].items()}
    errors["weight"] = max(tensor_errors(got["final"], want["final"], moved).values())
    if want["validation"] is not None:
        errors["validation loss"] = relative([got["validation"][1]], [want["validation"][1]])[0]
    bits = all(torch.equal(got["initial"][name], tensor) for name, tensor in want["initial"].items())
    return errors | {"initial weights": 0.0 if bits else float("inf")}


def is_rounding(got: Found, want: Found, exact: Found) -> bool:
    """Whether a run differs from that of one rank as that one differs from fp64's, in each measure and each step: a
    wrong layout is wrong in the first steps as well, where rounding is small."""
    errors, own = errors_by_step(got, want), errors_by_step(want, exact)
    pairs = [pair for name in errors for pair in zip(errors[name], own[name], strict=True)]
    whole, own_whole = _of_the_whole(got, want, False), _of_the_whole(want, exact, False)
    pairs += [(whole[name], own_whole[name]) for name in whole if name != "initial weights"]
    return whole["initial weights"] == 0.0 and all(e <= max(TOLERANCE, AMPLIFIED * mine) for e, mine in pairs)


def without_change(got: Found, want: Found, first: int = 0) -> str:
    """A parameter that requires a gradient and that a step has left as it was.

    Args:
        got: a run.
        want: that of one rank. Where its gradient is rounding (a key's bias without RoPE, which adds the same to all
            scores of a query) or zero (A of an adapter whose B is zero) nothing has to change.
        first: the first step to look at; one of a warm-up has rate 0.
    """
    for step, moved in list(enumerate(got["moved"]))[first:]:
        for name in sorted(want["initial"].keys() - moved):
            gradient, weight = want["gradients"][step].get(name), want["initial"][name]
            if gradient is None or gradient.abs().max() > 1e-5 * weight.abs().max().clamp(min=1e-3):
                return f"{name} at step {step + 1}"
    return ""


def run_seeds(
    seeds: Sequence[int], inputs: Path, report: Report, worlds: tuple[int, ...], chains: int, experts: bool = False
) -> None:
    """Run, compare and report problems, many runs to a start."""
    problems = [draw(seed, inputs, worlds, chains, experts) for seed in seeds]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        parts: dict[tuple[int, Chain], list[Found] | str] = {}
        for part in range(max(len(chain) for problem in problems for chain in problem.chains)):
            tasks = [
                Task(problem, chain, part, folder / f"ck-{problem.seed}-{number}" if len(chain) > 1 else None)
                for problem in problems
                for number, chain in enumerate([(problem.alone,), *problem.chains])
                if len(chain) > part and not isinstance(parts.get((problem.seed, chain)), str)
            ]
            for task, found in run_tasks(tasks, folder / f"part{part}"):
                key = task.problem.seed, task.chain
                report.runs[task.chain[task.part].world] += 1
                known = parts.get(key, [])
                parts[key] = found if isinstance(found, str) or isinstance(known, str) else [*known, found]
        for problem in problems:
            report.seeds.append(problem.seed)
            _judge(problem, parts, report, partial(_in_fp64, problem, folder / f"exact{problem.seed}"))


@cache
def _in_fp64(problem: Problem, folder: Path) -> Found | str:
    """The problem on one rank, in fp64; once for all of its chains."""
    [(_, found)] = run_tasks([Task(problem, (problem.alone,), 0, None)], folder, wide=True)
    return found


def _judge(
    problem: Problem,
    parts: dict[tuple[int, Chain], list[Found] | str],
    report: Report,
    exact: Callable[[], Found | str] = lambda: "",
) -> None:
    alone = parts[problem.seed, (problem.alone,)]
    if isinstance(alone, str):
        report.failures.append(f"seed {problem.seed}, {problem.kind}: {problem.flags} on one rank: {alone}")
        return
    want, first = alone[0], int("warmup" in problem.flags)
    assert len(want["losses"]) == STEPS
    if still := without_change(want, want, first):
        report.failures.append(f"{still} does not change on one rank: seed {problem.seed}: {problem.flags}")
    for chain in problem.chains:
        found = parts[problem.seed, chain]
        if isinstance(found, str):
            report.failures.append(f"seed {problem.seed}, {problem.flags} || {chain}: {found}")
        else:
            got = joined(found)
            errors = compare(got, want, problem.micro_batches is not None)
            still = without_change(got, want, first)

            def explained(got: Found = got) -> bool:
                truth = exact()
                return not isinstance(truth, str) and is_rounding(got, want, truth)

            report.note(problem, chain, errors, still, explained)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="start nothing new after so long (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow it (default: 0)")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--problems", type=int, default=8, help="seeds at a time (default: 8)")
    parser.add_argument("--chains", type=int, default=3, help="for each seed (default: 3)")
    parser.add_argument("--experts", action="store_true", help="only pretraining of models with experts")
    parser.add_argument("--page", action="store_true", help="write the result into docs/parity.md")
    args = parser.parse_args(argv)
    report, seed = Report(), args.seed
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        while not report.seeds or time.monotonic() - report.started < 60 * args.minutes:
            seeds, known = range(seed, seed + args.problems), len(report.failures)
            run_seeds(seeds, Path(folder), report, tuple(args.worlds), args.chains, args.experts)
            seed += args.problems
            print("\n".join(report.failures[known:]))
            worst = ", ".join(f"{measure} {error:.1e}" for measure, (error, _) in report.worst.items())
            print(
                f"seeds {seeds[0]} to {seeds[-1]}: {sum(report.kinds.values())} chains so far, worst {worst}",
                flush=True,
            )
    print(report.table())
    if args.page:
        page = PAGE.read_text(encoding="utf-8").partition(FUZZ)[0].rstrip("\n")
        PAGE.write_text(f"{page}\n\n{FUZZ}\n\n{SECTION}\n{measured()}\n{report.table()}\n", encoding="utf-8")
    print("\n".join(f"worst {measure}: {where}" for measure, (_, where) in report.worst.items()))
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
