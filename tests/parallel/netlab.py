"""A network of namespaces with shaped uplinks, for tests that cut one.

SMP_NETLAB names a program with the command line ``netlab run --nodes 2 --procs 2 --rate 100mbit [--cut NODE@SECONDS]
--launcher env --python PYTHON -- script.py``: it starts the script in each node's namespace with RANK, WORLD_SIZE,
MASTER_ADDR and the like set, and prefixes what it prints with ``[node0.1]``. It needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def netlab() -> str:
    """The program; skips the test where there is none."""
    program = os.environ.get("SMP_NETLAB")
    if program is None:
        pytest.skip("SMP_NETLAB is not set: it names a program that makes a shaped network")
    if shutil.which(program) is None:
        pytest.fail(f"SMP_NETLAB={program} is not a program")
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("a shaped network needs root and iproute2")
    return program


def run_on_nodes(flags: str, words: Sequence[str], folder: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """A script of ``folder`` on 2 nodes of 2 ranks with uplinks of 100 Mbit/s."""
    root = Path(__file__).resolve().parents[2]
    command = [
        netlab(),
        "run",
        *["--nodes", "2", "--procs", "2", "--rate", "100mbit", "--launcher", "env"],
        *flags.split(),
    ]
    command += ["--python", sys.executable, "--timeout", str(limit), "--", *words]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit + 30)
