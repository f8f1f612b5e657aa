"""An objective from outside of the package: all that it takes is in this file, and it trains in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from smp.config.objectives import ObjectiveFacts
from smp.data.loader import RankBatch
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.training import objectives
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.contract import Implementation, Surroundings, answer_micro_batches
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")


@dataclass(frozen=True)
class Focal:
    """-(1 - p)^power log p of each token of an answer, a mean over tokens: what is likely already counts less (Lin et
    al. 2017, arXiv 1708.02002)."""

    around: Surroundings
    power: float
    metrics: tuple[str, ...] = ("entropy",)

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        def judge(tokens: TokenValues) -> Judged:
            assert tokens.entropy is not None
            with torch.enable_grad():
                log_p = tokens.values.detach().double().requires_grad_()
                losses = torch.where(tokens.counted, -((1 - log_p.exp()) ** self.power) * log_p, 0.0)
                loss = losses.sum() / max(num_valid, 1)
                (slopes,) = torch.autograd.grad(loss, log_p)
            return Judged(loss.detach().float(), slopes.float(), {"entropy": tokens.entropy.double().sum()})

        answers = AnswerLoss(judge, entropy=True)
        return answer_micro_batches(batch, lambda _: answers, self.around.device, self.around.context.cp_group)


def tune_own(rank: int, world_size: int, flags: list[str]) -> list[dict[str, Any]]:
    """``tune_all`` in a process that knows two more objectives."""
    for name, power in (("focal", 2.0), ("plain", 0.0)):
        facts = ObjectiveFacts("likelihood of answers, of what is unlikely more", of_answers=True)
        build = Implementation(lambda config, around, power=power: Focal(around, power))  # type: ignore[misc]
        objectives.add(name, facts, build)
    return tune_all(rank, world_size, flags)


LAYOUTS = {
    "tp 2 + sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp 2": "--pipeline-model-parallel-size 2",
    "cp 2": "--context-parallel-size 2",
    "shard 2": "--lora-rank 4",
}
STEPS = "--train-iters 2 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder)
    shared = f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs {STEPS}"
    alone = {
        "focal": "--objective focal",
        "focal, lora": "--objective focal --lora-rank 4",
        "plain": "--objective plain",
        "sft": "--packing off",
    }
    together_with = {layout: f"--objective focal {flags}" for layout, flags in LAYOUTS.items()}
    out: dict[str, dict[str, Any]] = {}
    for world, cases in ((1, alone), (2, together_with)):
        ranks = run_distributed(tune_own, world, [f"{shared} {flags}" for flags in cases.values()])
        out |= {name: together([rank[i] for rank in ranks]) for i, name in enumerate(cases)}
    return out


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["losses"] == pytest.approx(want["losses"], rel=TOLERANCE) and len(set(want["losses"])) == 2
    for step, gradients in enumerate(want["gradients"]):
        assert any(g.any() for g in gradients.values())
        assert max(tensor_errors(got["gradients"][step], gradients, gradients).values()) <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_on_one_rank(runs: dict[str, dict[str, Any]], layout: str) -> None:
    want = runs["focal, lora" if "lora" in LAYOUTS[layout] else "focal"]
    assert_equal(runs[layout], want)
    for step, metrics in enumerate(want["more"]):
        assert metrics["entropy"] > 0.1
        assert runs[layout]["more"][step]["entropy"] == pytest.approx(metrics["entropy"], rel=1e-5)


def test_slopes_of_tokens_are_their_gradients(runs: dict[str, dict[str, Any]]) -> None:
    """With power 0 it is the cross-entropy of tokens, which another path computes."""
    assert_equal(runs["plain"], runs["sft"])
    assert runs["focal"]["losses"][0] < runs["plain"]["losses"][0]


def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match="an objective dpo already"):
        objectives.add("dpo", ObjectiveFacts("another one"), objectives.IMPLEMENTATIONS["dpo"])
