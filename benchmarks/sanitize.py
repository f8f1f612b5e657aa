"""NVIDIA's compute-sanitizer over the kernels' tests: memory that is not theirs, and races in shared memory.

python benchmarks/sanitize.py [memcheck racecheck]

It comes with the CUDA toolkit; where there is none, that is said and nothing runs. Kernels run tens of times slower
under it, so it gets the tests of small sizes, through which every launcher passes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
TESTS = ("-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py")
ONLY = "equals_the_reference"


def sanitizer() -> str | None:
    """Where the program is: on the path, or in the toolkit's folder."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def command(program: str, tool: str) -> list[str]:
    """What runs the tests under one of its tools."""
    return [program, f"--tool={tool}", "--error-exitcode=9", sys.executable, *TESTS, "-k", ONLY]


def main(tools: list[str]) -> int:
    """The number of tools that found something."""
    program, found = sanitizer(), 0
    if program is None:
        print("no compute-sanitizer on this machine: nothing is checked")
        return 0
    # Old ones report products of Hopper's that are right (NVIDIA/compute-sanitizer-samples#19): which one it is.
    subprocess.run([program, "--version"])
    for tool in tools or TOOLS:
        words = command(program, tool)
        print("+", *words, flush=True)
        # Torch's caching allocator would hide reads behind a tensor's end.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        found += subprocess.run(words, cwd=ROOT, env=environment).returncode != 0
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
