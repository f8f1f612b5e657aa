"""finetune.py trains a Gemma: whole and by adapters, alike in other layouts, and transformers reads what it leaves; so
it does, once each, every family with scales, caps, norms or layers of its own."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch

import finetune
from smp.data.tuning.tokenizer import FolderTokenizer
from tests.convert.tiny import DELTA_RULES, SCALED, STATE_SPACE, TINY, save_theirs
from tests.distributed import run_distributed
from tests.training.flag_runs import clean_process
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import tune_all
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge_lora

pytest.importorskip("transformers")
STEPS = "--seq-length 48 --lr 0.01 --global-batch-size 4 --train-iters 4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    write_tokenizer(path)
    write_model(path, "gemma2", 2)
    write_samples(path)
    return path


def flags(folder: Path, *more: str) -> str:
    return " ".join([f"--load {folder} --log-dir {folder}/logs --data-path {folder}/sft.jsonl {STEPS}", *more])


def run(folder: Path, *more: str) -> str:
    """finetune.py on one process: what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with clean_process(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = finetune.main(flags(folder, "--no-tensorboard --no-progress-bar --log-interval 1", *more).split())
    assert code == 0, err.getvalue()
    return out.getvalue()


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(3, 43)[None]).logits


def test_sft_and_lora_end_as_folders_that_transformers_reads(folder: Path, tmp_path: Path) -> None:
    said = run(folder, f"--save {tmp_path}/sft")
    assert "attention: math (the one that computes --attn-logit-softcapping 3;" in said
    assert "norms" not in said and "that see 12 tokens in 1 of 2 layers, scores within +-3" in said
    assert convert(["--load", f"{tmp_path}/sft", "--save", f"{tmp_path}/hf", "--reference", str(folder)]) == 0
    run(folder, f"--save {tmp_path}/lora --lora-rank 2")
    adapter = f"{tmp_path}/lora/adapter"
    assert merge_lora(["--load", str(folder), "--adapter", adapter, "--save", f"{tmp_path}/merged"]) == 0
    before = logits(folder)
    assert before.abs().max() <= 6
    for name in ("hf", "merged"):
        assert not torch.allclose(logits(tmp_path / name), before, atol=1e-3), name


def test_layouts_tune_it_alike(folder: Path) -> None:
    kinds = ("", "--lora-rank 2")
    alone = run_distributed(tune_all, 1, [flags(folder, kind) for kind in kinds])[0]
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective"
    spread = run_distributed(tune_all, 2, [flags(folder, kind, layout) for kind in kinds])[0]
    for one, other in zip(alone, spread, strict=True):
        assert one["losses"][-1] < one["losses"][0]
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_dynamic_rope_beyond_the_models_length_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several lengths, each with the frequencies of its own, packed into one sequence."""
    from transformers import AutoModelForCausalLM

    name, settings = TINY["llama-dynamic"]
    monkeypatch.setitem(TINY, "llama-dynamic", (name, {**settings, "vocab_size": 300}))
    base = save_theirs("llama-dynamic", tmp_path)
    write_tokenizer(base)
    texts = [" ".join(["one two three four five six seven"] * n) for n in (1, 5, 8)]
    (base / "sft.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    total = count = 0.0
    for text in texts:
        ids = torch.tensor([[*FolderTokenizer(base).encode(text), 2]])
        model = AutoModelForCausalLM.from_pretrained(base)  # anew: it keeps the frequencies of the longest so far
        with torch.no_grad():
            total += torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    assert ids.shape[1] > 2 * settings["max_position_embeddings"]
    said = run(
        base,
        "--max-position-embeddings 256 --seq-length 256 --split 1,0,0 --train-iters 1 --global-batch-size 1 --lr 1e-9",
    )
    assert "--max-position-embeddings 24 -> 256" in said and "training: 3 texts in 1 sequences" in said
    [loss] = re.findall(r"lm loss: ([0-9.E+-]+)", said)
    assert float(loss) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SCALED, *STATE_SPACE, *DELTA_RULES, "llama-attention-bias", "llama-mlp-bias"])
def test_every_family_is_tuned_whole_and_by_adapters(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = TINY[kind]
    monkeypatch.setitem(TINY, kind, (name, {**settings, "vocab_size": 300, "initializer_range": 0.15}))
    base = save_theirs(kind, tmp_path / "base")
    write_tokenizer(base)
    write_samples(base)
    before = logits(base)
    said = run(base, f"--save {tmp_path}/sft")
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", said)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert convert(["--load", f"{tmp_path}/sft", "--save", f"{tmp_path}/hf", "--reference", str(base)]) == 0
    run(base, f"--save {tmp_path}/lora --lora-rank 2")
    adapter = f"{tmp_path}/lora/adapter"
    assert merge_lora(["--load", str(base), "--adapter", adapter, "--save", f"{tmp_path}/merged"]) == 0
    for name in ("hf", "merged"):
        assert (logits(tmp_path / name) - before).abs().max() > 1e-3, name
