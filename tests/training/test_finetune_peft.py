"""Fine-tuning against transformers and peft, and adapters both ways."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from smp.checkpoint.folders.local import LocalFolder
from smp.config import ModelConfig
from smp.convert.describe import read_architecture
from smp.convert.huggingface.config import read_hf_config
from smp.convert.load import load_hf
from smp.convert.peft.adapters import family_for
from smp.convert.peft.read import read_adapters
from smp.convert.peft.write import write_adapters
from smp.data.tuning.batches import TuningDataset
from smp.layers.adapters.lora import adapters_of, attach
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.fake_group import lone_context
from tests.training.tiny_hf import write_adapter, write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import QUIET, tune_all
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge_lora

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ADAM = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
STEPS = "--train-iters 10 --seq-length 48 --micro-batch-size 2 --global-batch-size 4 --lr 0.01 --adam-eps 1e-5"
SETS = {
    "sft": "--data-path {0}/sft.jsonl --save {0}/full",
    "lora": "--data-path {0}/sft.jsonl --load-adapter {0}/theirs --save {0}/lora",
    "dpo": "--data-path {0}/dpo.jsonl --objective dpo --load-adapter {0}/theirs --dpo-beta 0.2",
    "dpo, full": "--data-path {0}/dpo.jsonl --objective dpo --dpo-label-smoothing 0.2",
    "hinge": "--data-path {0}/dpo.jsonl --objective dpo --dpo-loss-type hinge --dpo-beta 0.01",
    "ipo": "--data-path {0}/dpo.jsonl --objective dpo --dpo-loss-type ipo --dpo-beta 0.05",
    "orpo": "--data-path {0}/dpo.jsonl --objective orpo --orpo-beta 0.25",
    "kto": "--data-path {0}/kto.jsonl --objective kto --load-adapter {0}/theirs --kto-beta 0.2 "
    "--kto-desirable-weight 1.5 --kto-undesirable-weight 0.75",
}
MODULES = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path)
    write_samples(path)
    write_adapter(path, path / "theirs", r=4, lora_alpha=10, target_modules=MODULES)
    return path


def flags_of(folder: Path, name: str) -> str:
    return f"--load {folder} --log-dir {folder}/logs {STEPS} {SETS[name].format(folder)}"


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, dict[str, Any]]:
    flags = [flags_of(folder, name) for name in SETS]
    return dict(zip(SETS, run_distributed(tune_all, 1, flags)[0], strict=True))


def batches(folder: Path, name: str) -> Any:
    """The same global batches as lists of (token ids, labels) of single texts."""
    config, data = read_finetune_settings(shlex.split(f"{QUIET} {flags_of(folder, name)}"), 1)
    assert data is not None
    dataset = TuningDataset(data.samples, data.train, seed=config.training.seed, pairs=data.pairs)
    for step in range(10):
        batch = dataset.batch(np.arange(4 * step, 4 * step + 4).reshape(1, 4))
        rows = batch.input_ids[0], batch.labels[0]
        texts = []
        for row in range(len(rows[0])):
            numbers = batch.document_ids[0][row] if batch.document_ids is not None else None
            for n in range(1 if numbers is None else int(numbers.max()) + 1):
                chosen = slice(None) if numbers is None else numbers == n
                texts.append((rows[0][row][chosen], rows[1][row][chosen]))
        yield texts


def mismatched(folder: Path) -> Iterator[tuple[list[Any], list[bool]]]:
    """For each step of kto the prompts of its samples with the answers of those behind them, and the samples' labels.
    Samples are found by their text."""
    rows = [json.loads(line) for line in (folder / "kto.jsonl").read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    parts = [[tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "completion")] for row in rows]
    known = {(*prompt, *answer): i for i, (prompt, answer) in enumerate(parts)}
    order = [known[tuple(ids.tolist())] for ids in texts_in_order(folder)]
    for step in range(10):
        texts, labels = [], []
        for at in range(4 * step, 4 * step + 4):
            prompt, answer = parts[order[at]][0], parts[order[at + 1]][1]
            ids = torch.tensor([*prompt, *answer, end])
            texts.append((ids[:-1], torch.where(torch.arange(1, len(ids)) < len(prompt), -100, ids[1:])))
            labels.append(rows[order[at]]["label"])
        yield texts, labels


def texts_in_order(folder: Path) -> list[torch.Tensor]:
    """Token ids of the samples of ten steps and the one behind them, without the end token."""
    config, data = read_finetune_settings(shlex.split(f"{QUIET} {flags_of(folder, 'kto')}"), 1)
    assert data is not None
    batch = TuningDataset(data.samples, data.train, seed=config.training.seed).batch(np.arange(41).reshape(1, 41))
    rows = zip(batch.input_ids[0], batch.labels[0], strict=True)
    return [ids[: int((labels != -100).nonzero()[-1]) + 1] for ids, labels in rows]


def kto(
    policy: list[torch.Tensor], reference: list[torch.Tensor], kl: torch.Tensor, labels: list[bool]
) -> torch.Tensor:
    """TRL's formula: a mean over the weighted losses of all answers; ``kl``: of the mismatched ones."""
    terms = []
    for score, ref, liked in zip(policy, reference, labels, strict=True):
        towards = (score - ref) - kl if liked else kl - (score - ref)
        terms.append((1.5 if liked else 0.75) * (1 - torch.sigmoid(0.2 * towards)))
    return torch.stack(terms).mean()


def their_model(folder: Path, name: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if "--load-adapter" in SETS[name]:
        model = peft.PeftModel.from_pretrained(model, folder / "theirs", is_trainable=True)
    return model


def log_prob(model: Any, text: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of the labels of one text."""
    logits = model(input_ids=text[0][None]).logits[0]
    return -F.cross_entropy(logits, text[1], reduction="sum", ignore_index=-100)


def dpo(policy: list[torch.Tensor], reference: list[torch.Tensor], beta: float, smoothing: float) -> torch.Tensor:
    """The formula of the paper, with label smoothing, over pairs."""
    terms = []
    for i in range(0, len(policy), 2):
        z = beta * ((policy[i] - reference[i]) - (policy[i + 1] - reference[i + 1]))
        terms.append(-(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z))
    return torch.stack(terms).mean()


def preference(name: str, policy: list[torch.Tensor], reference: list[torch.Tensor], texts: Any) -> torch.Tensor:
    """The other losses of pairs by their papers, and as TRL averages over tokens, over pairs."""
    if name == "hinge":
        return torch.stack(
            [
                F.relu(1 - 0.01 * ((policy[i] - policy[i + 1]) - (reference[i] - reference[i + 1])))
                for i in range(0, len(policy), 2)
            ]
        ).mean()
    sizes = [int((labels != -100).sum()) for _, labels in texts]
    mean, ref = ([score / size for score, size in zip(scores, sizes, strict=True)] for scores in (policy, reference))
    terms = []
    for i in range(0, len(mean), 2):
        won, lost = mean[i], mean[i + 1]
        if name == "ipo":
            terms.append(((won - lost) - (ref[i] - ref[i + 1]) - 1 / (2 * 0.05)) ** 2)
        else:
            odds = (won - lost) - (torch.log1p(-won.exp()) - torch.log1p(-lost.exp()))
            terms.append(-won - 0.25 * F.logsigmoid(odds))
    return torch.stack(terms).mean()


def their_losses(folder: Path, name: str) -> tuple[list[float], Any]:
    """Ten steps of torch's AdamW on their model, with the same batches."""
    model, copy = their_model(folder, name), their_model(folder, "sft")
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **ADAM)  # type: ignore[arg-type]
    losses, others = [], mismatched(folder) if name == "kto" else None
    for texts in batches(folder, name):
        scores = [log_prob(model, text) for text in texts]
        with torch.no_grad():
            reference = [log_prob(copy, text) for text in texts] if "sft.jsonl" not in SETS[name] else []
        if others is not None:
            mixed, labels = next(others)
            with torch.no_grad():
                kl = torch.stack([log_prob(model, text) - log_prob(copy, text) for text in mixed]).mean().clamp(min=0)
            loss = kto(scores, reference, kl, labels)
        elif name in ("hinge", "ipo", "orpo"):
            loss = preference(name, scores, reference, texts)
        elif "dpo" in name:
            loss = dpo(scores, reference, 0.2 if name == "dpo" else 0.1, 0.0 if name == "dpo" else 0.2)
        else:
            loss = -sum(scores) / sum(int((labels != -100).sum()) for _, labels in texts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", SETS)
def test_ten_steps_equal_theirs(ours: dict[str, dict[str, Any]], folder: Path, name: str) -> None:
    losses, model = their_losses(folder, name)
    assert len(losses) == 10 and (losses[-1] < losses[1] or name == "kto"), "which depends on the labels of a batch"
    assert abs(ours[name]["losses"][0] - losses[0]) <= 1e-6 * abs(losses[0]), "the same weights"
    for step, (got, want) in enumerate(zip(ours[name]["losses"], losses, strict=True)):
        assert abs(got - want) <= 1e-5 * abs(want), (step, got, want)
    if name == "sft":
        exported = folder / "exported"
        assert convert(["--load", str(folder / "full"), "--save", str(exported), "--reference", str(folder)]) == 0
        text, alone = torch.arange(3, 40)[None], transformers.AutoModelForCausalLM.from_pretrained(exported)
        with torch.no_grad():
            error = (alone(text).logits - model(text).logits).abs().max() / model(text).logits.abs().max()
        assert error < 1e-4, "our weights in transformers, after ten steps"
        assert (exported / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    if name == "lora":
        text = torch.arange(3, 40)[None]
        loaded = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(folder), folder / "lora" / "adapter"
        )
        with torch.no_grad():
            error = (loaded(text).logits - model(text).logits).abs().max() / model(text).logits.abs().max()
        assert error < 1e-4, "our adapter in peft, after ten steps"


def logits(folder: Path, adapter: Path) -> torch.Tensor:
    """Of our model with an adapter."""
    config = ModelConfig(**(read_architecture(str(folder)) or {}))
    with lone_context() as context, torch.no_grad():
        model = GPT(config, context.tp, device="cpu")
        load_hf(model, folder)
        found, _ = read_adapters(adapter, config, family_for(config, read_hf_config(folder)))
        dora = any(a.magnitude is not None for a in found.values())
        attach(model, {name: (a.rank, a.alpha) for name, a in found.items()}, dora=dora)
        for name, layer in adapters_of(model).items():
            for part, parameter in layer.named_parameters():
                parameter.to_local().copy_(getattr(found[name], part))  # type: ignore[operator]
        return model.eval()(MicroBatch(torch.arange(3, 40)[None])).logits


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"r": 4, "lora_alpha": 10, "target_modules": MODULES},
    "llama, patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["model.layers.1.self_attn.k_proj", "up_proj"],
        "rank_pattern": {"up_proj": 2},
        "alpha_pattern": {"up_proj": 7},
    },
    "llama, rslora": {"r": 4, "lora_alpha": 3, "target_modules": ["gate_proj", "o_proj"], "use_rslora": True},
    "phi3": {"r": 3, "lora_alpha": 5, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
    "gpt2": {"r": 3, "lora_alpha": 5, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "llama, dora": {"r": 4, "lora_alpha": 10, "target_modules": MODULES, "use_dora": True},
    "phi3, dora": {"r": 3, "lora_alpha": 5, "target_modules": ["qkv_proj", "down_proj"], "use_dora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_their_adapter_gives_their_logits_here_and_merged(tmp_path: Path, kind: str) -> None:
    folder, adapter, merged = tmp_path / "model", tmp_path / "adapter", tmp_path / "merged"
    write_tokenizer(folder)
    write_model(folder, kind.split(",")[0])
    write_adapter(folder, adapter, **KINDS[kind])
    theirs = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), adapter)
    assert merge_lora(["--load", str(folder), "--adapter", str(adapter), "--save", str(merged)]) == 0
    alone = transformers.AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        text = torch.arange(3, 40)[None]
        want, base = theirs.eval()(text).logits, theirs.get_base_model()
        merged_logits = alone.eval()(text).logits
        with theirs.disable_adapter():
            plain = base(text).logits
    ours = logits(folder, adapter)
    scale = want.abs().max()
    assert (plain - want).abs().max() > 0.01 * scale, "the adapter changes something"
    assert (ours - want).abs().max() < 1e-5 * scale
    assert (merged_logits - want).abs().max() < 1e-5 * scale
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (merged / name).read_bytes() == (folder / name).read_bytes()
    again = write_ours(folder, adapter, tmp_path / "again")
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), again)
    with torch.no_grad():
        assert (loaded.eval()(text).logits - want).abs().max() < 1e-5 * scale


def write_ours(folder: Path, adapter: Path, out: Path) -> Path:
    """Theirs, read and written by us."""
    config = ModelConfig(**(read_architecture(str(folder)) or {}))
    family = family_for(config, read_hf_config(folder))
    found, dropout = read_adapters(adapter, config, family)
    write_adapters(LocalFolder(out), found, config, family, dropout=dropout, base=str(folder))
    return out
