"""Layouts learn as one process does where fp32 products are oneDNN's: parity cases are in fp64, or too small for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from smp.kernels.matmul import SLOW_MKL, SMALLEST
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
WIDTH, FFN, LENGTH, ROWS = 128, 384, 128, 4
MODEL = (
    f"--num-layers 2 --hidden-size {WIDTH} --ffn-hidden-size {FFN} --num-attention-heads 4 --num-query-groups 2 "
    f"--mock-data --vocab-size 500 --seq-length {LENGTH} --global-batch-size {ROWS} --clip-grad 0.1 --train-iters 3 "
    " --lr 1e-3 --log-interval 1 --no-tensorboard --no-progress-bar --log-dir logs "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 "
LAYOUTS = {
    "tensor and sequence": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2",
    "selective recompute": "--tensor-model-parallel-size 2 --recompute-granularity selective --micro-batch-size 4",
    "sharded": "--recompute-granularity full --micro-batch-size 2",
    "zero bubble": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --micro-batch-size 2",
    "experts": EXPERTS + "--expert-model-parallel-size 2 --micro-batch-size 2",
}


def learned(folder: Path, flags: str, processes: int) -> list[float]:
    """Losses and gradient norms of a run."""
    done = run_program(ROOT / "pretrain_gpt.py", (MODEL + flags).split(), folder, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("lm loss", "grad norm")]


Alone = Callable[[str], list[float]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """(flags) -> what one process learns from one micro-batch: on their number aux_loss depends (docs/moe.md)."""
    return functools.cache(
        lambda flags: learned(tmp_path_factory.mktemp("alone"), f"{flags} --micro-batch-size {ROWS}", 1)
    )


@pytest.mark.skipif(not SLOW_MKL, reason="torch multiplies by MKL here, as in all other parity tests")
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_learn_as_one_does(tmp_path: Path, alone: Alone, name: str) -> None:
    assert ROWS // 2 * LENGTH * WIDTH * FFN // 2 > SMALLEST, "oneDNN takes them"
    expected = alone(EXPERTS if name == "experts" else "")
    assert learned(tmp_path, LAYOUTS[name], 2) == pytest.approx(expected, rel=1e-5)
