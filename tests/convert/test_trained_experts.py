"""Checkpoints that a run on several processes wrote, as Hugging Face folders: of every family with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.convert.conversion import convert
from tests.convert.test_hf import assert_same_tensors, tensors_of
from tests.convert.tiny import EXPERTS, TINY, save_theirs
from tests.distributed import run_distributed

pytest.importorskip("transformers")
KINDS = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "deepseek-v2", "deepseek-v3", "gpt-oss")
KINDS += ("llama4-scout", "llama4-maverick", "qwen3-next-moe", "qwen3.5-moe", "granite-hybrid-moe", "nemotron-h-moe")
KINDS += ("kimi-linear-moe", "deepseek-v3.2", "glm-5")
FAST = ("mixtral", "deepseek-v3", "gpt-oss", "llama4-maverick")
"""Each way of routing, and of storing experts."""
FLAGS = "--mock-data --seq-length 16 --global-batch-size 4 --micro-batch-size 1 --train-iters 2 --lr 0.01 "
FLAGS += "--no-progress-bar --no-tensorboard"
SPREAD = "--expert-model-parallel-size 2 --hybrid-shard-degree 4"


def start(folder: Path, source: str, target: str, flags: str, rank: int, world: int) -> Run:
    paths = f"--load {folder}/{source} --save {folder}/{target} --log-dir {folder}/logs"
    config = read_settings(f"{FLAGS} {paths} {flags}".split(), PRESETS, world)
    return Run(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())


def train_and_save(rank: int, world: int, folder: Path, kinds: tuple[str, ...]) -> None:
    """One step from their weights with AdamW, with experts over two processes and each of these cut in two."""
    for kind in kinds:
        run = start(folder / kind, "hf", "spread", SPREAD, rank, world)
        run.trainer.train_step(next(run.batches))
        run.save()
        run.close()


def save_again(rank: int, world: int, folder: Path, kinds: tuple[str, ...]) -> None:
    """What they wrote, by one process that trains no further."""
    for kind in kinds:
        run = start(folder / kind, "spread", "one", "", rank, world)
        run.save()
        run.close()


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the kinds that are asked for."""
    folder = tmp_path_factory.mktemp("trained")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    kinds = tuple(item.callspec.params["kind"] for item in items)  # type: ignore[attr-defined]
    for kind in kinds:
        save_theirs(kind, folder / kind / "hf")
    run_distributed(train_and_save, 4, folder, kinds)
    run_distributed(save_again, 1, folder, kinds)
    return folder


def test_every_family_is_here() -> None:
    assert {TINY[kind][0] for kind in KINDS} == {TINY[kind][0] for kind in EXPERTS}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in KINDS]
)
def test_a_spread_checkpoint_is_exported_as_one_of_one_process(folder: Path, kind: str) -> None:
    own = folder / kind
    spread, one = (convert(own / name, own / f"{name}-hf", "hf", reference=own / "hf") for name in ("spread", "one"))
    assert_same_tensors(spread, one)
    before, after = tensors_of(own / "hf"), tensors_of(spread)
    assert before.keys() == after.keys()
    trained = [name for name in before if ".experts." in name and before[name].ndim > 1]
    assert trained and not any(torch.equal(before[name], after[name]) for name in trained)
