"""A pretrained model leaves this project with its tokenizer, and adapters are merged into their own model only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import finetune
from smp.checkpoint.folders.folder import LocalFolder
from smp.checkpoint.format.entries import CheckpointError
from smp.config import ModelConfig, resolve_model
from smp.data.tokenizers.files import load_tokenizer
from smp.training.checkpoints.hf_export import ExportStore
from smp.training.tuning.adapter_files import _require_same_model
from tests.training.flag_runs import clean_process, run_here
from tests.training.tiny_hf import WORDS, write_model, write_samples, write_tokenizer
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge_lora
from tools.train_tokenizer import train

TEXTS = "--no-mock-data --data-path texts.jsonl --train-iters 1 --save run --vocab-size "


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in WORDS * 20))
    return tmp_path


def test_other_nodes_wait_for_the_export() -> None:
    """Their torchruns would leave five minutes after their last process, and one of them may keep the rendezvous."""
    store, looks = dist.HashStore(), list[int]()

    def progress() -> None:
        looks.append(1)
        if len(looks) == 2:
            with pytest.raises(OSError), ExportStore(store).telling():
                raise OSError("a failed export has ended, too")

    ExportStore(store).wait(progress)
    assert len(looks) == 2
    ExportStore(None).wait(progress)
    with ExportStore(None).telling():
        pass


def exported(folder: Path, flags: str, *more: str) -> Path:
    run = run_here(folder, TEXTS + flags)
    assert run.code == 0, run.err
    assert convert(["--load", str(folder / "run"), "--save", str(folder / "hf"), *more]) == 0
    return folder / "hf"


def test_a_tokenizer_json_goes_with_the_model(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    write_tokenizer(texts / "llama", template=None)
    (texts / "llama" / "tokenizer_config.json").unlink()  # as train_tokenizer.py leaves it
    monkeypatch.setattr("smp.data.tokenizers.files._ENDS", ("<|im_end|>",))
    out = exported(texts, "300 --tokenizer-model llama/tokenizer.json")
    assert (out / "tokenizer.json").read_bytes() == (texts / "llama" / "tokenizer.json").read_bytes()
    ours, theirs = load_tokenizer(out / "tokenizer.json"), transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.encode(WORDS[0], add_special_tokens=False) == ours.encode(WORDS[0])
    assert theirs.eos_token == "<|im_end|>"
    write_samples(texts, count=12)
    assert finetune.main(["--load", str(out), "--data-path", f"{texts}/sft.jsonl", "--preview", "1"]) == 0


def test_a_sentencepiece_model_goes_with_the_model_under_its_usual_name(texts: Path) -> None:
    (texts / "small.model").write_bytes(train([Path(__file__).read_text() * 3], 400, "bpe", 0))
    out = exported(texts, "400 --tokenizer-model small.model")
    assert (out / "tokenizer.model").read_bytes() == (texts / "small.model").read_bytes()


def test_a_run_without_a_tokenizer_leaves_none_and_the_hint_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_here(tmp_path, "--train-iters 1 --save run")
    assert run.code == 0 and not (tmp_path / "run" / "model_files").exists()
    write_tokenizer(tmp_path / "tokenizer")
    said = []
    for name, more in (("without", []), ("with", ["--reference", str(tmp_path / "tokenizer")])):
        assert convert(["--load", str(tmp_path / "run"), "--save", str(tmp_path / name), *more]) == 0
        said.append(capsys.readouterr().err)
    assert f"so {tmp_path / 'without'} has none: --reference FOLDER takes along" in said[0]
    assert "--reference" not in said[1] and (tmp_path / "with" / "tokenizer.json").is_file()


def test_adapters_of_another_model_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one with fewer layers of the same shapes: all that the adapter has would fit."""
    write_tokenizer(tmp_path / "small")
    write_samples(tmp_path, count=12)
    for name, layers in (("small", 1), ("large", 2)):
        write_model(tmp_path / name, layers=layers)
    monkeypatch.chdir(tmp_path)
    flags = "--load small --data-path sft.jsonl --lora-rank 2 --train-iters 1 --global-batch-size 2 --save lora"
    with clean_process():
        assert finetune.main([*flags.split(), "--no-tensorboard", "--no-progress-bar"]) == 0
    capsys.readouterr()
    for adapter, why in (
        ("lora/adapter", "has no adapter for model.layers.1.self_attn.q_proj, which its target_modules choose"),
        ("lora", "holds adapters of another model: one with --num-layers 1, this one has 2"),
    ):
        assert merge_lora(["--load", "large", "--adapter", adapter, "--save", "merged"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and why in line
        assert not Path("merged").exists()
        own = f"{len(adapter)}-merged"
        assert merge_lora(["--load", "small", "--adapter", adapter, "--save", own]) == 0
        assert json.loads(Path(own, "config.json").read_text())["num_hidden_layers"] == 1
        capsys.readouterr()


def test_adapters_fit_a_model_whatever_it_predicts_further(tmp_path: Path) -> None:
    """Fine-tuning leaves those layers out, so an adapter's model has none; all else has to be equal."""
    adapters = resolve_model(ModelConfig(vocab_size=100, num_layers=2))
    (tmp_path / "manifest.json").write_text(json.dumps({"extra": {"config": vars(adapters)}}))
    _require_same_model(LocalFolder(tmp_path), replace(adapters, mtp_num_layers=1))
    with pytest.raises(CheckpointError, match="one with --num-layers 2, this one has 3"):
        _require_same_model(LocalFolder(tmp_path), replace(adapters, num_layers=3, mtp_num_layers=1))
