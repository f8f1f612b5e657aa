"""Every flag that saves memory: predicted beside measured peaks, and adapters in 4 bits beside adapters in bf16. With
``-s -m ""`` each test prints its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.training.measured_memory import compare, fake, measure, settings
from tests.training.tiny_hf import write_model, write_tokenizer

FP8 = "--bf16 --fp8-emulate --fp8-format"
OFFLOAD = "--offload-activations --min-offloaded-tensor-size 4096 --activation-loading-horizon"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
FLAGS = {
    1: [
        "--bf16",
        f"{FP8} hybrid --fp8-recipe delayed",
        f"{FP8} hybrid --fp8-recipe tensorwise",
        f"{FP8} hybrid --fp8-recipe rowwise",
        f"{FP8} e4m3 --fp8-recipe blockwise",
        f"{FP8} hybrid --fp8-recipe mxfp8",
        f"{FP8} e2m1 --fp8-recipe nvfp4",
        f"{FP8} hybrid --first-last-layers-bf16",
        f"{OFFLOAD} 1",
        f"{OFFLOAD} 2",
        f"{OFFLOAD} 3",
        "--offload-activations --activation-loading-horizon 1 --recompute-granularity full --micro-batch-size 8",
        "--offload-activations --activation-loading-horizon 3 --recompute-granularity full --micro-batch-size 8",
        "--optimizer-cpu-offload",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
        "--optimizer muon",
    ],
    2: [
        f"{FP8} hybrid --fp8-param-gather",
        f"{FP8} hybrid --fp8-recipe tensorwise --fp8-param-gather",
        f"{OFFLOAD} 2 --bf16 {TP}",
        f"--optimizer-cpu-offload --bf16 {TP}",
        f"--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --bf16 {TP}",
        f"--optimizer muon --bf16 {TP}",
    ],
}
LORA = "--load {0} --data-path {0}/long.jsonl --lora-rank 4"
ADAPTERS = {
    1: [
        "--load {0} --data-path {0}/long.jsonl",
        LORA,
        f"{LORA} --use-dora",
        f"{LORA} --load-in-4bit",
        f"{LORA} --load-in-4bit --no-bnb-4bit-use-double-quant",
        f"{LORA} --load-in-4bit --use-dora",
        f"{LORA} --load-in-4bit --recompute-granularity full",
        f"{LORA} --fp8-format hybrid --fp8-emulate",
        f"{LORA} --load-in-4bit --optimizer-cpu-offload",
    ],
    2: [
        LORA,
        f"{LORA} --load-in-4bit",
        f"{LORA} --load-in-4bit {TP}",
        f"{LORA} --load-in-4bit --recompute-granularity full --offload-activations",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of width 256, and samples that fill sequences of 256 tokens."""
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path, hidden=256, positions=256)
    sample = {"prompt": "count: ", "completion": " ".join(str(i) for i in range(300))}
    (path / "long.jsonl").write_text(f"{json.dumps(sample)}\n" * 40)
    return path


def tuned(folder: Path) -> dict[int, list[str]]:
    return {world: [flags.format(folder) for flags in lines] for world, lines in ADAPTERS.items()}


def compare_each(layouts: dict[int, list[str]], folder: Path) -> None:
    errors = compare(layouts, folder, steps=8)
    assert len(errors) == sum(map(len, layouts.values()))
    assert max(map(abs, errors)) < 0.02


@pytest.mark.slow
def test_memory_of_every_flag(tmp_path: Path) -> None:
    compare_each(FLAGS, tmp_path)


@pytest.mark.slow
def test_memory_of_adapters(folder: Path, tmp_path: Path) -> None:
    compare_each(tuned(folder), tmp_path)


def test_weights_in_4_bits_take_less_than_in_bf16(folder: Path, tmp_path: Path) -> None:
    """Measured and predicted: both peaks, and at least what the linear layers' weights take less."""
    flags = [flags.format(folder) for flags in (LORA, f"{LORA} --load-in-4bit")]
    found = run_distributed(measure, 1, str(tmp_path), flags, 1)[0]
    said = [fake(settings(each, 1), 1) for each in flags]
    assert [step.peak for step in said] == pytest.approx(found, rel=0.02)
    assert found[1] < found[0] and said[0].parameters - said[1].parameters > 2**20
