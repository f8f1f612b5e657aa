"""The example trains alike in every layout, and goes on from a checkpoint where another layout stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).parents[2]


def losses(folder: Path, processes: int, *flags: object) -> dict[int, float]:
    """By step."""
    program = ROOT / "examples/diffusion_transformer.py"
    run = run_program(program, flags, folder, processes, launcher=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"step \d+ right [01]\.\d+", run.stdout)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", run.stdout)}


def test_another_layout_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    alone = losses(tmp_path, 1, "--steps", 31)
    assert list(alone) == [0, 10, 20, 30] and alone[30] < 0.9 * alone[0]
    first = losses(tmp_path, 4, "--tp", 2, "--shard", 2, "--steps", 15, "--save", "flow")
    rest = losses(tmp_path, 1, "--steps", 16, "--load", "flow")
    assert first | rest == pytest.approx(alone, rel=1e-5)
