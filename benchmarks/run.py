"""``make bench``: run the CPU benchmarks and write their table to ``benchmarks/results/``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """One process with two threads beside transformers, then two processes with one thread each beside one process;
    pipelines; checkpoints, on the disk of temporary files; data; packing; context parallelism; transformed models;
    the host's share of a step; hybrids beside transformers; conversion."""
    step = str(ROOT / "benchmarks/training_step.py")
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    write_table("training_step_cpu.txt", [[step], [*two, step]])
    write_table("pipeline_cpu.txt", [[str(ROOT / "benchmarks/pipeline.py")]])
    write_table("checkpoint_cpu.txt", [[str(ROOT / "benchmarks/checkpoint.py")]])
    write_table("data_cpu.txt", [[str(ROOT / "benchmarks/data.py")]])
    write_table("packing_cpu.txt", [[str(ROOT / "benchmarks/packing.py")]])
    write_table("context_parallel_cpu.txt", [[*two, str(ROOT / "benchmarks/context_parallel.py")]])
    transform = str(ROOT / "benchmarks/transform.py")
    write_table("transform_cpu.txt", [[transform], [*two, transform]])
    host = str(ROOT / "benchmarks/host_time.py")
    write_table("host_time_cpu.txt", [[host], [*two, host]])
    write_table("hybrids_cpu.txt", [[str(ROOT / "benchmarks/hybrids.py")]])
    write_table("convert_cpu.txt", [[str(ROOT / "benchmarks/convert.py")]])


def write_table(name: str, commands: list[list[str]]) -> None:
    """Run Python with each of ``commands``, and write what they print under a header."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    outputs = [
        subprocess.run([sys.executable, *command], env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        for command in commands
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    header = f"{date.today()}, commit {commit.strip()}, torch {torch.__version__}, {platform.machine()}, CPU\n\n"
    text = header + "\n".join(outputs)
    print(text)
    path = ROOT / "benchmarks/results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
