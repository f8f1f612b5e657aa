"""Every objective, with every reference, on all weights and on adapters, tied or not, trains alike over data-parallel
ranks, and every step trains all of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

OBJECTIVES = {
    "sft": "--data-path {0}/sft.jsonl",
    **{
        f"dpo, {reference}": f"--data-path {{0}}/dpo.jsonl --objective dpo --dpo-reference {reference}"
        for reference in ("adapters-off", "copy", "precomputed")
    },
}
TRAINED = {"all weights": "", "LoRA": "--lora-rank 4"}
LAYOUTS = {"alone": "", "shard 2": "", "replicas 2": "--hybrid-shard-degree 1"}
MODELS = {"llama": ("shard 2",), "tied llama": ("shard 2", "replicas 2"), "gpt2": ("shard 2",)}
"""And the layouts of two processes that each is trained in."""
STEPS = (
    "--train-iters 2 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd "
    "--weight-decay 0"  # a decay changes what has no gradient
)
METHODS = [
    (objective, trained)
    for objective in OBJECTIVES
    for trained in TRAINED
    if (objective, trained) != ("dpo, adapters-off", "all weights")  # refused: there are no adapters
]
Runs = dict[tuple[str, str, str, str], dict[str, Any]]
MARKS = {"llama": [pytest.mark.slow]}
"""An untied llama trains in every layout of test_finetune_parity.py."""


def in_layouts(layouts: dict[str, tuple[str, ...]]) -> list[Any]:
    """Rows of a model and a layout."""
    return [pytest.param(model, layout, marks=MARKS.get(model, [])) for model in layouts for layout in layouts[model]]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """By layout, model, objective and what is trained, of the models that are asked for; one start per number of
    processes."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["model"] for item in items if isinstance(item, pytest.Function)}
    folder = tmp_path_factory.mktemp("hf")
    write_samples(folder)
    for model in MODELS:
        place = folder / model.replace(" ", "-")
        write_tokenizer(place)
        write_model(place, model.split()[-1], layers=2, tied=model.startswith("tied"))
    out: Runs = {}
    for world in (1, 2):
        here = {model: ("alone",) if world == 1 else layouts for model, layouts in MODELS.items() if model in asked}
        cases = [(layout, model, *method) for model in here for layout in here[model] for method in METHODS]
        flags = [
            f"--load {folder / model.replace(' ', '-')} --log-dir {folder}/logs {STEPS} {LAYOUTS[layout]} "
            f"{OBJECTIVES[objective].format(folder)} {TRAINED[trained]}"
            for layout, model, objective, trained in cases
        ]
        ranks = run_distributed(tune_all, world, flags)
        out |= {case: together([rank[i] for rank in ranks]) for i, case in enumerate(cases)}
    return out


@pytest.mark.parametrize(("objective", "trained"), METHODS)
@pytest.mark.parametrize(("model", "layout"), in_layouts(MODELS))
def test_data_parallel_ranks_train_like_one(runs: Runs, layout: str, model: str, objective: str, trained: str) -> None:
    got, want = runs[layout, model, objective, trained], runs["alone", model, objective, trained]
    for loss, other in zip(got["losses"], want["losses"], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
    for step, gradients in enumerate(want["gradients"]):
        assert max(tensor_errors(got["gradients"][step], gradients, gradients).values()) <= TOLERANCE


@pytest.mark.parametrize(("objective", "trained"), METHODS)
@pytest.mark.parametrize(
    ("model", "layout"), in_layouts({model: ("alone", *layouts) for model, layouts in MODELS.items()})
)
def test_a_step_changes_every_parameter_that_requires_a_gradient(
    runs: Runs, model: str, layout: str, objective: str, trained: str
) -> None:
    run = runs[layout, model, objective, trained]
    assert ("head.weight" not in run["initial"]) == (model != "llama" or trained == "LoRA")
    for step, moved in enumerate(run["moved"]):
        still = run["initial"].keys() - moved
        assert {name for name in still if not without_gradient(name, step, model)} == set()


def without_gradient(name: str, step: int, model: str) -> bool:
    """What has a gradient of zero by theory: A of an adapter whose B is still 0, and a key's bias without RoPE, which
    adds the same to all scores of a query."""
    first = name.endswith(".lora.a") and step == 0
    return first or (name.endswith("key.bias") and model == "gpt2")
