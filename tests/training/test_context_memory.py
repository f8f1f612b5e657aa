"""Activations of long sequences: what is kept on each process, and a length that only fits when it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import Config, DataConfig, Layout, ModelConfig, ParallelConfig, resolve
from smp.config.schema import TrainingConfig
from smp.data.loader import RankBatch
from smp.parallel.context import build_context
from smp.training.build import RunSetup, build_model, choose_backends
from smp.training.cost.memory import estimate_memory
from smp.training.micro_batches import token_micro_batch
from tests.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 32768
EXCHANGES = ("p2p", "all_gather", "a2a")


def settings(cp: int, exchange: str, recompute: str) -> Config:
    model = ModelConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=8,
        vocab_size=64,
        max_position_embeddings=LENGTH,
        normalization="LayerNorm",
    )
    parallel = ParallelConfig(
        context_parallel_size=cp,
        cp_comm_type=exchange if cp > 1 else "auto",  # type: ignore[arg-type]
        recompute_granularity=recompute,  # type: ignore[arg-type]
        bf16=True,
    )
    data = DataConfig(seq_length=LENGTH)
    return resolve(Config(model=model, parallel=parallel, data=data, training=TrainingConfig(dry_run=True)), cp)


def kept(rank: int, cp: int, recompute: str) -> dict[str, tuple[int, int]]:
    """By exchange: bytes that autograd holds for the backward pass of a micro-batch, and the estimate for them."""
    found = {}
    context, device = build_context(Layout(cp=cp), "cpu"), torch.device("cpu")
    ids = torch.arange(LENGTH)[None, None] % 64
    for exchange in EXCHANGES if cp > 1 else EXCHANGES[:1]:
        config = settings(cp, exchange, recompute)
        model = build_model(
            config, RunSetup(context, device, choose_backends(config, context, device, documents=False)[0])
        )
        batch = RankBatch(ids, ids, torch.zeros(1, 1, dtype=torch.int64))
        micro_batch = token_micro_batch(batch, 0, LENGTH, device, context.cp_group)
        held: dict[int, int] = {}

        def keep(x: torch.Tensor, held: dict[int, int] = held) -> Any:
            local = x.to_local() if hasattr(x, "to_local") else x
            held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = model(micro_batch)
        for parameter in model.parameters():
            held.pop(parameter.to_local().untyped_storage().data_ptr(), None)  # type: ignore[operator]
        del output
        found[exchange] = sum(held.values()), estimate_memory(config, Layout(cp=cp), 1 << 20).activations
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_of_a_process_fall_with_the_number_of_processes(recompute: str) -> None:
    (whole, estimate), parts = run_distributed(kept, 1, recompute)[0]["p2p"], {}
    for cp in (2, 4):
        parts[cp] = run_distributed(kept, cp, recompute)
    print(f"{recompute}: one process {whole:,} bytes, {parts}")
    for cp, ranks in parts.items():
        for rank in ranks:
            for exchange, (found, estimated) in rank.items():
                assert found == pytest.approx(whole / cp, rel=0.05), (cp, exchange)
                # Beside its part a rank may keep what was exchanged, and the token indices of the whole sequence.
                indices = 8 * LENGTH if exchange == "a2a" and recompute == "none" else 0
                exchanged = found - whole / cp - indices
                assert estimated == pytest.approx(estimate / cp + exchanged, rel=0.01), (cp, exchange)


LIMITED = (
    "--num-layers 1 --hidden-size 64 --ffn-hidden-size 8192 --num-attention-heads 2 --mock-data --vocab-size 64 "
    "--max-position-embeddings 16384 --seq-length 16384 --train-iters 2 --log-interval 1 --no-tensorboard "
    "--no-progress-bar --optimizer sgd "
)
KILOBYTES = 1_500_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_length_that_does_not_fit_on_one_process_trains_on_four(tmp_path: Path) -> None:
    """The MLP keeps 4 x 8192 fp32 numbers for each of 16,384 tokens: 2.1 GB, or a quarter of it."""

    def run(flags: str, processes: int) -> subprocess.CompletedProcess[str]:
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node={processes}"
        command = (
            f"ulimit -d {KILOBYTES}; exec {sys.executable} {launcher} {ROOT / 'pretrain_gpt.py'} {LIMITED} {flags}"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )

    alone, four = run("", 1), run("--context-parallel-size 4 --cp-comm-type p2p", 4)
    assert alone.returncode != 0 and "memory" in alone.stdout + alone.stderr
    assert four.returncode == 0, four.stderr
    assert "iteration 2/" in four.stdout + four.stderr
