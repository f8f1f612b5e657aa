"""Bad input to several processes, as torchrun starts them: one line of ours, not one per rank, and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_program
from tools.train_tokenizer import train

ROOT = Path(__file__).resolve().parents[2]
RUN = "--mock-data --vocab-size 97 --seq-length 17 --train-iters 1 "


def torchrun(folder: Path, flags: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*launcher, str(ROOT / "pretrain_gpt.py"), *flags.split()]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model of 400 token ids."""
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(train([Path(__file__).read_text() * 3], 400, "bpe", 0))
    return path


# flags and what the line says of them; TOKENIZER stands for the path of one
CASES = {
    "unknown flag": (RUN + "--hiden-size 8", "unknown flag --hiden-size: did you mean --hidden-size?"),
    "degrees": (
        RUN + "--tensor-model-parallel-size 3",
        "2 processes are not divisible by --tensor-model-parallel-size 3; change",
    ),
    "parts of sequences": (
        RUN + "--context-parallel-size 2",
        "--seq-length 17 is not divisible by 2 x --context-parallel-size 2 = 4; 16 or 20 works",
    ),
    "heads": (RUN + "--hybrid-shard-degree 2 --num-attention-heads 5", "not divisible by --num-attention-heads 5"),
    "pipeline layout": (
        RUN + "--num-layers 32 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*16|t*15L",
        "names 31 layers of 32",
    ),
    "no data": ("--data-path nowhere --vocab-size 9 --train-iters 1", "--data-path nowhere: there is no file"),
    "vocabulary": (RUN + "--tokenizer-model TOKENIZER", "has 400 token ids but the model's vocabulary holds 97"),
    "no folder": (RUN + "--load nowhere", "--load nowhere: there is no such folder"),
    "no checkpoint": (RUN + "--load .", "--load . "),  # found only after torch is imported and the ranks have met
}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_say_it_once(tmp_path: Path, tokenizer: Path, name: str) -> None:
    flags, message = CASES[name]
    flags = flags.replace("TOKENIZER", str(tokenizer))
    if name in ("degrees", "no checkpoint"):  # before and after the ranks have met
        result = torchrun(tmp_path, flags)
    else:
        result = run_program(ROOT / "pretrain_gpt.py", flags.split(), tmp_path, processes=2, grace=1.0)
    assert result.returncode != 0
    ours = [line for line in (result.stdout + result.stderr).splitlines() if "error: " in line]
    assert len(ours) == 1 and ours[0].startswith("error: ") and message in ours[0], result.stderr
    assert not list(tmp_path.iterdir())
    assert 'pretrain_gpt.py", line' not in result.stderr  # no traceback of ours


def test_a_rank_says_what_it_alone_saw(tmp_path: Path) -> None:
    """A node without the data: rank 0 is fine and waits, so nothing else would tell what is wrong."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    flags = "--data-path nowhere --vocab-size 9 --train-iters 1"
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags.split()]
    result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert "rank 1" in result.stderr and "there is no file nowhere.bin" in result.stderr
