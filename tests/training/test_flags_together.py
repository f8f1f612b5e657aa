"""What saves memory or time goes together: each pair computes what it should, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.flag_runs import Run, Runs

LAYERS = "--num-layers 4 --seq-length 16"
OFFLOAD = "--offload-activations --recompute-granularity full"
HOST = "--optimizer-cpu-offload"
FP8 = "--fp8-format hybrid --fp8-emulate --fp8-recipe"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-enable-expert-bias"
EXPERTS += " --moe-router-score-function sigmoid"
MUON = "--optimizer muon"
SMALL = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("together"))


def same_bits(ours: Run, other: Run) -> None:
    assert ours.losses == other.losses and len(ours.losses) == 3
    for name, tensor in other.final.items():
        assert torch.equal(ours.final[name], tensor), name


@pytest.mark.parametrize(
    "beside",
    [
        f"{FP8} delayed",
        f"{FP8} tensorwise",
        f"{FP8} rowwise --first-last-layers-bf16",
        EXPERTS,
        MUON,
        SMALL,
        f"{EXPERTS} {MUON}",
        f"{EXPERTS} {SMALL}",
    ],
)
def test_offload_changes_no_bit(runs: Runs, beside: str) -> None:
    there = runs(f"{LAYERS} --recompute-granularity full {beside}")
    same_bits(runs(f"{LAYERS} {OFFLOAD} {beside}"), there)


@pytest.mark.parametrize("beside", [f"{FP8} delayed", EXPERTS, OFFLOAD])
def test_steps_on_the_host_change_no_bit(runs: Runs, beside: str) -> None:
    there = runs(f"{LAYERS} {beside}")
    same_bits(runs(f"{LAYERS} {HOST} {beside}"), there)


@pytest.mark.parametrize("beside", [f"{FP8} delayed {MUON}", f"{FP8} delayed {SMALL}", f"{EXPERTS} {MUON}"])
def test_a_resume_goes_on_to_the_same_bits(runs: Runs, beside: str) -> None:
    whole = runs(f"{LAYERS} {beside}")
    first = runs.fresh(f"{LAYERS} {beside} --save ck --exit-interval 2")
    assert first.code == 0, first.err
    second = runs.fresh(f"{LAYERS} {beside} --load {Path(first.folder) / 'ck'}")
    assert second.code == 0, second.err
    assert second.losses == whole.losses[2:]
    for name, tensor in whole.final.items():
        assert torch.equal(second.final[name], tensor), name


def test_a_threshold_above_all_tensors_is_told(runs: Runs) -> None:
    run = runs(f"{LAYERS} --offload-activations --min-offloaded-tensor-size 1000000")
    assert "--offload-activations has copied nothing" in run.out
    assert "has copied nothing" not in runs(f"{LAYERS} --offload-activations --min-offloaded-tensor-size 100").out


def test_scales_are_not_of_the_optimizer(runs: Runs) -> None:
    """Without its moments a run goes on in FP8 at once, which it would not without a history."""
    first = runs.fresh(f"{LAYERS} {FP8} delayed --optimizer sgd --save ck --exit-interval 2")
    assert first.code == 0, first.err
    whole = runs(f"{LAYERS} {FP8} delayed --optimizer sgd")
    second = runs.fresh(f"{LAYERS} {FP8} delayed --optimizer sgd --no-load-optim --load {first.folder / 'ck'}")
    assert second.code == 0 and second.losses == whole.losses[2:], second.err
    assert "history of FP8 scales" not in second.out


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_selective_recompute_keeps_products_of_8_bits(runs: Runs, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Those of torch, which a CPU computes too, though slowly: counted, for 2 layers of 7 products."""
    monkeypatch.setattr("smp.training.eight_bit._check_device", lambda *_: None)
    flags = f"--num-layers 2 --seq-length 16 --bf16 --fp8-format hybrid --fp8-recipe {recipe}"
    counted = {
        how: runs.fresh(f"{flags} --recompute-granularity {how}", count_ops=True)
        for how in ("none", "selective", "full")
    }
    assert all(run.code == 0 for run in counted.values()), counted["none"].err
    products = {how: run.ops["_scaled_mm"] for how, run in counted.items()}
    assert products["none"] == products["selective"] < products["full"]
    assert counted["none"].losses == counted["selective"].losses == counted["full"].losses


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (f"{HOST} {SMALL}", "--optimizer-cpu-offload keeps Adam's moments in fp32"),
        (f"{HOST} {MUON}", "--optimizer-cpu-offload"),
        (f"{SMALL} {MUON}", "--exp-avg-dtype"),
        (f"{FP8} blockwise {EXPERTS}", "--fp8-recipe blockwise"),
    ],
)
def test_what_does_not_go_together_is_one_line(runs: Runs, flags: str, named: str) -> None:
    run = runs.fresh(f"{LAYERS} {flags}")
    assert run.code == 2 and run.err.count("\n") == 1 and named in run.err, run.err
