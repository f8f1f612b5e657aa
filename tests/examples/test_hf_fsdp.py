"""The example prints the same losses in every layout, and goes on from the folder that it saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def numbers(folder: Path, processes: int, *flags: object) -> list[float]:
    """Losses and norms of every step."""
    run = run_program(ROOT / "examples/hf_fsdp.py", flags, folder, processes, launcher=processes > 1)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr and "redistribut" not in run.stderr  # each of them had a cause
    lines = re.findall(r"step \d+ loss ([\d.]+) norm ([\d.]+)", run.stdout)
    return [float(number) for line in lines for number in line]


def test_every_layout_prints_the_same(tmp_path: Path) -> None:
    both = numbers(tmp_path, 4, "--tp", 2, "--shard", 2, "--steps", 6, "--save", "out")
    assert len(both) == 12 and both[10] < both[0]
    assert numbers(tmp_path, 1, "--steps", 6) == pytest.approx(both, rel=1e-4)
    resumed = numbers(tmp_path, 1, "--steps", 2, "--model", "out")
    assert resumed[0] < both[0]
