"""Whole runs of the command line under NCCL's blocking rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import nccl_rules
from tests.distributed import run_distributed
from tests.nccl_rules import NcclRules
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --mock-data --vocab-size 97 "
    "--seq-length 16 --train-iters 2 --eval-interval 1 --eval-iters 1 --no-tensorboard --no-progress-bar "
)
LAYOUTS = {
    "two, one micro-batch": (2, "--pipeline-model-parallel-size 2"),
    "both ends hold the matrix": (
        4,
        "--pipeline-model-parallel-size 4 --global-batch-size 4 --no-untie-embeddings-and-output-weights",
    ),
    "beside other ranks": (
        8,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 4 "
        "--pipeline-schedule zb-v --pipeline-reshard",
    ),
    "experts": (
        4,
        "--num-experts 4 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--global-batch-size 4 --pipeline-schedule zb-v --recompute-granularity full",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_does_not_hang(tmp_path: Path, layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    # gloo, whose collectives the rules can see.
    words = [ROOT / "pretrain_gpt.py", *FLAGS.split(), *flags.split(), "--cpu-collectives", "gloo"]
    run = run_program(Path(nccl_rules.__file__), words, tmp_path, processes)
    assert run.returncode == 0, run.stderr
    assert "done: 2 iterations trained" in run.stdout


def hang(rank: int, ranks: int) -> str:
    """Each sends first through a group of its own."""
    nccl_rules.SECONDS = 1
    own, other = [dist.new_group([0, 1]) for _ in range(2)][:: 1 if rank == 0 else -1]
    with NcclRules(), pytest.raises(AssertionError) as caught:
        sent = dist.isend(torch.zeros(1), 1 - rank, group=own)
        dist.recv(torch.zeros(1), 1 - rank, group=other)
        assert sent is not None
        sent.wait()
    dist.barrier()
    return str(caught.value)


def test_the_rules_see_a_hang() -> None:
    """Gloo does not mind two ranks that both send first, each through another group."""
    errors = run_distributed(hang, 2)
    assert all(f"rank {rank} waits for {1 - rank}" in error for rank, error in enumerate(errors))
