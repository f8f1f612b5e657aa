"""The example prints the same numbers in every layout, and goes on from a checkpoint where another layout stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def numbers(folder: Path, processes: int, *flags: object) -> dict[int, tuple[float, float]]:
    """Loss and norm by step."""
    run = run_program(ROOT / "examples/image_classifier.py", flags, folder, processes, launcher=processes > 1)
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"step (\d+) loss ([\d.]+) norm ([\d.]+)", run.stdout)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


def test_another_layout_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    alone = numbers(tmp_path, 1, "--steps", 21)
    assert list(alone) == [0, 10, 20] and alone[20][0] < alone[0][0]
    first = numbers(tmp_path, 4, "--tp", 2, "--shard", 2, "--steps", 11, "--save", "classifier")
    rest = numbers(tmp_path, 1, "--steps", 10, "--load", "classifier")
    for step, found in (first | rest).items():
        assert found == pytest.approx(alone[step], rel=1e-4)
