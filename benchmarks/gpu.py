"""``make gpu``: everything that a GPU is needed for, with this python and nothing installed.

Builds the CUDA C++ kernels where nvcc is, runs the tests marked ``gpu``, and writes the tables of kernels, of blocks
and of training to ``benchmarks/results/``. A part that fails does not keep the others from running; the exit code
tells.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = [
    ["-m", "smp.kernels.cuda.build"],
    ["-m", "pytest", "-m", "gpu", "-rs", "--continue-on-collection-errors"],
    ["benchmarks/kernels.py", "--device", "cuda"],
    ["benchmarks/blocks.py", "--device", "cuda"],
    ["benchmarks/moe.py", "--device", "cuda"],
    ["benchmarks/training_table.py", "--device", "cuda"],
]


def main() -> int:
    """Run the parts in order; 1 if one failed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    sys.path.insert(0, str(ROOT))
    from smp.kernels.cuda.build import nvcc_path

    failed, parts = [], PARTS
    if nvcc_path() is None:
        print("no nvcc: the CUDA C++ kernels are not built, and their tests and rows are left out", flush=True)
        parts = PARTS[1:]
    if importlib.util.find_spec("xdist") is not None:  # most of a test is the host's time: imports, compilers
        parts = [[*words, "-n", "4"] if "pytest" in words else words for words in parts]
    for words in parts:
        print("+ python", *words, flush=True)
        if subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode:
            failed.append(" ".join(words))
    for words in failed:
        print(f"failed: python {words}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
