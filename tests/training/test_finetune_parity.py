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
    "dpo, full": "--data-path {0}/dpo.jsonl --objective dpo --dpo-label-smoothing 0.1",
    "dpo, lora": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4 --lora-target-modules value,gate",
    "dpo, table": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4 --dpo-reference precomputed "
    "--eval-interval 3",
}
LAYOUTS = {
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "shard 2": (2, ""),
    "replicas 2": (2, "--hybrid-shard-degree 1"),
    "tp 2 x pp 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "shard 2 x tp 2": (4, "--tensor-model-parallel-size 2 --recompute-granularity selective"),
}
STEPS = "--train-iters 3 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """All runs by layout and method, one start per number of processes."""
    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(folder)
    write_model(folder)
    write_samples(folder)
    out = {}
    layouts = {"alone": (1, "")} | LAYOUTS
    for world in (1, 2, 4):
        here = [name for name, (processes, _) in layouts.items() if processes == world]
        cases = [(layout, method) for layout in here for method in METHODS]
        flags = [_flags(folder, layouts[layout][1], method) for layout, method in cases]
        ranks = run_distributed(tune_all, world, flags)
        for i, case in enumerate(cases):
            out[case] = together([r[i] for r in ranks])
    return out


def _flags(folder: Path, layout: str, method: str) -> str:
    own = f"--load {folder} --log-dir {folder}/logs {STEPS} {METHODS[method].format(folder)} {layout}"
    return own


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(results: dict[tuple[str, str], dict[str, Any]], layout: str, method: str) -> None:
    got, want = results[layout, method], results["alone", method]
    assert len(want["losses"]) == 3 and len(set(want["losses"])) == 3
    for loss, other in zip(got["losses"], want["losses"], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
    assert len(want["gradients"]) == 3
    for step, gradients in enumerate(want["gradients"]):
        assert any(g.any() for g in gradients.values())
        errors = tensor_errors(got["gradients"][step], gradients, gradients)
        assert max(errors.values()) <= TOLERANCE, max(errors.items(), key=lambda item: item[1])
    if want["validation"] is not None:
        assert got["validation"][1] == pytest.approx(want["validation"][1], rel=TOLERANCE)


@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith("dpo")])
def test_dpo_begins_at_ln_2_exactly(results: dict[tuple[str, str], dict[str, Any]], method: str) -> None:
    for layout in ("alone", *LAYOUTS):
        first, margin = results[layout, method]["losses"][0], results[layout, method]["more"][0]["reward margin"]
        if method == "dpo, table":  # computed in batches of other shapes: products round otherwise
            assert first == pytest.approx(LN_2, rel=2e-7) and abs(margin) < 1e-6
        else:
            assert first == LN_2 and margin == 0.0
    last = results["alone", method]["more"][-1]
    assert last["reward margin"] > 0 and last["reward accuracy"] > 0.5


def test_only_adapters_are_trained(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    run = results["alone", "lora, unpacked"]
    assert set(run["initial"]) == {
        f"layers.{i}.{module}.lora.{part}"
        for i in range(4)
        for module in ("attention.query", "mlp.down")
        for part in ("a", "b")
    }
    assert set(results["alone", "full"]["initial"]) > {"embedding.weight", "head.weight", "layers.0.mlp.up.weight"}
