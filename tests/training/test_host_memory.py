"""What a process on a CPU frees stays its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from smp.training.host_memory import keep_freed_memory
kept = keep_freed_memory()
def step():
    activations = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(16)]
    gradient = torch.ones(65 << 20, dtype=torch.uint8)  # larger than any threshold of glibc's
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and how many pages five steps of 161 MiB touch for the first time."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**environment, "PATH": ""}, capture_output=True, text=True, check=True
    )
    kept, number = done.stdout.split()
    return kept, int(number)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an allocator of Linux")
def test_a_step_touches_no_page_for_the_first_time() -> None:
    kept, number = faults(PYTHONPATH=":".join(sys.path))
    if kept == "False":
        pytest.skip("the C library is not glibc")
    assert number < 100
    # One that the environment sets stays: this is how glibc begins, and each of 5 x 41,216 pages is cleared anew.
    kept, number = faults(PYTHONPATH=":".join(sys.path), MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False" and number > 50_000
