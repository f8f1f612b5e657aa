"""Fine-tuning of a model with experts, from a Hugging Face folder: the same under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import main as finetune
from tests.convert.tiny import TINY, save_theirs
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.flag_runs import clean_process
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all
from tools.merge_lora import main as merge_lora

pytest.importorskip("transformers")

STEPS = "--train-iters 2 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd"
METHODS = {
    "full": "--data-path {0}/sft.jsonl --moe-aux-loss-coeff 0.01 --hybrid-shard-degree 0",
    "lora": "--data-path {0}/sft.jsonl --lora-rank 4 --moe-aux-loss-coeff 0.01 --save {0}/saved-{1}",
    "lora, experts": "--data-path {0}/sft.jsonl --lora-rank 3 --moe-aux-loss-coeff 0.01 --save {0}/saved-{1} "
    "--lora-target-modules value,*.experts.*",
    "dpo, full": "--data-path {0}/dpo.jsonl --objective dpo",
    "dpo, lora": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4 "
    "--lora-target-modules value,*.shared_experts.*",
}
SPREAD = "--expert-model-parallel-size 2"
CUT = "--tensor-model-parallel-size 2 --sequence-parallel"
APART = "--expert-tensor-parallel-size 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(folder)
    write_model(folder, "qwen2-moe", layers=2)
    write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """By number of processes and method; several processes accumulate as many micro-batches as one."""
    found = {}
    for world, layout in ((1, ""), (2, SPREAD)):
        common = f"--load {folder} --log-dir {folder}/logs {STEPS} --micro-batch-size {4 // world} {layout}"
        saved = {name: f"{world}-{name.replace(', ', '-')}" for name in METHODS}
        flags = [f"{common} {method.format(folder, saved[name])}" for name, method in METHODS.items()]
        ranks = run_distributed(tune_all, world, flags)
        found[world] = {name: together([rank[i] for rank in ranks]) for i, name in enumerate(METHODS)}
    return found


@pytest.mark.parametrize("method", METHODS)
def test_spread_experts_are_tuned_like_those_of_one_process(results: dict[int, Any], method: str) -> None:
    same_training(results[1][method], results[2][method])


def test_adapters_of_cut_experts_are_tuned_like_those_of_one_process(folder: Path, results: dict[int, Any]) -> None:
    """Cut as dense layers are, whole on each process, and split over those that cut dense layers."""
    flags = [
        f"--load {folder} --log-dir {folder}/logs {STEPS} --micro-batch-size 4 "
        f"{METHODS['lora, experts'].format(folder, f'cut{number}')} {CUT} {apart}"
        for number, apart in enumerate(("", APART, f"{APART} {SPREAD}"))
    ]
    ranks = run_distributed(tune_all, 2, flags)
    for number in range(len(flags)):
        same_training(results[1]["lora, experts"], together([rank[number] for rank in ranks]))


def same_training(want: dict[str, Any], got: dict[str, Any]) -> None:
    assert len(want["losses"]) > 1 and len(set(want["losses"])) == len(want["losses"])
    for loss, other in zip(got["losses"], want["losses"], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
    for step, gradients in enumerate(want["gradients"]):
        errors = tensor_errors(got["gradients"][step], gradients, gradients)
        assert max(errors.values()) <= TOLERANCE, max(errors.items(), key=lambda item: item[1])


def test_what_is_trained(results: dict[int, Any]) -> None:
    trained = {
        method: {name.partition(".lora.")[0].split(".", 2)[-1] for name in results[1][method]["initial"]}
        for method in ("lora", "dpo, lora")
    }
    attention = {f"attention.{name}" for name in ("query", "key", "value", "output")}
    shared = {f"mlp.shared_experts.{name}" for name in ("gate", "up", "down")}
    assert trained == {"lora": attention | shared, "dpo, lora": {"attention.value", *shared}}
    before, after = (results[1]["full"][when]["layers.0.mlp.experts.up.weight"] for when in ("initial", "final"))
    assert not torch.equal(before, after)


def test_peft_reads_the_adapter(folder: Path, results: dict[int, Any]) -> None:
    """It has peft's names, and peft finds the module of each."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    adapter = folder / "saved-2-lora" / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with_adapter = peft.PeftModel.from_pretrained(model, str(adapter))
    whole = results[2]["lora"]["final"]["layers.0.mlp.shared_experts.up.lora.b"]
    there = with_adapter.get_parameter(
        "base_model.model.model.layers.0.mlp.shared_expert.up_proj.lora_B.default.weight"
    )
    assert torch.equal(there.float(), whole.float())


@torch.no_grad()
def test_peft_computes_what_the_merged_model_does(folder: Path, results: dict[int, Any], tmp_path: Path) -> None:
    """With adapters of experts, read back and added into the weights."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    adapter, ids = folder / "saved-2-lora-experts" / "adapter", torch.arange(3, 33)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    before = model(ids).logits
    after = peft.PeftModel.from_pretrained(model, str(adapter)).eval()(ids).logits
    assert merge_lora(["--load", str(folder), "--adapter", str(adapter), "--save", str(tmp_path / "merged")]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
    assert (after - before).abs().max() > 1e-3
    assert (after - merged).abs().max() < 1e-5


@torch.no_grad()
def test_adapters_of_transposed_experts_are_pefts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS: what peft made is read, what is trained here is written, and both are what peft computes."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    name, settings = TINY["gpt-oss"]
    monkeypatch.setitem(TINY, "gpt-oss", (name, {**settings, "vocab_size": 300}))
    save_theirs("gpt-oss", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    write_samples(tmp_path)
    flags = f"--load {tmp_path}/hf --data-path {tmp_path}/sft.jsonl --log-dir {tmp_path}/logs {STEPS} --no-progress-bar"
    with torch.enable_grad(), clean_process():
        words = f"{flags} --lora-rank 2 --lora-target-modules value,*.experts.* --save {tmp_path}/run"
        assert finetune(words.split()) == 0
    write_expert_adapter(tmp_path / "hf", tmp_path / "theirs")
    ids = torch.arange(3, 33)[None]
    for adapter in (tmp_path / "run/adapter", tmp_path / "theirs"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        before = model(ids).logits
        after = peft.PeftModel.from_pretrained(model, str(adapter)).eval()(ids).logits
        merged = tmp_path / f"merged-{adapter.name}"
        assert merge_lora(["--load", f"{tmp_path}/hf", "--adapter", str(adapter), "--save", str(merged)]) == 0
        whole = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()(ids).logits
        error = (after - whole).abs().max() / whole.abs().max()
        assert (after - before).abs().max() > 1e-3 and error < 1e-5, adapter


def write_expert_adapter(folder: Path, adapter: Path) -> None:
    """As peft makes it, with B not zero."""
    import peft
    import transformers

    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False
    )
    peft.get_peft_model(model, config).save_pretrained(str(adapter))


def test_adapters_that_peft_could_not_read_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, settings = TINY["llama4-scout"]
    monkeypatch.setitem(TINY, "llama4-scout", (name, {**settings, "vocab_size": 300}))
    save_theirs("llama4-scout", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    write_samples(tmp_path)
    flags = f"--load {tmp_path}/hf --data-path {tmp_path}/sft.jsonl --log-dir {tmp_path}/logs {STEPS} --no-progress-bar"
    with clean_process():
        assert finetune(f"{flags} --lora-rank 2 --lora-target-modules *.experts.* --save {tmp_path}/run".split()) == 2
    assert "adapters of Llama4ForCausalLM's experts are neither read nor written" in capsys.readouterr().err
    assert not list(tmp_path.glob("run/iter_*"))
