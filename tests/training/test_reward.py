"""Reward models: training against transformers' own, what is saved, and what is refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from smp.convert.huggingface.more_families import FAMILIES
from smp.data.tuning.batches import TuningDataset
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.training.test_finetune_runs import command
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import QUIET, tune_all
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge

transformers = pytest.importorskip("transformers")

STEPS, BATCH = 4, 4
RUN = f"--objective reward --train-iters {STEPS} --seq-length 40 --global-batch-size {BATCH} --lr 0.02 --optimizer sgd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path, layers=2, tied=True)
    write_samples(path)
    return path


def flags_of(folder: Path, model: Path, save: str, more: str = "") -> str:
    return (
        f"--load {model} --tokenizer-model {folder} --data-path {folder}/dpo.jsonl --log-dir {folder}/logs "
        f"--save {folder}/{save} {RUN} {more}"
    )


@pytest.fixture(scope="module")
def run(folder: Path) -> dict[str, Any]:
    return run_distributed(tune_all, 1, [flags_of(folder, folder, "run", "--reward-center-coefficient 0.1")])[0][0]


@pytest.fixture(scope="module")
def exported(folder: Path, run: dict[str, Any]) -> Path:
    assert convert(["--load", f"{folder}/run", "--save", f"{folder}/exported"]) == 0
    return folder / "exported"


def texts(folder: Path) -> list[torch.Tensor]:
    """Token ids of the answers of all steps: chosen, rejected, chosen, rejected, ..."""
    config, data = read_finetune_settings(shlex.split(f"{QUIET} {flags_of(folder, folder, 'other')}"), 1)
    assert data is not None
    dataset = TuningDataset(data.samples, data.train, seed=config.training.seed, pairs=True, scores=True)
    batch = dataset.batch(np.arange(STEPS * BATCH)[None])
    ends = [int((labels != -100).nonzero()) + 1 for labels in batch.labels[0]]
    return [ids[:end] for ids, end in zip(batch.input_ids[0], ends, strict=True)]


def test_steps_equal_transformers(folder: Path, run: dict[str, Any], exported: Path) -> None:
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        theirs.score.weight.copy_(run["initial"]["head.weight"])
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.02)
    every, losses = texts(folder), []
    for step in range(STEPS):
        here = every[2 * BATCH * step : 2 * BATCH * (step + 1)]
        scores = torch.cat([theirs(input_ids=ids[None]).logits[0] for ids in here])
        won, lost = scores[::2], scores[1::2]
        loss = (-F.logsigmoid(won - lost) + 0.1 * (won + lost) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(run["losses"][0] - losses[0]) <= 1e-6 * losses[0]
    assert run["losses"] == pytest.approx(losses, rel=1e-5) and len(set(losses)) == STEPS
    ours = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    assert type(ours).__name__ == "LlamaForSequenceClassification" and ours.config.num_labels == 1
    with torch.no_grad():
        for ids in every[:4]:
            assert ours(input_ids=ids[None]).logits.item() == pytest.approx(
                theirs(input_ids=ids[None]).logits.item(), rel=1e-4
            )


def test_a_reward_model_is_trained_on(folder: Path, run: dict[str, Any], exported: Path) -> None:
    """From either format, with the head that is there."""
    flags = [flags_of(folder, exported, "a"), flags_of(folder, folder / "run", "b")]
    first, second = run_distributed(tune_all, 1, flags)[0]
    assert torch.equal(first["initial"]["head.weight"], run["final"]["head.weight"])
    assert first["losses"] == second["losses"]


@pytest.fixture(scope="module")
def adapted(folder: Path) -> list[dict[str, Any]]:
    """With LoRA, with DoRA, and with LoRA in two parts."""
    lora = "--lora-rank 4 --save-interval 2"
    more = {"lora": lora, "dora": f"{lora} --use-dora"}
    flags = [flags_of(folder, folder, save, words) for save, words in more.items()]
    halves = [flags_of(folder, folder, "halves", f"{lora} {part}") for part in ("--train-iters 2", "--resume")]
    return run_distributed(tune_all, 1, [*flags, *halves])[0]


def test_adapters_and_the_head_are_trained_and_go_on(adapted: list[dict[str, Any]]) -> None:
    lora, dora, first, second = adapted
    for run in (lora, dora):
        assert "head.weight" in run["moved"][-1] and any(".lora." in name for name in run["moved"][-1])
        assert not any(name.endswith("up.weight") for name in run["initial"])
    assert first["losses"] + second["losses"] == lora["losses"] and lora["losses"] != dora["losses"]
    assert second["final"].keys() == lora["final"].keys()
    assert all(torch.equal(second["final"][name], tensor) for name, tensor in lora["final"].items())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_with_a_head_are_what_peft_makes_of_them(
    folder: Path, adapted: list[dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    adapter = folder / kind / "adapter"
    content = json.loads((adapter / "adapter_config.json").read_text())
    assert (content["task_type"], content["modules_to_save"]) == ("SEQ_CLS", ["score"])
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    own = peft.PeftModel.from_pretrained(load(folder, num_labels=1), str(adapter)).eval()
    own.save_pretrained(str(tmp_path / "of_peft"))

    def scores(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in texts(folder)[:4]])

    found = []
    for name, given in (("merged", adapter), ("of_run", folder / kind), ("again", tmp_path / "of_peft")):
        words = ["--load", str(folder), "--adapter", str(given), "--save", str(tmp_path / name)]
        assert merge(words) == 0
        found.append(scores(load(tmp_path / name)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    wanted = scores(own)
    assert wanted.std() > 1e-3
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-6)


def test_what_is_refused(folder: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft = f"--load {exported} --tokenizer-model {folder} --data-path {folder}/sft.jsonl --train-iters 1"
    assert "is a reward model" in command(folder, sft)[2]
    with_adapter = f"--load {folder} --data-path {folder}/dpo.jsonl --train-iters 1 --objective reward --load-adapter x"
    assert "--objective reward starts adapters together with the score head" in command(folder, with_adapter)[2]
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    assert "a classifier of 2 labels is not supported" in command(folder, sft.replace(str(exported), str(tmp_path)))[2]
    assert convert(["--load", f"{folder}/run", "--to", "megatron", "--save", str(tmp_path / "megatron")]) == 2
    assert "no head of scores" in capsys.readouterr().err


def test_classifiers_are_those_of_transformers() -> None:
    from transformers.models.auto import modeling_auto

    theirs = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    assert {kind: family.classifier for kind, family in FAMILIES.items()} == {
        kind: theirs.get(kind) for kind in FAMILIES
    }
