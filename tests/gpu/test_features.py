"""What a run can do, on a GPU as on a CPU: the same losses and weights, in products that are not rounded to TF32."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from tests.training.flag_runs import Run, clean_process, run_here
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer

pytestmark = pytest.mark.gpu
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
FP8 = "--fp8-format hybrid --fp8-emulate --fp8-recipe"
OFFLOAD = "--num-layers 4 --offload-activations"
PRETRAINING = [
    "",
    "--position-embedding-type learned_absolute --normalization LayerNorm --no-swiglu --no-disable-bias-linear",
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "--window-size 6",
    "--recompute-granularity full",
    "--recompute-granularity selective --global-batch-size 8",
    "--compile",
    EXPERTS,
    f"{EXPERTS} {SIGMOID} --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate --moe-layer-freq 2",
    f"{EXPERTS} {SIGMOID} --kernels triton",
    f"{EXPERTS} --moe-router-pre-softmax --kernels triton",
    f"{EXPERTS} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --recompute-granularity selective",
    f"{OFFLOAD} --min-offloaded-tensor-size 1",
    f"{OFFLOAD} --recompute-granularity full --optimizer-cpu-offload",
    "--optimizer-cpu-offload",
    "--optimizer muon",
    "--optimizer sgd",
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
    f"{FP8} tensorwise",
    f"{FP8} rowwise {OFFLOAD} --recompute-granularity full",
    f"{FP8} delayed",
]
TUNING = {
    "full": "--data-path {0}/sft.jsonl",
    "lora": "--data-path {0}/sft.jsonl --lora-rank 4 --lora-dropout 0.25",
    "4 bits": "--data-path {0}/sft.jsonl --lora-rank 4 --load-in-4bit",
    "dpo": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4",
    "orpo": "--data-path {0}/dpo.jsonl --objective orpo",
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """fp32 products of fp32 numbers, also on a GPU."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    return monkeypatch


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("flags", PRETRAINING)
def test_pretraining_is_as_on_a_cpu(exact: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> None:
    is_as_on_a_cpu(exact, tmp_path, flags)


@pytest.mark.parametrize(
    "flags",
    [
        f"{EXPERTS} --compile",
        f"{EXPERTS} {SIGMOID} --moe-shared-expert-intermediate-size 24 --compile",
        f"{EXPERTS} --no-swiglu --quick-geglu --softmax-type learnable --compile",
        f"{EXPERTS} --moe-aux-loss-coeff 0.1 --recompute-granularity selective --compile",
    ],
)
def test_compiled_experts_are_as_on_a_cpu(exact: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> None:
    """Which --compile leaves out on CUDA until this has passed there."""
    exact.setattr("smp.training.build.compiles_experts", lambda device: True)
    is_as_on_a_cpu(exact, tmp_path, flags)


def is_as_on_a_cpu(exact: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> None:
    """Adam's first steps divide gradients by themselves: what is near zero takes a sign that rounding decides."""
    sgd = "" if "--optimizer" in flags or "exp-avg" in flags else "--optimizer sgd --lr 0.1"
    gpu = run_here(tmp_path / "gpu", f"{flags} {sgd} --seq-length 16")
    with exact.context() as patch:
        without_gpu(patch)
        plain = flags.replace("--kernels triton", "").replace("--compile", "")  # one needs a GPU, one a minute
        cpu = run_here(tmp_path / "cpu", f"{plain} {sgd} --seq-length 16")
    assert gpu.code == cpu.code == 0, gpu.err + cpu.err
    assert all(weight.is_cuda for weight in gpu.final.values()), "the run was not on the GPU"
    assert gpu.losses == pytest.approx(cpu.losses, rel=1e-3 if "fp8" in flags else 2e-5)
    assert moved(gpu, gpu) and apart(gpu, cpu) < (0.1 if "fp8" in flags or not sgd else 1e-3) * moved(cpu, cpu)


def moved(run: Run, start: Run) -> float:
    """L2 norm of what training changed."""
    return sum(float((run.final[n].cpu() - start.initial[n].cpu()).square().sum()) for n in run.final) ** 0.5


def apart(run: Run, other: Run) -> float:
    return sum(float((run.final[n].cpu() - other.final[n].cpu()).square().sum()) for n in run.final) ** 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path, layers=2, hidden=64)
    write_samples(path)
    return path


def tuned(folder: Path, logs: Path, flags: str) -> list[dict[str, Any]]:
    """What ``finetune.py`` logs."""
    steps = "--train-iters 3 --seq-length 48 --global-batch-size 4 --lr 0.02 --optimizer sgd --log-interval 1"
    words = f"--load {folder} --log-dir {logs} --no-tensorboard --no-progress-bar {steps} {flags}".split()
    with clean_process():
        assert finetune.main(words) == 0
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", TUNING)
def test_fine_tuning_is_as_on_a_cpu(exact: pytest.MonkeyPatch, tmp_path: Path, folder: Path, method: str) -> None:
    flags = TUNING[method].format(folder)
    os.chdir(tmp_path)
    gpu = tuned(folder, tmp_path / "gpu", flags)
    with exact.context() as patch:
        without_gpu(patch)
        cpu = tuned(folder, tmp_path / "cpu", flags)
    names = [name for name in ("lm loss", "dpo loss", "orpo loss", "loss") if name in cpu[0]]
    assert names and len(gpu) == len(cpu) == 3
    for name in (*names, "grad norm"):
        assert [row[name] for row in gpu] == pytest.approx([row[name] for row in cpu], rel=1e-3), name
