"""``make gpu``: everything that a GPU is needed for, with this python and nothing installed.

Builds the CUDA C++ kernels where nvcc is, runs the tests marked ``gpu``, and writes the tables of kernels, of blocks,
of training, and of memory with profile traces to ``benchmarks/results/``. A part that fails does not keep the others
from running; the exit code tells.

``make gpu-check`` is the same without a GPU: the tests are collected, kernels are compiled for one ahead of time, and
every table is made of small sizes on this machine's processor, into a folder of its own. It says what it leaves out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = [
    ["-m", "smp.kernels.cuda.build"],
    ["-m", "pytest", "-m", "gpu", "-rs", "--continue-on-collection-errors"],
    ["benchmarks/kernels.py", "--device", "cuda"],
    ["benchmarks/blocks.py", "--device", "cuda"],
    ["benchmarks/moe.py", "--device", "cuda"],
    ["benchmarks/training_table.py", "--device", "cuda"],
    ["benchmarks/gpu_memory.py", "--device", "cuda"],
]
WITHOUT_A_GPU = [
    ["-m", "pytest", "-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider"],
    ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/kernels/test_triton.py", "-k", "compile"],
    ["benchmarks/kernels.py", "--device", "cpu", "--rounds", "1"],
    ["benchmarks/blocks.py", "--device", "cpu", "--repeats", "1"],
    ["benchmarks/moe.py", "--device", "cpu", "--repeats", "1"],
    ["benchmarks/training_table.py", "--device", "cpu", "--steps", "1"],
    ["benchmarks/gpu_memory.py", "--device", "cpu"],
]
"""What stands for each part."""
LEFT_OUT = (
    "left out without a GPU: the CUDA C++ kernels' build, every test marked gpu (collected only), Triton's kernels but "
    "for their compilation, NCCL (make gpu-multi), all times and all figures of device memory"
)


def on_gpu() -> list[list[str]]:
    """The parts that this machine can run; says what it cannot."""
    from smp.kernels.cuda.build import nvcc_path

    parts = PARTS
    if nvcc_path() is None:
        print("no nvcc: the CUDA C++ kernels are not built, and their tests and rows are left out", flush=True)
        parts = PARTS[1:]
    if importlib.util.find_spec("xdist") is not None:  # most of a test is the host's time: imports, compilers
        parts = [[*words, "-n", "4"] if "pytest" in words else words for words in parts]
    return parts


def run(parts: list[list[str]], **environment: str) -> int:
    """All in order; 1 if one failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    failed = []
    for words in parts:
        print("+ python", *words, flush=True)
        if subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode:
            failed.append(" ".join(words))
    for words in failed:
        print(f"failed: python {words}")
    return int(bool(failed))


def main() -> int:
    """Run the parts in order; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="without a GPU: what can be checked of every part")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT))
    if not check:
        return run(on_gpu())
    with tempfile.TemporaryDirectory() as folder:
        code = run(WITHOUT_A_GPU, SMP_BENCHMARK_RESULTS=folder, CUDA_VISIBLE_DEVICES="")
    print(LEFT_OUT)
    return code


if __name__ == "__main__":
    sys.exit(main())
