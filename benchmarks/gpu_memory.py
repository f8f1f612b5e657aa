"""Memory that --dry-run predicts beside ``torch.cuda.max_memory_allocated``, of ten shapes: a part of ``make gpu``.

Each line is a run of pretrain_gpt.py in a process of its own; measured is what its log says. The first leaves a trace
of two steps (Chrome's format) and a memory snapshot in its folder, which is named. A prediction that is more than 2 %
off fails. With --device cpu a small run is measured by what torch's allocator was asked for, as its profile of a step
says.
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

COMMON = "--mock-data --train-iters 3 --log-interval 1 --no-tensorboard --no-progress-bar "
PROFILED = "--train-iters 6 --profile "
EIGHT = "--model llama3-8b --bf16 --vocab-size 32000 --seq-length 8192 --micro-batch-size 4 --num-layers 4"
ONE = "--model llama3.2-1b --vocab-size 32000 --micro-batch-size 2 --global-batch-size 2"
EXPERTS = "--bf16 --vocab-size 32000 --seq-length 4096 --micro-batch-size 4 --global-batch-size 4"
RUNS = {
    "cuda": {
        "8b-4-layers": f"{PROFILED}{EIGHT} --global-batch-size 4",
        "8b-4-layers-accumulated": f"{EIGHT} --global-batch-size 16",
        "8b-4-layers-full-recompute": f"{EIGHT} --global-batch-size 4 --recompute-granularity full",
        "8b-4-layers-selective-recompute": f"{EIGHT} --global-batch-size 4 --recompute-granularity selective",
        "8b-4-layers-fp8": f"{EIGHT} --global-batch-size 4 --fp8-format hybrid --fp8-recipe tensorwise",
        "8b-4-layers-offload": f"{EIGHT} --global-batch-size 4 --offload-activations",
        "1b-bf16": f"{ONE} --bf16 --seq-length 8192",
        "1b-fp32": f"{ONE} --seq-length 4096",
        "mixtral-1-layer": f"--model mixtral-8x7b --num-layers 1 {EXPERTS}",
        "qwen3-30b-a3b-2-layers": f"--model qwen3-30b-a3b --num-layers 2 {EXPERTS}",
    },
    "cpu": {
        "small": f"{PROFILED}--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
        "--vocab-size 250 --micro-batch-size 2 --profile-step-start 3 --profile-step-end 4",
    },
}
"""Few layers and small vocabularies, because a model's first values are drawn on the host; many tokens, because what
the optimizer keeps is easily predicted."""


MOST_OFF = 0.02
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
    told = f"{off:+.1%}, {'' if near else 'not '}within 2 %"
    return f"{name}: predicted {predicted:.3f} GB, measured {found:.3f} GB: {told}", near


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
        report.say(f"{row}; traces in {folder / 'profile'}" if "--profile " in line else row)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
