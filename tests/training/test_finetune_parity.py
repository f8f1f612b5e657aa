"""Fine-tuning trains alike under every layout: full, LoRA and DPO, losses and all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

LN_2 = torch.tensor(2.0, dtype=torch.float64).log().float().item()
LORA = "--lora-rank 4 --lora-dropout 0.25"
METHODS = {
    "full": "--data-path {0}/sft.jsonl",
    "lora": f"--data-path {{0}}/sft.jsonl {LORA} --hidden-dropout 0.1",
    "lora, unpacked": f"--data-path {{0}}/sft.jsonl --packing off {LORA} --lora-target-modules query,down",
    "dora": "--data-path {0}/sft.jsonl --lora-rank 4 --use-dora",
    "dpo, full": "--data-path {0}/dpo.jsonl --objective dpo --dpo-label-smoothing 0.1",
    "dpo, lora": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4 --lora-target-modules value,gate",
    "dpo, table": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4 --dpo-reference precomputed "
    "--eval-interval 3",
    "ipo": "--data-path {0}/dpo.jsonl --objective dpo --dpo-loss-type ipo --lora-rank 4",
    "orpo": "--data-path {0}/dpo.jsonl --objective orpo",
    "kto, full": "--data-path {0}/kto.jsonl --objective kto --kto-desirable-weight 1.3",
    "reward": "--data-path {0}/dpo.jsonl --objective reward --reward-center-coefficient 0.01 --eval-interval 3",
    "reward, lora": "--data-path {0}/dpo.jsonl --objective reward --lora-rank 4 --eval-interval 3",
    "kto, lora": "--data-path {0}/kto.jsonl --objective kto --lora-rank 4 --eval-interval 3",
    "fp8, dpo": "--data-path {0}/dpo.jsonl --objective dpo --fp8-format hybrid --fp8-emulate",
    "fp8, kto": "--data-path {0}/kto.jsonl --objective kto --lora-rank 4 --fp8-format hybrid --fp8-emulate "
    "--fp8-recipe rowwise",
    "fp8, reward": "--data-path {0}/dpo.jsonl --objective reward --fp8-format hybrid --fp8-emulate",
}
LAYOUTS = {
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2 --trace-pipeline"),
    "shard 2": (2, ""),
    "replicas 2": (2, "--hybrid-shard-degree 1"),
    "tp 2 x pp 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "shard 2 x tp 2": (4, "--tensor-model-parallel-size 2 --recompute-granularity selective"),
    "cp 2": (2, "--context-parallel-size 2 --cp-comm-type p2p"),
    "cp 3": (3, "--context-parallel-size 3 --cp-comm-type p2p --recompute-granularity selective"),
    "cp 2 x tp 2 + sp": (
        4,
        "--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "cp 2 x pp 2": (4, "--context-parallel-size 2 --cp-comm-type all_gather --pipeline-model-parallel-size 2"),
    "cp 4": (
        4,
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--recompute-granularity full",
    ),
}
STEPS = "--train-iters 3 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd"


FAST = {
    "tp 2 + sp": ("lora", "dpo, full", "fp8, dpo", "dora", "reward, lora"),
    "pp 2": ("dpo, lora", "kto, lora", "fp8, reward"),
    "shard 2": ("lora", "kto, full", "reward", "fp8, kto"),
    "replicas 2": ("dpo, table",),
    "tp 2 x pp 2": ("lora, unpacked", "orpo"),
    "shard 2 x tp 2": ("full",),
    "cp 2": ("dpo, full", "reward"),
    "cp 3": ("lora, unpacked",),
    "cp 2 x tp 2 + sp": ("full", "ipo"),
    "cp 2 x pp 2": ("dpo, table",),
    "cp 4": ("full",),
}
"""Of the product of methods and layouts: every one of each."""
SLOW = {layout: tuple(method for method in METHODS if method not in fast) for layout, fast in FAST.items()}
Results = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module", params=[FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs by layout and method, one start per number of processes."""
    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder)
    out = {}
    layouts, chosen = {"alone": (1, "")} | LAYOUTS, {"alone": tuple(METHODS)} | request.param
    for world in (1, 2, 3, 4):
        here = [name for name, (processes, _) in layouts.items() if processes == world]
        cases = [(layout, method) for layout in here for method in chosen[layout]]
        flags = [_flags(folder, layouts[layout][1], method) for layout, method in cases]
        ranks = run_distributed(tune_all, world, flags)
        for i, case in enumerate(cases):
            out[case] = together([r[i] for r in ranks])
    assert (folder / "logs" / "pipeline_trace.json").is_file(), "--trace-pipeline, also with pairs"
    return out


def _flags(folder: Path, layout: str, method: str) -> str:
    return f"--load {folder} --log-dir {folder}/logs {STEPS} {METHODS[method].format(folder)} {layout}"


def methods(results: Results, layout: str) -> list[str]:
    return [method for there, method in results if there == layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(results: Results, layout: str) -> None:
    for method in methods(results, layout):
        got, want = results[layout, method], results["alone", method]
        assert len(want["losses"]) == 3 and len(set(want["losses"])) == 3
        for loss, other in zip(got["losses"], want["losses"], strict=True):
            assert abs(loss - other) <= TOLERANCE * abs(other), method
        assert len(want["gradients"]) == 3
        for step, gradients in enumerate(want["gradients"]):
            assert any(g.any() for g in gradients.values())
            errors = tensor_errors(got["gradients"][step], gradients, gradients)
            assert max(errors.values()) <= TOLERANCE, (method, max(errors.items(), key=lambda item: item[1]))
        if want["validation"] is not None:
            assert got["validation"][1] == pytest.approx(want["validation"][1], rel=TOLERANCE)


def test_dpo_begins_at_ln_2_exactly(results: Results) -> None:
    for (layout, method), result in results.items():
        if not method.startswith("dpo"):
            continue
        first, margin = result["losses"][0], result["more"][0]["reward margin"]
        if method == "dpo, table":  # computed in batches of other shapes: products round otherwise
            assert first == pytest.approx(LN_2, rel=2e-7) and abs(margin) < 1e-6, layout
        else:
            assert first == LN_2 and margin == 0.0, layout
        last = result["more"][-1]
        assert last["reward margin"] > 0 and last["reward accuracy"] > 0.5


def test_the_last_step_of_kto_has_a_divergence(results: Results) -> None:
    """It is cut off at 0, where layouts would agree whatever they compute."""
    for method in ("kto, full", "kto, lora"):
        assert results["alone", method]["more"][-1]["KL"] > 1e-3, method


def test_only_adapters_are_trained(results: Results) -> None:
    for method in methods(results, "alone"):
        trained = {name.partition(".lora.")[0].split(".", 2)[-1] for name in results["alone", method]["initial"]}
        if method == "lora, unpacked":
            assert trained == {"attention.query", "mlp.down"}
        elif method == "dpo, lora":
            assert trained == {"attention.value", "mlp.gate"}
        elif method in ("full", "dpo, full"):
            assert {"embedding.weight", "head.weight"} <= set(results["alone", method]["initial"])


def test_a_table_of_the_reference_leaves_tied_weights_trainable(tmp_path: Path) -> None:
    """The forward passes for it come before the optimizer, and FSDP leaves the root unit, which has the tied matrix,
    gathered after them: an optimizer over those parameters would train nothing of them."""
    write_tokenizer(tmp_path)
    write_model(tmp_path, "gpt2")
    write_samples(tmp_path)
    method = "--data-path {0}/dpo.jsonl --objective dpo --dpo-reference precomputed"
    flags = f"--load {tmp_path} --log-dir {tmp_path}/logs {STEPS} {method.format(tmp_path)}"
    alone, shared = (together([rank[0] for rank in run_distributed(tune_all, world, [flags])]) for world in (1, 2))
    for loss, other in zip(shared["losses"], alone["losses"], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
    for step, gradients in enumerate(alone["gradients"]):
        assert max(tensor_errors(shared["gradients"][step], gradients, gradients).values()) <= TOLERANCE
