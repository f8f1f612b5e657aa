"""The main job on one GPU: like on a CPU, faster in bf16, and bit for bit after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.flag_runs import run_here

ROOT = Path(__file__).parents[2]
FLAGS = "--mock-data --vocab-size 512 --seq-length 64 --micro-batch-size 4 --lr 1e-3 --log-interval 1 --no-progress-bar"

pytestmark = pytest.mark.gpu


def losses(folder: Path, flags: str, devices: str | None = None) -> list[float]:
    """Run pretrain_gpt.py alone in ``folder``; ``devices`` hides GPUs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS.split(), *flags.split()]
    run = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    lines = (folder / "runs/pretrain/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["lm loss"] for line in lines]


def test_a_gpu_trains_like_a_cpu(tmp_path: Path) -> None:
    """fp32 products run as TF32 on a GPU, so rounding differs by 2^-11 a product."""
    for name in ("cpu", "gpu"):
        (tmp_path / name).mkdir()
    cpu = losses(tmp_path / "cpu", "--train-iters 5", devices="")
    assert losses(tmp_path / "gpu", "--train-iters 5") == pytest.approx(cpu, rel=1e-3)


@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --compile", "--bf16 --recompute-granularity selective"])
def test_bf16_learns(tmp_path: Path, flags: str) -> None:
    run = run_here(tmp_path, f"--train-iters 30 {flags}", base=FLAGS)
    assert run.code == 0, run.err
    assert run.losses[-1] < run.losses[0] - 0.5


def test_resume_is_bit_for_bit(tmp_path: Path) -> None:
    flags = "--bf16 --hidden-dropout 0.1 --deterministic-mode --lr-decay-style constant"
    straight, first, second = (
        run_here(tmp_path / folder, f"{flags} --train-iters {more}", base=FLAGS)
        for folder, more in (("straight", "6"), ("halves", "3 --save ck"), ("halves", "6 --save ck --load auto"))
    )
    assert straight.code == first.code == second.code == 0, straight.err + first.err + second.err
    assert len(straight.losses) == 6 and second.losses == straight.losses
    assert all(torch.equal(second.final[name], weight) for name, weight in straight.final.items())
