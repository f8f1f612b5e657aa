"""A run on three processes, which share its batches unevenly, goes on from memory on two; and a run that repeats its
steps, or compares its replicas, has the bits of one that does not. Kinds of runs that other tests have no time for."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config.rules.elastic import OWN_STORES
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.parity.worker import fp64
from tests.training.test_uneven_shares import BIAS, EXPERTS, MODEL
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import pretrain, pretrain_all, together, tune

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMMON = "--no-tensorboard --no-progress-bar --log-interval 1 --lr 0.02 --micro-batch-size 1"
TUNED = "--load {0} --seq-length 48 --optimizer sgd --data-path {0}"
KINDS = {
    "FP8 history, dropout": f"{MODEL} --hidden-dropout 0.1 --optimizer sgd --global-batch-size 7 --train-iters 6 "
    "--fp8-format hybrid --fp8-recipe delayed --fp8-emulate --fp8-amax-history-len 4",
    "ramp, samples": f"{MODEL} --hidden-dropout 0.1 --optimizer sgd --rampup-batch-size 2 1 9 --global-batch-size 5 "
    "--train-samples 29 --lr-warmup-samples 3",
    "Muon": f"{MODEL} --optimizer muon --global-batch-size 7 --train-iters 6",
    "DPO, LoRA, epochs": f"{TUNED}/dpo.jsonl --objective dpo --lora-rank 4 --lora-dropout 0.25 --global-batch-size 5 "
    "--train-epochs 0.5",
    "packed SFT, validation": f"{TUNED}/sft.jsonl --eval-interval 3 --global-batch-size 7 --train-iters 6",
}


def run_all(rank: int, world: int, lines: list[str]) -> list[dict[str, Any]]:
    """Of one node."""
    own = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world), OWN_STORES: "1"}
    os.environ.update(own)
    out = []
    for line in lines:
        with fp64() if "--fp8-format" in line else nullcontext():
            out.append((tune if "jsonl" in line else pretrain)(rank, world, line))
    return out


def test_three_processes_then_two_are_one(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder)
    lines = [f"{COMMON} --log-dir {tmp_path}/logs {flags.format(folder)}" for flags in KINDS.values()]
    kept = [
        f"{line} --peer-snapshot-interval 1 --peer-snapshot-dir {tmp_path}/memory{i} --save {tmp_path}/ck{i}"
        for i, line in enumerate(lines)
    ]
    goes_on = [line + (" --resume" if "jsonl" in line else " --load auto") for line in kept]
    starts = [(1, lines), (3, [f"{line} --exit-interval 3" for line in kept]), (2, goes_on)]
    parts = [run_distributed(run_all, world, given) for world, given in starts]
    for i, kind in enumerate(KINDS):
        whole, first, second = (together([rank[i] for rank in ranks]) for ranks in parts)
        assert len(first["losses"]) == 3, kind
        assert first["losses"] + second["losses"] == pytest.approx(whole["losses"], rel=TOLERANCE), kind
        errors = tensor_errors(second["final"], whole["final"], whole["final"])
        assert max(errors.values()) <= TOLERANCE, (kind, max(errors.items(), key=lambda item: item[1]))


WATCHED = {
    "dropout": f"{MODEL} --hidden-dropout 0.1",
    "experts, dropout": f"{MODEL} --hidden-dropout 0.1 {EXPERTS}",
    "expert bias": f"{MODEL} {BIAS}",
}
WATCH = "--check-replicas-interval 1 --rerun-mode validate_results"
SPLIT = (
    "--hybrid-shard-degree 2",
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--expert-model-parallel-size 2",
)


def test_repeated_steps_and_compared_replicas_change_no_bit(tmp_path: Path) -> None:
    given = [
        f"{COMMON} --optimizer sgd --train-iters 3 --global-batch-size 8 --log-dir {tmp_path} {kind} {split}"
        for kind in WATCHED.values()
        for split in SPLIT
        if "--num-experts" in kind or "expert" not in split
    ]
    lines = [f"{line} {more}" for line in given for more in ("", WATCH)]
    ranks = run_distributed(pretrain_all, 4, lines)
    for i, line in enumerate(given):
        plain, watched = (together([rank[2 * i + j] for rank in ranks]) for j in range(2))
        assert plain["losses"] == watched["losses"], line
        assert all(torch.equal(tensor, watched["final"][name]) for name, tensor in plain["final"].items()), line
