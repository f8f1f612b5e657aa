"""What tests in Triton's interpreter have in common."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")
needs_interpreter = pytest.mark.skipif(
    not INSTALLED or version("triton").startswith(("3.5.", "3.6.")),
    reason="no triton, or 3.6 and older: its interpreter cannot loop with numpy 2.4",
)


def in_interpreter(*words: str) -> Any:
    """Run a module with TRITON_INTERPRET=1, in a process of its own: Triton reads it when it is imported. Returns the
    JSON that is its last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
