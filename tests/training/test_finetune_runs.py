"""What whole fine-tuning runs do: packing, resuming in another layout, memory, files, and the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from smp.kernels.attention import AttentionChoice, AttentionShape, choose_attention
from smp.training import build
from tests.distributed import run_distributed
from tests.parity.result import layer_norms, layer_of
from tests.training.flag_runs import CountOps, clean_process
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path)
    write_samples(path)
    return path


def flags(folder: Path, *more: str) -> str:
    own = f"--load {folder} --log-dir {folder}/logs --data-path {folder}/sft.jsonl --seq-length 48 --lr 0.02"
    return " ".join([own, *more])


def run(folder: Path, *more: str, world: int = 1) -> dict[str, Any]:
    return together([r[0] for r in run_distributed(tune_all, world, [flags(folder, *more)])])


def test_packed_samples_train_as_separate_ones(folder: Path) -> None:
    """The same samples, all of them in one step: 57 sequences of one sample, or as many as packing needs."""
    data = "--split 1,0,0 --train-iters 1 --optimizer sgd"
    packed = _count(folder, "best-fit")
    assert packed < 40
    separate, together_ = run_distributed(
        tune_all,
        1,
        [
            flags(folder, data, "--packing off --global-batch-size 60 --micro-batch-size 4"),
            flags(folder, data, f"--packing best-fit --global-batch-size {packed}"),
        ],
    )[0]
    assert together_["losses"][0] == pytest.approx(separate["losses"][0], rel=1e-6)
    want, got = separate["gradients"][0], together_["gradients"][0]
    norms = layer_norms(want)
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 1e-6 * norms[layer_of(name)], name


def _count(folder: Path, packing: str) -> int:
    """Sequences that the samples need."""
    from smp.training.finetune_settings import read_finetune_settings

    argv = flags(folder, f"--split 1,0,0 --train-iters 1 --packing {packing}").split()
    data = read_finetune_settings(argv, 1)[1]
    assert data is not None
    return len(data.train)


LORA = "--lora-rank 4 --global-batch-size 4 --train-iters 4 --optimizer adam --adam-eps 1e-4"


def test_an_adapter_checkpoint_goes_on_in_another_layout(folder: Path, tmp_path: Path) -> None:
    whole = run(folder, LORA)
    saved = f"--save {tmp_path} --resume"
    first = run(folder, LORA, saved, "--exit-interval 2", "--tensor-model-parallel-size 2 --sequence-parallel", world=2)
    assert len(first["losses"]) == 2
    manifest = json.loads((tmp_path / "iter_0000002" / "manifest.json").read_bytes())
    assert all(".lora." in name for name in manifest["tensors"]), "the frozen model is not saved again"
    second = run(folder, LORA, saved, "--pipeline-model-parallel-size 2", world=2)
    losses = [*first["losses"], *second["losses"]]
    assert len(losses) == 4
    assert losses == pytest.approx(whole["losses"], rel=1e-5)
    for name, tensor in whole["final"].items():
        moved = (tensor - whole["initial"][name]).norm()
        assert (second["final"][name] - tensor).norm() <= 1e-4 * moved, name


def test_a_resume_in_the_same_layout_is_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    whole, _, second = run_distributed(
        tune_all,
        1,
        [
            flags(folder, LORA),
            flags(folder, LORA, f"--save {tmp_path} --resume --exit-interval 2"),
            flags(folder, LORA, f"--save {tmp_path} --resume"),
        ],
    )[0]
    assert second["losses"] == whole["losses"][2:]
    assert all(torch.equal(second["final"][n], t) for n, t in whole["final"].items())


def test_memory_of_the_optimizer_is_that_of_the_adapters_and_the_base_rests_in_bf16(folder: Path) -> None:
    runs = run_distributed(
        tune_all,
        1,
        [flags(folder, LORA, "--bf16"), flags(folder, "--global-batch-size 4 --train-iters 1"), flags(folder, LORA)],
    )[0]
    bf16, full, fp32 = runs
    adapters = sum(t.numel() for t in bf16["final"].values())
    weights = sum(t.numel() for t in full["final"].values())
    assert bf16["optimizer"] == 2 * 4 * adapters, "Adam's two moments, fp32"
    assert full["optimizer"] >= 2 * 4 * weights > 5 * bf16["optimizer"]
    assert bf16["dtypes"] == ({"torch.float32"}, {"torch.bfloat16"})
    assert fp32["dtypes"] == ({"torch.float32"}, {"torch.float32"})
    assert bf16["losses"] != fp32["losses"] and bf16["losses"] == pytest.approx(fp32["losses"], rel=0.02)


def command(folder: Path, text: str) -> tuple[int, str, str]:
    """finetune.py in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with clean_process(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            os.environ.pop(name, None)
        os.chdir(folder)
        code = finetune.main(text.split())
    return code, out.getvalue(), err.getvalue()


def test_a_preview_prints_samples_and_trains_nothing(folder: Path) -> None:
    code, out, _ = command(folder, flags(folder, "--preview 2"))
    assert code == 0 and out.count("--- text") == 2 and "\x1b[1;32m" in out
    assert "samples: 60 of 60 used" in out and "% full" in out


def test_a_dry_run_shows_the_settings(folder: Path) -> None:
    code, out, _ = command(folder, flags(folder, "--lora-rank 4 --train-epochs 2 --dry-run"))
    assert code == 0 and "lora_alpha: 8.0" in out and "hidden_size: 32" in out and "train_epochs: 2" in out


def test_a_run_says_what_it_trains_and_leaves_an_adapter(folder: Path, tmp_path: Path) -> None:
    more = f"--save {tmp_path} --lora-rank 2 --train-epochs 1 --global-batch-size 4 --eval-interval 4 --log-interval 1"
    code, out, _ = command(folder, flags(folder, more, "--no-tensorboard --no-progress-bar"))
    assert code == 0
    parameters = 4 * 2 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 64))
    assert f"trained parameters: {parameters:,} of" in out
    assert "tokens/s: " in out and "peak memory (GB): " in out and "validation loss at iteration" in out
    assert "adapter in peft's format" in out and (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (2, 4, 7)


def test_every_pass_uses_the_attention_that_was_chosen_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those before the first step: an evaluation, and a reference's table of answers. Packed sequences have
    documents, which not every backend takes; pairs have none."""
    shapes = []

    def choose(wish: Any, device: torch.device, shape: AttentionShape, **options: Any) -> AttentionChoice:
        shapes.append(shape)
        return choose_attention(wish, device, shape, **options)

    monkeypatch.setattr(build, "choose_attention", choose)
    pairs = f"--data-path {folder}/dpo.jsonl --objective dpo --lora-rank 2 --dpo-reference precomputed"
    common = "--attention-backend math --train-iters 1 --global-batch-size 4 --no-tensorboard --no-progress-bar"
    for more, documents in (("--eval-interval 1 --packing best-fit", True), (pairs, False)):
        with CountOps(counts := Counter[str]()):
            code, out, err = command(folder, flags(folder, f"{common} {more}"))
        assert code == 0, err
        assert "attention: math (--attention-backend math)" in out
        assert counts["bmm"] > 0 and not any("scaled_dot_product" in name for name in counts)
        (shape,) = shapes  # decided once
        assert shape.masked is documents and shape.other_lengths == (1, 47)  # columns of padding are left out
        shapes.clear()


ONE = "--load {0} --data-path {0}/sft.jsonl --train-iters 1"
BAD: dict[str, tuple[str, str]] = {
    "no model": ("--train-iters 1", "give --load"),
    "no data": ("--load {0} --train-iters 1", "give --data-path"),
    "no length": ("--load {0} --data-path {0}/sft.jsonl", "give --train-epochs, --train-iters"),
    "two lengths": ("--load {0} --data-path x --train-iters 1 --train-epochs 2", "both given"),
    "no such folder": ("--load {0}/gone --data-path x --train-iters 1", "there is no such folder"),
    "not a model": ("--load {0}/logs --data-path x --train-iters 1", "neither a Hugging Face model nor"),
    "named size": ("--load {0} --model debug --data-path x --train-iters 1", "leave it out"),
    "architecture": ("--load {0} --hidden-size 64 --data-path x --train-iters 1", "with --hidden-size 32, not 64"),
    "no such file": ("--load {0} --data-path {0}/gone.jsonl --train-iters 1", "no such file"),
    "no adapters": ("--load {0} --data-path x --train-iters 1 --lora-alpha 3", "give --lora-rank or --load-adapter"),
    "no such layer": (f"{ONE} --lora-rank 2 --lora-target-modules atention", "chooses no linear layer"),
    "brought": ("--load {0} --data-path x --train-iters 1 --load-adapter a --lora-rank 3", "brings it"),
    "for dpo": ("--load {0} --data-path x --train-iters 1 --dpo-beta 0.3", "for --objective dpo"),
    "off": (f"{ONE} --objective dpo --dpo-reference adapters-off", "no adapters to switch off"),
    "packed pairs": (f"{ONE} --objective dpo --packing best-fit", "are not packed"),
    "not pairs": (f"{ONE} --objective dpo", "a pair needs chosen and rejected"),
    "resume": ("--load {0} --data-path x --train-iters 1 --resume", "give --save"),
    "smoothing": ("--load {0} --data-path x --train-iters 1 --objective dpo --dpo-label-smoothing 0.5", "below 0.5"),
    "template": ("--load {0} --data-path {0}/sft.jsonl --train-iters 1 --chat-template {0}/gone", "cannot be read"),
    "validation": (f"{ONE} --eval-interval 1 --split 999,1,0", "leaves none of 60 samples for validation"),
    "pretraining's": ("--load {0} --mock-data", "unknown flag --mock-data"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_line(folder: Path, case: str) -> None:
    text, why = BAD[case]
    (folder / "logs").mkdir(exist_ok=True)
    code, _, err = command(folder, text.format(folder) + " --no-tensorboard --no-progress-bar")
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and why in lines[0], err


@pytest.mark.slow
def test_a_compiled_model_trains_adapters_alike(folder: Path) -> None:
    more = f"{LORA} --lora-dropout 0.2 --seq-length 32"
    plain, compiled = run(folder, more), run(folder, more, "--compile --tensor-model-parallel-size 2", world=2)
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
