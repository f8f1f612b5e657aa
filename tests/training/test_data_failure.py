"""Data that become unreadable while a run goes on: every rank ends within a step, with one line that names the file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from smp.data.indexed_dataset import IndexedDatasetWriter
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_that_is_cut_ends_all_ranks_with_its_name(tmp_path: Path) -> None:
    """The second rank alone cannot read: its data set is a copy that is cut after the first step."""
    for rank in range(2):
        with IndexedDatasetWriter(tmp_path / str(rank) / "corpus", np.uint16) as writer:
            for d in range(4000):
                writer.add_document([d % 90] * 20)
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import pretrain_gpt
folder = {str(tmp_path)!r}
prefix = folder + "/" + os.environ["RANK"] + "/corpus"
if os.environ["RANK"] == "1":
    from smp.training.reporting.console import Console
    step = Console.step
    def cut(self, progress, result):
        os.truncate(prefix + ".bin", 100)
        step(self, progress, result)
    Console.step = cut
sys.exit(pretrain_gpt.main(("--num-layers 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 97 --seq-length 17 "
    "--train-iters 100000 --log-interval 1000 --no-progress-bar --no-tensorboard --data-path " + prefix
    + " --log-dir " + folder + "/logs").split()))
"""
    (tmp_path / "run.py").write_text(code)
    done = run_program(tmp_path / "run.py", [], tmp_path, processes=2)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(  # rank 1 may say it too before it is stopped
        rf"error: (rank 1: )?rank 1 could not read its data: {tmp_path}/1/corpus\.bin: was cut to 100 bytes "
        r"while in use; tokens \d+ to \d+ end at byte \d+",
        lines[0],
    ), done.stderr
