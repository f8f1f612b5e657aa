"""A run on packed, masked documents with a growing batch learns the same under every way to split."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from smp.data.indexed_dataset import IndexedDatasetWriter
from tests.programs import run_program
from tests.training.flag_runs import run_here

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --seq-length 32 "
    "--init-method-std 0.2 --lr 0.01 --log-interval 1 --no-tensorboard --no-progress-bar --log-dir logs "
    "--train-iters 4 --global-batch-size 6 --rampup-batch-size 2 2 6 --reset-attention-mask --reset-position-ids "
)
LAYOUTS = {
    "tensor and sequence": "--packing best-fit --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": "--packing best-fit --pipeline-model-parallel-size 2",
    "parts of sequences": "--packing best-fit --context-parallel-size 2 --cp-comm-type all_gather",
    "parts of documents that are cut": "--context-parallel-size 2 --cp-comm-type p2p",
    "data": "--eod-mask-loss",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix, draw = tmp_path_factory.mktemp("corpus") / "text", np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in draw.integers(1, 40, 80):
            writer.add_document(draw.integers(0, 97, length))
    return f"--data-path {prefix} "


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["global batch size"] for row in rows] == [2, 2, 4, 6]
    return [row["lm loss"] for row in rows]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_learn_as_one_does(tmp_path: Path, corpus: str, name: str) -> None:
    how = re.split("--tensor|--pipeline|--context", LAYOUTS[name])[0]
    assert run_here(tmp_path / "one", corpus + how, base=MODEL).code == 0
    (tmp_path / "two").mkdir()
    done = run_program(ROOT / "pretrain_gpt.py", (MODEL + corpus + LAYOUTS[name]).split(), tmp_path / "two", 2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
