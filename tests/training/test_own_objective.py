"""An objective from outside of the package (examples/own_objective.py) trains in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from examples.own_objective import add
from smp.config.objectives import ObjectiveFacts
from smp.training import objectives
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")


def tune_own(rank: int, world_size: int, flags: list[str]) -> list[dict[str, Any]]:
    """``tune_all`` in a process that knows two more objectives."""
    add()
    add("plain", power=0.0)
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
