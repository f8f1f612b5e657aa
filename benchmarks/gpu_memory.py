"""Memory that --dry-run predicts beside what a run takes, and a trace of two steps: a part of ``make gpu``.

Each line is a run of pretrain_gpt.py in a process of its own; measured is what its log says. Traces (Chrome's format)
and memory snapshots stay in the runs' folders, which are named. A prediction that is more than 5 % off fails. With
--device cpu a small run is measured by what torch's allocator was asked for, as its profile of a step says.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

from timing import RESULTS, ROOT, Report

from smp.config import Layout
from smp.kernels import Kernels
from smp.models.presets import PRESETS
from smp.training.cost.fake_step import StepMeasures, fake_gpu_step, fake_step
from smp.training.settings import read_settings

COMMON = "--mock-data --train-iters 6 --log-interval 1 --no-tensorboard --no-progress-bar --profile "
EIGHT = "--model llama3-8b --bf16 --seq-length 8192 --micro-batch-size 1"
RUNS = {
    "cuda": {
        "8b-12-layers": f"{EIGHT} --num-layers 12 --global-batch-size 1",
        "8b-12-layers-accumulated": f"{EIGHT} --num-layers 12 --global-batch-size 4",
        "8b-12-layers-full-recompute": f"{EIGHT} --num-layers 12 --global-batch-size 1 --recompute-granularity full",
        "mixtral-2-layers": "--model mixtral-8x7b --bf16 --seq-length 4096 --num-layers 2 --micro-batch-size 2 "
        "--global-batch-size 2",
    },
    "cpu": {
        "small": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 250 "
        "--micro-batch-size 2 --profile-step-start 3 --profile-step-end 4",
    },
}


MOST_OFF = 0.05
"""Of what was measured."""


def predicted(flags: str, device: str) -> StepMeasures:
    """A step of one process on tensors without data."""
    config = read_settings(shlex.split(flags), PRESETS, 1)
    if device == "cpu":
        return fake_step(config, Layout(), Kernels(), "cpu")
    return fake_gpu_step(config, Layout())


def allocated(folder: Path) -> int:
    """Most bytes at once that a run's profile saw torch's allocator of the host be asked for since it began."""
    events = json.loads((folder / "profile" / "rank_00000.trace.json").read_text())["traceEvents"]
    of_memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    return max(accumulate(e["args"]["Bytes"] for e in of_memory))


def logged(folder: Path) -> float:
    """Most GB that a run's log says."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return max(record["peak memory (GB)"] for record in records if "peak memory (GB)" in record)


def measured(flags: str, folder: Path, device: str, step: StepMeasures) -> float | str:
    """GB of a run at its peak, or the last line of what went wrong. On a CPU what is there between steps is taken from
    the prediction: the profile does not see it."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *shlex.split(flags), "--log-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        return (ended.stderr.strip() or "failed").splitlines()[-1]
    if device == "cuda":
        return logged(folder)
    return (step.parameters + step.optimizer + allocated(folder)) / 1e9


def compared(name: str, predicted: float, found: float | str) -> tuple[str, bool]:
    """A row of the table, and whether the run worked and the prediction is near."""
    if isinstance(found, str):
        return f"{name}: predicted {predicted:.3f} GB, {found}", False
    off = predicted / found - 1
    near = abs(off) <= MOST_OFF
    return f"{name}: predicted {predicted:.3f} GB, measured {found:.3f} GB: {'' if near else 'not '}within 5 %", near


def main() -> int:
    """The table; 1 if a run failed or a prediction was off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=tuple(RUNS), required=True)
    device, failed = parser.parse_args().device, 0
    report = Report("memory", device)
    for name, flags in RUNS[device].items():
        line, folder = COMMON + flags, RESULTS / "runs" / name
        step = predicted(line, device)
        row, near = compared(name, step.peak / 1e9, measured(line, folder, device, step))
        failed += not near
        report.say(f"{row}; traces in {folder / 'profile'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
