"""The example trains alike in every layout, and goes on from a checkpoint where another layout stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).parents[2]


def losses(folder: Path, processes: int, *flags: object) -> dict[int, float]:
    """Run the example; loss by step."""
    run = run_program(ROOT / "examples/custom_model.py", flags, folder, processes, launcher=True)
    assert run.returncode == 0, run.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", run.stdout)}


def test_another_layout_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    sharded = losses(tmp_path, 4, "--tp", 2, "--shard", 2, "--steps", 20, "--save", "encoder")
    assert list(sharded) == [0, 10, 20] and sharded[20] < 0.9 * sharded[0]
    for processes, flags in ((2, ("--tp", 2)), (1, ())):
        resumed = losses(tmp_path, processes, *flags, "--steps", 10, "--load", "encoder")
        assert resumed[20] == pytest.approx(sharded[20], rel=1e-5)
        assert resumed[30] < sharded[20]


@pytest.mark.parametrize(
    ("processes", "flags", "message"),
    [
        (2, "--tp 2 --shard 2", "--tp 2 x --shard 2 does not divide 2 processes"),
        (3, "--tp 3", "4 heads do not split over 3 ranks"),
        (1, "--load nowhere", "no checkpoint folder nowhere"),
        (1, "--tp x", "--tp: invalid int value: 'x'"),
    ],
)
def test_a_mistake_is_one_line(processes: int, flags: str, message: str, tmp_path: Path) -> None:
    program = ROOT / "examples/custom_model.py"
    run = run_program(program, flags.split(), tmp_path, processes, launcher=True, timeout=30)
    lines = [line for line in run.stderr.splitlines() if "Gloo" not in line]
    assert run.returncode == 2 and lines[0].startswith(f"error: {message}") and "Traceback" not in run.stderr


def test_a_layout_trains_like_one_process(tmp_path: Path) -> None:
    alone = losses(tmp_path, 1, "--steps", 10)
    assert losses(tmp_path, 2, "--tp", 2, "--steps", 10) == pytest.approx(alone, rel=1e-5)
    assert losses(tmp_path, 2, "--steps", 10) == pytest.approx(alone, rel=1e-5)
