"""A bit that flips on one rank of a real run: repaired where there is a majority, else the run ends before it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.flag_runs import TINY, proves
from tests.training.preloaded import python_path

FLIPS = """
import os, sys
import pretrain_gpt
from smp.parallel.dtensor_region import local_part
from smp.training import trainer
from tests.training.test_replicas import flip

step, wrong = trainer.Trainer.start_step, int(os.environ["WRONG"])

def start_step(self, *arguments):
    if self.progress.iteration == 3 and int(os.environ["RANK"]) == wrong:
        weight = self.model.get_parameter("layers.1.mlp.down.weight")
        flip(local_part(self.optimizer.state[weight]["exp_avg"]), 7, 20)
    return step(self, *arguments)

trainer.Trainer.start_step = start_step
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
"""A bit of a moment flips before the fourth step."""


def run(folder: Path, ranks: int, wrong: int, flags: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "flips.py").write_text(FLIPS)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "flips.py"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "WRONG": str(wrong)}
    flags = f"{TINY} --global-batch-size {2 * ranks} --hybrid-shard-degree 1 --train-iters 6 --save ck {flags}"
    return subprocess.run([*words, *flags.split()], cwd=folder, env=environment, capture_output=True, text=True)


def losses(folder: Path) -> list[float]:
    lines = (folder / "logs/metrics.jsonl").read_text().splitlines()
    return [record["lm loss"] for record in map(json.loads, lines) if "lm loss" in record]


@pytest.mark.usefixtures("forked")
@proves("check_replicas_interval")
def test_the_majority_repairs_and_without_one_nothing_wrong_is_saved(tmp_path: Path) -> None:
    flags = "--check-replicas-interval 1"
    repaired, clean = run(tmp_path / "a", 3, 1, flags), run(tmp_path / "b", 3, -1, flags)
    assert repaired.returncode == clean.returncode == 0, repaired.stderr
    (said,) = [line for line in repaired.stdout.splitlines() if "silent corruption" in line]
    assert said.startswith("ERROR: iteration 4: silent corruption: ")
    assert "layers.1.mlp.down.weight and 1 other tensors of rank 1 on " in said, "the moment, and what it updated"
    assert said.endswith("repaired from rank 0")
    assert "silent corruption" not in clean.stdout and losses(tmp_path / "a") == losses(tmp_path / "b")
    # Compared before each save only: what was saved before is there, and nothing behind it.
    ended = run(tmp_path / "c", 2, 1, "--check-replicas-interval 100 --save-interval 3")
    status = json.loads((tmp_path / "c/logs/status.json").read_text())
    assert ended.returncode == 1 and status["status"] == "failed"
    assert "iteration 6: silent corruption: " in status["reason"] and "no majority" in status["reason"]
    assert "differ between rank 0 on " in status["reason"]
    assert [path.name for path in (tmp_path / "c/ck").glob("iter_*")] == ["iter_0000003"]
