"""A model that is no decoder goes through a whole run, with what the protocol asks and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smp.config import ConfigError, ModelConfig
from smp.layers import VocabParallelEmbedding
from smp.layers.heads.head import ModelOutput, VocabParallelHead
from smp.models.micro_batch import MicroBatch
from smp.models.protocol import Model
from smp.parallel.context import ParallelContext
from smp.training import build
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE
from tests.training.tuning_lab import pretrain, together

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --lr 0.1 --optimizer sgd --mock-data --vocab-size 97 "
    "--seq-length 16 --train-iters 3 --micro-batch-size 2 --global-batch-size 8 --no-tensorboard --no-progress-bar "
    "--eval-interval 3 --eval-iters 1 --save {0}/{1} --log-dir {0}/{1}"
)


class Bigram(Model):
    """The next token by the current one alone."""

    def __init__(self, config: ModelConfig, context: ParallelContext, **_: Any) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.config, self.steps = config, 0
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
            self.head: VocabParallelHead = VocabParallelHead(config.vocab_size, config.hidden_size, context)

    def fsdp_units(self) -> list[nn.Module | list[nn.Module]]:
        return [self.embedding, self.head]

    def forward(self, micro_batch: MicroBatch) -> ModelOutput:
        x = self.embedding(micro_batch.input_ids.view(-1))
        assert micro_batch.labels is not None and micro_batch.loss_weights is not None
        return self.head(x, micro_batch.labels.reshape(-1), micro_batch.loss_weights.reshape(-1))  # type: ignore[no-any-return]

    def end_step(self, applied: torch.Tensor) -> None:
        self.steps += int(applied)


def train(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "new_model", Bigram)
        return pretrain(rank, world_size, flags)


def refused(rank: int, world_size: int, flags: list[str]) -> list[str]:
    out = []
    for each in flags:
        with pytest.raises(ConfigError) as error:
            train(rank, world_size, each)
        out.append(str(error.value))
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return together(run_distributed(train, 1, RUN.format(tmp_path_factory.mktemp("alone"), "run")))


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"], ids=["shard 2", "tp 2"])
def test_it_trains_in_layouts_as_on_one_rank(alone: dict[str, Any], flags: str, tmp_path: Path) -> None:
    got = together(run_distributed(train, 2, f"{RUN.format(tmp_path, 'run')} {flags}"))
    assert got["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE) and len(set(got["losses"])) == 3
    assert got["losses"][2] < got["losses"][0]
    assert got["validation"][1] == pytest.approx(alone["validation"][1], rel=TOLERANCE)
    for name, weight in alone["final"].items():
        assert torch.allclose(got["final"][name], weight, rtol=TOLERANCE, atol=1e-7), name
    assert (tmp_path / "run" / "latest").read_text(encoding="utf-8").strip() == "iter_0000003"


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    asked = ["--context-parallel-size 2", "--pipeline-model-parallel-size 2"]
    flags = [f"{RUN.format(tmp_path, i)} {flag}" for i, flag in enumerate(asked)]
    assert run_distributed(refused, 2, flags)[0] == [
        "--context-parallel-size: Bigram has no context parallelism; leave it out",
        "--pipeline-model-parallel-size: Bigram cannot be cut into stages; leave it out",
    ]
