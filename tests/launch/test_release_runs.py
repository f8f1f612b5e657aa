"""Recipes of a release of HyperPod's train for real here: from the typed line, with overrides that make them tiny, to a
checkpoint and a merged Hugging Face folder. On this machine, and where slurmlab is there (test_slurm.py) on Slurm.

SMP_HYPERPOD_RECIPES names folders of releases; the one of June 2026 is taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.tiny import TINY, save_theirs
from tests.launch.test_local import ROOT
from tests.launch.test_slurm import LAB, cluster, end_of, launch, log  # noqa: F401
from tests.training.tiny_hf import write_samples, write_tokenizer
from tests.training.tiny_vision import write_vision_type

_FOLDERS = [Path(folder) for folder in os.environ.get("SMP_HYPERPOD_RECIPES", "").split(os.pathsep)]
RELEASE, RELEASE_1 = (next((f for f in _FOLDERS if part in f.name), None) for part in ("2026-06", "v1.5.1"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(RELEASE is None, reason="SMP_HYPERPOD_RECIPES does not name release 2026-06"),
]
ARGS, MODEL, DATA = (f"recipes.training_config.{name}." for name in ("training_args", "model_config", "datasets"))
VERL = "recipes.training_config."
LLMFT = [
    *(f"{MODEL}model_name_or_path={{0}}", f"{ARGS}max_len=48", f"{ARGS}train_batch_size=4", f"{ARGS}max_epochs=1"),
    f"{DATA}val_data.file_path={{0}}/held.jsonl",
]
SFT, DPO = (f"{DATA}train_data.file_path={{0}}/{name}.jsonl" for name in ("sft", "dpo"))
CASES = {
    "SFT": ("llama/llmft_llama3_1_8b_instruct_seq4k_gpu_sft_fft", "llama3", [*LLMFT, SFT]),
    "SFT, LoRA": ("llama/llmft_llama3_2_1b_instruct_seq4k_gpu_sft_lora", "llama3", [*LLMFT, SFT]),
    "DPO": (
        "llama/llmft_llama3_1_8b_instruct_seq4k_gpu_dpo",
        "llama3",
        [*LLMFT[:-1], DPO, f"{DATA}val_data.file_path={{0}}/held_pairs.jsonl"],
    ),
    "verl SFT": (
        "qwen-0_7_0/verl-sft-qwen-3-8b-lora",
        "qwen3",
        [
            *(f"{VERL}model.path={{0}}", f"{VERL}data.train_files={{0}}/sft.jsonl", f"{VERL}data.max_length=48"),
            *(f"{VERL}data.train_batch_size=4", f"{VERL}trainer.total_epochs=1", f"{VERL}trainer.test_freq=2"),
            f"{VERL}data.val_files={{0}}/held.jsonl",
        ],
    ),
    "GPT-OSS, LoRA": ("gpt_oss/llmft_gpt_oss_20b_seq4k_gpu_sft_lora", "gpt-oss", [*LLMFT, SFT]),
    "Qwen3 with experts": ("qwen/llmft_qwen3_4b_seq4k_gpu_sft_lora", "qwen3-moe", [*LLMFT, SFT]),
}
ON_SLURM = ("SFT", "DPO", "verl SFT")


def words(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A typed line but for where it runs, and a model and samples in ``folder``."""
    recipe, kind, more = CASES[case]
    name, settings = TINY[kind]
    monkeypatch.setitem(TINY, kind, (name, {**settings, "vocab_size": 300, "max_position_embeddings": 64}))
    model = folder / "model"
    save_theirs(kind, model)
    write_tokenizer(model)
    write_samples(model, 24)
    for source, held in (("sft", "held"), ("dpo", "held_pairs")):
        lines = (model / f"{source}.jsonl").read_text().splitlines(keepends=True)
        (model / f"{held}.jsonl").write_text("".join(lines[:5]))
    assert RELEASE is not None
    path = RELEASE / "recipes_collection/recipes/fine-tuning" / f"{recipe}.yaml"
    place = [f"base_results_dir={folder}", "recipes.run.name=tiny", "recipes.trainer.num_nodes=1"]
    return [f"recipes={path}", *place, "++recipes.trainer.devices=1", *(word.format(model) for word in more)]


def check(job: Path, case: str) -> None:
    """It trained and was evaluated on the files for it, and what it leaves is read by transformers."""
    transformers = pytest.importorskip("transformers")
    assert json.loads((job / "status.json").read_text())["status"] == "done"
    assert list((job / "checkpoints").glob("iter_*"))
    steps: list[dict[str, Any]] = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert len([step for step in steps if "validation loss" in step]) >= 2
    trained = transformers.AutoModelForCausalLM.from_pretrained(job / "checkpoints/hf_model")
    start = transformers.AutoModelForCausalLM.from_pretrained(job.parent / "model")
    assert type(trained) is type(start)
    pairs = zip(trained.named_parameters(), start.parameters(), strict=True)
    moved = {name for (name, new), old in pairs if (new != old).any()}
    assert any("q_proj" in name for name in moved), case
    assert case != "GPT-OSS, LoRA" or any("experts.gate_up_proj" in name for name in moved)
    assert transformers.AutoTokenizer.from_pretrained(job / "checkpoints/hf_model").chat_template


@pytest.mark.parametrize("case", CASES)
def test_on_this_machine(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, f"{ROOT}/main.py", "cluster=local", *words(case, tmp_path, monkeypatch)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path / "tiny", case)


_LLAMA4 = [f"recipes.model.{name}" for name in ("num_hidden_layers=2", "hidden_size=32", "num_attention_heads=4")]
VISION = {
    "training/llama/hf_llama3_2_11b_seq8k_gpu_p5x4_pretrain": ("mllama", []),
    "training/llama/hf_llama3_2_90b_seq8k_gpu_p5x32_pretrain": ("mllama", []),
    "fine-tuning/llama/hf_llama4_17b_16e_seq4k_gpu_lora_multimodal_finetuning": ("llama4", _LLAMA4),
    "fine-tuning/llama/hf_llama4_17b_16e_seq8k_gpu_lora_multimodal_finetuning": ("llama4", _LLAMA4),
}
"""Recipes of release 1.5.1 whose models see images: type of the model, and what is said of its size."""


@pytest.mark.skipif(RELEASE_1 is None, reason="SMP_HYPERPOD_RECIPES does not name release v1.5.1")
@pytest.mark.parametrize("recipe", VISION)
def test_models_that_see_images(recipe: str, tmp_path: Path) -> None:
    kind, sizes = VISION[recipe]
    if kind == "llama4":
        pytest.importorskip("torchvision")
    folder = write_vision_type(tmp_path / "model", kind)
    model, data = f"recipes.model.hf_model_name_or_path={folder}", f"recipes.model.data.train_dir={folder}/vl.jsonl"
    command = [sys.executable, f"{ROOT}/main.py", "cluster=local", f"recipes={RELEASE_1}/recipes_collection/recipes/"]
    command[-1] += f"{recipe}.yaml"
    command += [f"base_results_dir={tmp_path}", "recipes.run.name=tiny", "recipes.trainer.num_nodes=1", model, data]
    command += ["recipes.trainer.devices=1", "recipes.model.max_context_width=256", "recipes.trainer.max_steps=3"]
    command += ["recipes.model.shard_degree=1", *sizes, *([] if kind == "llama4" else ["recipes.save_hf=true"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    job = tmp_path / "tiny"
    assert json.loads((job / "status.json").read_text())["status"] == "done"
    losses = [json.loads(line).get("lm loss") for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert len([loss for loss in losses if loss]) == 3
    saved = "adapter/adapter_config.json" if kind == "llama4" else "hf_model/preprocessor_config.json"
    assert (job / "checkpoints" / saved).is_file()


@pytest.mark.skipif(LAB is None, reason="needs slurmlab")
@pytest.mark.parametrize("case", ON_SLURM)
def test_on_slurm(
    case: str,
    launch: Callable[..., str],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = words(case, tmp_path, monkeypatch)
    launch("cluster=slurm", f"python={sys.executable}", "cluster.exclusive=false", "cluster.mem=null", *typed)
    job = tmp_path / "tiny"
    assert end_of(job, 1200) == "done", log(job)
    check(job, case)
