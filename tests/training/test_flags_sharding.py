"""What is gathered and reduced how often, counted in steps on fake tensors, and that it changes no result."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp.config import ConfigError, Layout
from smp.layers.heads.head import CHUNK_BYTES
from smp.models.presets import PRESETS
from smp.training.build import choose_backends
from smp.training.cost.describe import describe
from smp.training.cost.fake_step import StepMeasures, fake_step
from smp.training.cost.memory import estimate_memory
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import proves

SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 97 "
    "--mock-data --micro-batch-size 2 --train-iters 4 --no-tensorboard --no-progress-bar "
)
UNCUT: Any = SimpleNamespace(cp_exchange=None)
"""Stands for the context of a run whose sequences are whole: there is no process group."""
STRATEGIES = ("optim_grads_params", "optim_grads", "optim")


def measure(flags: str, world: int) -> StepMeasures:
    config = read_settings([*SMALL.split(), *flags.split()], PRESETS, world)
    kernels, _ = choose_backends(config, UNCUT, torch.device("cpu"), documents=False)
    return fake_step(config, Layout.from_config(config.parallel, world), kernels, "cpu")


def calls(measures: StepMeasures, kind: str, group: str = "dp_shard") -> int:
    return measures.counts.traffic[group, kind].calls


def test_nothing_is_gathered_that_is_there_or_not_needed() -> None:
    """Two blocks and the ends: four gathers forward, two backward. The head's is kept, the embedding's not needed."""
    step = measure("", 2)
    assert (calls(step, "all-gather"), calls(step, "reduce-scatter")) == (4 + 2, 4)
    tied = measure("--no-untie-embeddings-and-output-weights", 2)  # at both ends: in the root unit, which is kept
    assert (calls(tied, "all-gather"), calls(tied, "reduce-scatter")) == (3 + 2, 3)


@proves("data_parallel_sharding_strategy")
def test_what_is_not_sharded_is_communicated_once_per_step() -> None:
    """Three micro-batches on two ranks."""
    steps = {s: measure(f"--global-batch-size 12 --data-parallel-sharding-strategy {s}", 2) for s in STRATEGIES}
    counts = {s: (calls(step, "all-gather"), calls(step, "reduce-scatter")) for s, step in steps.items()}
    assert counts == {"optim_grads_params": (18, 12), "optim_grads": (4, 12), "optim": (4, 4)}
    peaks = [steps[s].peak for s in STRATEGIES]
    assert peaks == sorted(set(peaks)), "each takes more memory than the one before"


@proves("zero_hpz_partition_size")
def test_backward_passes_gather_secondary_shards() -> None:
    """Three micro-batches on four ranks, of which two share a secondary shard: of two blocks, in bf16."""
    flags = "--global-batch-size 24 --bf16"
    without, kept = (measure(f"{flags} {more}", 4) for more in ("", "--zero-hpz-partition-size 2"))
    assert calls(kept, "all-gather") == calls(without, "all-gather") - 3 * 2
    assert calls(kept, "all-gather", "secondary") == 3 * 2
    block = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)
    traffic = [of.counts.traffic["dp_shard", "all-gather"].sent for of in (without, kept)]
    assert traffic[0] - traffic[1] == 3 * 2 * block * 3 / 4
    assert kept.counts.traffic["secondary", "all-gather"].sent == 3 * 2 * block / 2
    assert kept.secondary == 2 * block // 2 == kept.peak - without.peak and without.secondary == 0
    assert kept.gradients == without.gradients
    words = [*SMALL.split(), *flags.split(), "--zero-hpz-partition-size", "2"]
    config = read_settings(words, PRESETS, 4)
    layout = Layout.from_config(config.parallel, 4)
    assert estimate_memory(config, layout, CHUNK_BYTES["cpu"]).secondary == kept.secondary
    assert "secondary shards" in describe(config, 4)


def test_replicas_reduce_once_per_step() -> None:
    """Two shards, two replicas, three micro-batches."""
    for strategy in STRATEGIES:
        flags = f"--global-batch-size 24 --hybrid-shard-degree 2 --data-parallel-sharding-strategy {strategy}"
        assert calls(measure(flags, 4), "all-reduce", "dp_replicate") == 4


def train(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    """Losses and norms of each strategy, with steps in which weights were gathered by an evaluation before."""
    os.chdir(folder)
    found = {}
    for strategy in STRATEGIES:
        flags = f"--global-batch-size 24 --bf16 --clip-grad 0.1 --eval-interval 2 --eval-iters 1 --log-dir {strategy} "
        flags += f"--hybrid-shard-degree 2 --data-parallel-sharding-strategy {strategy} --save {strategy}"
        run = Run(
            Pretraining(read_settings([*SMALL.split(), *flags.split()], PRESETS, world)),
            Process(rank, world, rank),
            torch.device("cpu"),
            StopSignal(),
        )
        assert run.run().status == "done"
        weights = torch.cat([p.to_local().flatten() for p in run.trainer.model.parameters()])  # type: ignore[operator]
        found[strategy] = weights.tolist()
        run.close()
    return found


def test_the_strategy_changes_no_result(tmp_path: Path) -> None:
    """Sums in another order: weights after four steps of replicated, sharded and accumulated training."""
    for found in run_distributed(train, 4, str(tmp_path)):
        want = torch.tensor(found["optim_grads_params"])
        assert found["optim_grads"] == found["optim_grads_params"], "the same sums"
        assert ((torch.tensor(found["optim"]) - want).norm() / want.norm()).item() < 1e-5


def test_a_pipeline_has_its_own_setting() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-sharding-strategy optim and a pipeline exclude each other"):
        read_settings(
            [*SMALL.split(), "--pipeline-model-parallel-size", "2", "--data-parallel-sharding-strategy", "optim"],
            PRESETS,
            2,
        )
