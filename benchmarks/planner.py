"""Predicted beside measured steps of 24 small layouts on this machine's processor, in one, two and four processes.

    PYTHONPATH=. python benchmarks/planner.py            # two cores that do nothing else; minutes; writes its table
    PYTHONPATH=. python benchmarks/planner.py --processes 2 --rows rows.json    # part of it; the others' rows are kept

Every operator and collective of every layout is timed and steps are summed from that (``smp/planner/measured.py``).
Calibrations and steps take turns, so that what else the machine does hits both: each round times all calls, then three
steps of each layout. Predicted is from the median over rounds of each call's time, measured the median of all steps in
which no process waited for a processor for more than 1 % (where there are as many processors; else of all steps).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from timing import Report

from smp.config import Layout
from smp.models.presets import PRESETS
from smp.planner.machine import (
    StepSeconds,
    Timed,
    TrainingRun,
    kind_of,
    machine_times,
    run_processes,
    slowest,
    small_settings,
    time_calls,
    timed_calls,
    typical,
)
from smp.planner.measured import Recorded, step_time
from smp.training.settings import read_settings

MODEL = (
    "--num-layers 4 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 6 --num-query-groups 2 "
    "--seq-length 256 --vocab-size 4000 --mock-data --train-iters 999 --global-batch-size 4 --no-tensorboard "
    "--no-progress-bar "
)
TP, PP, CP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
EXPERTS = "--micro-batch-size 2 --num-experts 4 --moe-router-topk 2"
LAYOUTS: dict[int, list[str]] = {
    1: [
        "",
        "--micro-batch-size 4",
        "--micro-batch-size 2 --recompute-granularity full",
        "--micro-batch-size 2 --bf16",
        EXPERTS,
    ],
    2: [
        "",
        "--micro-batch-size 2",
        "--micro-batch-size 2 --recompute-granularity selective",
        "--data-parallel-sharding-strategy optim_grads",
        "--data-parallel-sharding-strategy optim",
        f"--micro-batch-size 4 {TP}",
        f"--micro-batch-size 2 {TP} --sequence-parallel",
        PP,
        f"{PP} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        f"{PP} --pipeline-schedule zb-h1",
        f"--micro-batch-size 2 {CP} --cp-comm-type p2p",
        f"--micro-batch-size 2 {CP} --cp-comm-type all_gather",
        EXPERTS,
        f"{EXPERTS} --expert-model-parallel-size 2",
    ],
    4: [
        "",
        f"{TP} --sequence-parallel",
        PP,
        f"{CP} --cp-comm-type p2p",
        f"{EXPERTS} --global-batch-size 8 --expert-model-parallel-size 2",
    ],
}
STEPS = 3
"""Of each layout and round."""
Times = dict[Timed, float]
Step = tuple[float, float]
"""Seconds that it took, and that this process waited for a processor in them."""


def recorded(flags: str, processes: int) -> Recorded:
    """What a layout's steps call."""
    config = read_settings(shlex.split(MODEL + flags), PRESETS, processes)
    return Recorded.of(config, Layout.from_config(config.parallel, processes))


def small_model(kind: str, processes: int) -> Recorded:
    """That of the model whose step is largely the host's time."""
    config = small_settings(kind, processes)
    return Recorded.of(config, Layout.from_config(config.parallel, processes))


def measure(
    rank: int, processes: int, wanted: Sequence[Timed], kinds: Sequence[str], flags: Sequence[str], rounds: int
) -> tuple[list[Times], dict[str, list[StepSeconds]], list[list[Step]], float]:
    """In turns: seconds of each call, of steps of the small models, and of steps of each layout; and what a calibration
    took."""
    configs = [read_settings(shlex.split(MODEL + line), PRESETS, processes) for line in flags]
    small = {kind: TrainingRun(small_settings(kind, processes), rank, processes, kind) for kind in kinds}
    runs = [TrainingRun(config, rank, processes, str(i)) for i, config in enumerate(configs)]
    calls, host, steps, took = (
        list[Times](),
        {kind: list[StepSeconds]() for kind in kinds},
        [list[Step]() for _ in runs],
        0.0,
    )
    for _ in range(rounds):
        started = time.perf_counter()
        calls.append(time_calls(wanted))
        for kind, run in small.items():
            host[kind] += [run.step() for _ in range(5)]
        took = time.perf_counter() - started
        for run, seconds in zip(runs, steps, strict=True):
            seconds += [timed_step(run) for _ in range(STEPS)]
    return calls, host, steps, took


def timed_step(run: TrainingRun) -> Step:
    """Seconds of a step, and of them those in which this process waited for a processor (as Linux counts them)."""
    before = processor_waits()
    seconds = run.step().clock
    return seconds, processor_waits() - before


def processor_waits() -> float:
    """Seconds so far in which this thread could have run and did not."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def undisturbed(ranks: Sequence[Sequence[Step]], processes: int) -> list[float]:
    """Seconds of the steps in which all processes had a processor; of all steps where there are none."""
    steps = [(seconds, max(wait for _, wait in step)) for step in zip(*ranks, strict=True) for seconds in [step[0][0]]]
    enough = processes <= len(os.sched_getaffinity(0))
    return [s for s, wait in steps if enough and wait <= 0.01 * s] or [seconds for seconds, _ in steps]


def median_of(rounds: Sequence[Times]) -> Times:
    """Of each call, over the rounds."""
    return {call: statistics.median(times[call] for times in rounds) for call in rounds[0]}


def compare(processes: int, rounds: int, report: Report) -> dict[str, tuple[float, float]]:
    """(predicted, measured) seconds of each layout of so many processes."""
    lines = LAYOUTS[processes]
    layouts = {flags: recorded(flags, processes) for flags in lines}
    small = {kind: small_model(kind, processes) for kind in {kind_of(one.layout) for one in layouts.values()}}
    wanted = timed_calls([rank for one in (*layouts.values(), *small.values()) for rank in one.ranks])
    threads = max(torch.get_num_threads() // processes, 1)
    found = run_processes(measure, processes, threads, wanted, list(small), lines, rounds)
    _, host, _, took = found[0]
    known = median_of([slowest(ranks) for ranks in zip(*(calls for calls, _, _, _ in found), strict=True)])
    steps = [undisturbed(ranks, processes) for ranks in zip(*(steps for _, _, steps, _ in found), strict=True)]
    steps_of_small = {kind: (one.ranks[0], typical(host[kind])) for kind, one in small.items()}
    times = machine_times(processes, threads, known, steps_of_small)
    between = ", ".join(f"{kind} {1e6 * seconds:.0f} us" for kind, seconds in times.host.items())
    asleep = ", ".join(f"{kind} {1e6 * seconds:.0f} us" for kind, seconds in times.waits.items())
    report.say(
        f"{processes} x {threads} threads: {len(wanted)} calls timed in {took:.0f} s; host between calls: {between}; "
        f"asleep at a collective: {asleep}; "
        f"{sum(map(len, steps))} of {rounds * STEPS * len(lines)} steps counted"
    )
    return {
        flags: (step_time(one, times).total, statistics.median(seconds))
        for (flags, one), seconds in zip(layouts.items(), steps, strict=True)
    }


def show(rows: Mapping[tuple[int, str], tuple[float, float]], report: Report) -> None:
    """The table, its median error, and what the first choice costs."""
    report.say("processes | predicted s | measured s | error | flags")
    for (processes, flags), (predicted, measured) in sorted(rows.items(), key=lambda row: row[1][0]):
        error = 100 * (predicted / measured - 1)
        report.say(f"{processes:9} | {predicted:11.3f} | {measured:10.3f} | {error:+4.0f} % | {flags or '(none)'}")
    errors = [abs(predicted / measured - 1) for predicted, measured in rows.values()]
    report.say(f"median error of {len(rows)} layouts: {100 * statistics.median(errors):.1f} %")
    chosen, best = min(rows.values())[1], min(measured for _, measured in rows.values())
    report.say(f"the first choice takes {100 * (chosen / best - 1):.0f} % longer than the measured best")


def main() -> None:
    """Measure all numbers of processes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="calibrations, and three steps of each layout in each")
    parser.add_argument("--processes", type=int, nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rows", type=Path, help="JSON file of rows: those of other numbers of processes are read")
    args = parser.parse_args()
    report = Report("planner", "cpu")
    report.say(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {args.rounds} rounds")
    rows = dict[tuple[int, str], tuple[float, float]]()
    if args.rows is not None and args.rows.exists():
        rows = {(row[0], row[1]): (row[2], row[3]) for row in json.loads(args.rows.read_text())}
    for processes in args.processes:
        found = compare(processes, args.rounds, report)
        rows = {key: row for key, row in rows.items() if key[0] != processes}
        rows |= {(processes, flags): row for flags, row in found.items()}
        if args.rows is not None:
            args.rows.write_text(json.dumps([[*key, *row] for key, row in rows.items()], indent=1))
    show(rows, report)


if __name__ == "__main__":
    main()
