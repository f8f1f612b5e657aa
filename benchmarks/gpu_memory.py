"""Memory that --dry-run predicts beside what a run takes, and a trace of two steps: a part of ``make gpu``.

Each line is a run of pretrain_gpt.py in a process of its own; measured is what its log says. Traces (Chrome's format)
and memory snapshots stay in the runs' folders, which are named. With --device cpu the runs are small, and what is
measured is the whole process: that shows that all parts work, and compares nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from timing import RESULTS, ROOT, Report

from smp.config import Layout
from smp.layers.head import CHUNK_BYTES
from smp.models.presets import PRESETS
from smp.training.fake_step import fake_step, gpu_kernels
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
    "cpu": {"small": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 100"},
}


def predicted(flags: str) -> float:
    """GB of one process on a GPU, at its peak."""
    config = read_settings(shlex.split(flags), PRESETS, 1)
    return fake_step(config, Layout(), gpu_kernels(config), CHUNK_BYTES["cuda"]).peak / 1e9


def measured(flags: str, folder: Path) -> float | str:
    """GB that a run's log says, or the last line of what went wrong."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *shlex.split(flags), "--log-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        return (ended.stderr.strip() or "failed").splitlines()[-1]
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return max(record["peak memory (GB)"] for record in records if "peak memory (GB)" in record)


def main() -> int:
    """The table; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=tuple(RUNS), required=True)
    device, failed = parser.parse_args().device, 0
    report = Report("memory", device)
    for name, flags in RUNS[device].items():
        line, folder = COMMON + flags, RESULTS / "runs" / name
        found = measured(line, folder)
        failed += isinstance(found, str)
        figure = found if isinstance(found, str) else f"measured {found:.2f} GB"
        report.say(f"{name}: predicted {predicted(line):.2f} GB, {figure}; traces in {folder / 'profile'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
