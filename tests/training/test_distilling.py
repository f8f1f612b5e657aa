"""Distillation runs: the loss by a formula of its own, every layout like one rank, and what --logits-... keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.distill_lab import divergence
from tests.training.flag_runs import clean_process, proves
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

STEPS = (
    "--objective distill --train-iters 3 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 "
    "--optimizer sgd"
)
METHODS = {
    "jsd": "--teacher {0}/big",
    "forward": "--teacher {0}/big --beta 0 --temperature 2",
    "reverse, lora": "--teacher {0}/big --beta 1 --lora-rank 4 --kd-loss-alpha 0.7",
    "on policy": "--teacher {0}/big --lmbda 0.7 --max-completion-length 7 --generation-batch-size 3",
    "all tokens": "--logits-load-dir {0}/all",
    "likeliest": "--logits-load-dir {0}/few",
}
LAYOUTS = {
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "shard 2": (2, ""),
    "cp 2": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "tp 2 x pp 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
}
FAST = {
    "tp 2 + sp": ("jsd", "likeliest", "on policy"),
    "pp 2": ("reverse, lora", "on policy"),
    "shard 2": ("forward", "on policy", "likeliest"),
    "cp 2": ("jsd", "likeliest"),
    "tp 2 x pp 2": ("all tokens",),
}
SLOW = {layout: tuple(method for method in METHODS if method not in fast) for layout, fast in FAST.items()}
SAVED = {"all": "--logits-top-k 1000 --logits-save-dtype fp32", "few": "--logits-top-k 5"}


def flags(folder: Path, method: str, *more: str) -> str:
    """A whole command line; {0} is the folder."""
    data = "" if "--data-path" in method else "--data-path {0}/sft.jsonl"
    load = "" if "--load " in method else "--load {0}"
    return f"{load} --log-dir {{0}}/logs {data} {STEPS} {method} {' '.join(more)}".format(folder)


def saving(folder: Path, name: str) -> str:
    words = flags(folder, f"--load {{0}}/big --logits-save-dir {{0}}/{name} {SAVED[name]}")
    return words.replace("--train-iters 3", "").replace("--lr 0.02", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a deeper teacher of another family that caps its logits, and what the teacher said, written by
    two ways of cutting it."""
    folder = tmp_path_factory.mktemp("distill")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(100, 130)]}))
    write_samples(folder)
    (folder / "big").mkdir()
    write_tokenizer(folder / "big")
    write_model(folder / "big", "gemma2", layers=3)
    other = folder / "other"
    write_model(other, layers=1)
    write_tokenizer(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (other / name).read_text().replace('"<|im_end|>"', '"<|end|>"')
        (other / name).write_text(text)
    run_distributed(tune_all, 1, [saving(folder, "few")])
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --cp-comm-type all_gather"
    run_distributed(tune_all, 4, [f"{saving(folder, 'all')} {layout}"])
    return folder


Results = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module", params=[FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def results(request: pytest.FixtureRequest, folder: Path) -> Results:
    """Runs by layout and method, one start per number of processes."""
    out = {}
    layouts, chosen = {"alone": (1, "")} | LAYOUTS, {"alone": tuple(METHODS)} | request.param
    for world in (1, 2, 4):
        here = [name for name, (processes, _) in layouts.items() if processes == world]
        cases = [(layout, method) for layout in here for method in chosen[layout]]
        ranks = run_distributed(tune_all, world, [flags(folder, METHODS[m], layouts[where][1]) for where, m in cases])
        for i, case in enumerate(cases):
            out[case] = together([r[i] for r in ranks])
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(results: Results, layout: str) -> None:
    for there, method in results:
        if there != layout:
            continue
        got, want = results[layout, method], results["alone", method]
        assert got["losses"] == pytest.approx(want["losses"], rel=TOLERANCE), method
        assert got["norms"] == pytest.approx(want["norms"], rel=TOLERANCE), method
        for step, gradients in enumerate(want["gradients"]):
            assert max(tensor_errors(got["gradients"][step], gradients, gradients).values()) <= TOLERANCE, method
        assert max(tensor_errors(got["final"], want["final"], want["final"]).values()) <= TOLERANCE, method


def test_what_was_kept_of_all_tokens_is_the_teacher(results: Results) -> None:
    live, kept = results["alone", "jsd"], results["alone", "all tokens"]
    assert kept["losses"] == pytest.approx(live["losses"], rel=1e-6)
    assert 0 < results["alone", "likeliest"]["losses"][0] < live["losses"][0], "the rest as one token: a lower bound"


def test_completions_of_the_model_are_trained_on(results: Results) -> None:
    steps = results["alone", "on policy"]["more"]
    shares = [step["on policy"] for step in steps]
    assert 0 < sum(shares) < len(shares), "of three steps some, by the seed"
    for step in steps:
        assert step["on policy"] == 0 or 1 <= step["completion length"] <= 7
    assert results["alone", "on policy"]["losses"] != results["alone", "jsd"]["losses"]


@proves("teacher", "beta", "temperature", "kd_loss_alpha")
def test_the_loss_is_that_of_transformers_models(folder: Path) -> None:
    """Of one step over all samples."""
    cases = {(0.5, 1.0, 1.0): "", (0.0, 1.5, 1.0): "--beta 0 --temperature 1.5", (1.0, 1.0, 0.3): "--beta 1"}
    lines = []
    for (_, _, alpha), words in cases.items():
        more = f"{words} --train-iters 1 --global-batch-size 60 --split 100,0,0 --packing off"
        more += "" if alpha == 1 else f" --kd-loss-alpha {alpha}"
        lines.append(flags(folder, f"--teacher {{0}}/big {more}"))
    (found,) = run_distributed(tune_all, 1, lines)
    for (beta, temperature, alpha), run in zip(cases, found, strict=True):
        value, entropy = divergence(folder, folder / "big", beta, temperature)
        assert run["losses"][0] == pytest.approx(alpha * value + (1 - alpha) * entropy, rel=2e-6)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(folder: Path, tmp_path: Path) -> None:
    lines = []
    for name in ("on policy", "likeliest"):
        method, saved = f"{METHODS[name]} --train-iters 6", f"--save {tmp_path}/{name.split()[0]} --save-interval 3"
        lines += [flags(folder, method), flags(folder, method, saved, "--exit-interval 3")]
        lines += [flags(folder, method, saved, "--resume")]
    ranks = run_distributed(tune_all, 2, lines)
    found = [together([rank[i] for rank in ranks]) for i in range(len(lines))]
    for whole, first, second in (found[:3], found[3:]):
        assert whole["losses"] == first["losses"] + second["losses"] and len(second["losses"]) == 3
        assert all(torch.equal(tensor, second["final"][n]) for n, tensor in whole["final"].items())


@proves("lmbda", "max_completion_length", "generation_batch_size", "top_k", "top_p")
def test_settings_of_what_the_model_writes(folder: Path) -> None:
    base = "--teacher {0}/big --lmbda 1 --max-completion-length 7"
    changes = ["", "--lmbda 0", "--max-completion-length 3", "--top-k 2", "--top-p 0.5", "--generation-batch-size 2"]
    lines = [flags(folder, f"{base} {change}") for change in changes]
    lines[1] = lines[1].replace("--max-completion-length 7", "")
    (found,) = run_distributed(tune_all, 1, lines)
    plain, *others, batched = found
    for other, change in zip(others, changes[1:], strict=False):
        assert other["losses"] != plain["losses"], change
    assert batched["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@proves("logits_save_dir", "logits_load_dir", "logits_top_k", "logits_save_dtype")
def test_what_folders_hold(folder: Path, results: Results) -> None:
    manifest = json.loads((folder / "few" / "manifest.json").read_text())
    assert (manifest["top_k"], manifest["dtype"], manifest["vocab_size"]) == (5, "fp16", 300)
    whole = json.loads((folder / "all" / "manifest.json").read_text())
    assert (whole["top_k"], whole["dtype"]) == (300, "fp32")
    for content, name in ((manifest, "few"), (whole, "all")):
        size = sum((folder / name / part["file"]).stat().st_size for part in content["parts"])
        labels = sum(part["labels"] for part in content["parts"])
        each = (4 + (2 if content["dtype"] == "fp16" else 4)) * content["top_k"] + 12
        assert 0 <= size - labels * each < 600 * len(content["parts"])


def run(words: str) -> int:
    return finetune.main(f"{words} --no-tensorboard --no-progress-bar --log-interval 1".split())


def test_the_command_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with clean_process():
        line = saving(folder, "few").replace(f"{folder}/few", f"{tmp_path}/kept")
        assert run(line) == 0
        assert f"labels are in {tmp_path}/kept" in capfd.readouterr().out
        assert run(flags(folder, "--teacher {0}/big --dry-run")) == 0
        assert f"not counted in this memory: the weights of --teacher {folder}/big" in capfd.readouterr().out
        evaluated = "--eval-interval 2 --split 80,20 --train-iters 2"
        assert run(flags(folder, f"--teacher {{0}}/big {evaluated}", f"--log-dir {tmp_path}/logs")) == 0
    records = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["validation loss"] for record in records if "validation loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0] and "validation perplexity" not in records[-1]


REFUSED = {
    "": "the teacher is missing: give --teacher or --logits-load-dir",
    "--teacher {0}/big --logits-load-dir {0}/all": "--logits-load-dir {0}/all are both given; give one",
    "--teacher {0}/nowhere": "--teacher {0}/nowhere: there is no such folder",
    "--teacher {0}/other": "has another tokenizer: the token",
    "--teacher {0}/big --beta 1.5": "distillation takes 0 (forward KL) to 1 (reverse KL)",
    "--teacher {0}/big --lmbda 2": "--lmbda 2.0 is not between 0 and 1",
    "--teacher {0}/big --kd-loss-alpha 0": "the teacher would have no effect",
    "--teacher {0}/big --lmbda 0.5 --max-completion-length 7 --packing best-fit": "the model writes are not packed",
    "--teacher {0}/big --top-k 5": "--top-k 5",
    "--teacher {0}/big --lmbda 0.5 --no-mask-prompt": "which are what is not trained; leave it out",
    "--teacher {0}/big --lmbda 0.5 --kd-loss-alpha 0.5": "teaches nothing",
    "--teacher {0}/big --lmbda 0.5 --max-completion-length 48": "leaves no room for prompts",
    "--logits-load-dir {0}/all --temperature 1.5": "is of temperature 1.0; leave it out",
    "--logits-load-dir {0}/all --lmbda 0.5": "--lmbda 0.5",
    "--logits-load-dir {0}/all --temperature 2": "is of temperature 1.0; leave it out",
    "--logits-load-dir {0}/all --data-path {0}/sft.jsonl --seq-length 12": "was written for other samples",
    "--logits-load-dir {0}/big": "has no manifest.json",
    "--logits-save-dir {0}/kept": "--train-iters 3: --logits-save-dir trains nothing; leave it out",
    "--teacher {0}/big --reward-funcs number": "--reward-funcs number has no effect",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_one_line(folder: Path, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with clean_process():
        assert run(flags(folder, words)) == 2
    error = capfd.readouterr().err.strip()
    assert REFUSED[words].format(folder) in error and "\n" not in error


def test_changed_files_are_found(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import shutil

    shutil.copytree(folder / "all", tmp_path / "all")
    part = next((tmp_path / "all").glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-100] ^= 4
    part.write_bytes(content)
    with clean_process():
        assert run(flags(folder, f"--logits-load-dir {tmp_path}/all")) == 1
    assert "is not what was written" in capfd.readouterr().err
    part.unlink()
    with clean_process():
        assert run(flags(folder, f"--logits-load-dir {tmp_path}/all")) == 1
    assert "cannot be read" in capfd.readouterr().err
