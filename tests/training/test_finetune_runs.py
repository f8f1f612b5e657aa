"""What whole fine-tuning runs do: packing, resuming in another layout, memory, files, and the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
import pretrain_gpt
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.lock import Holder
from smp.data.sample import IGNORE_INDEX
from smp.kernels.attention_cores.select_attention import AttentionChoice, AttentionShape, choose_attention
from smp.training import build
from smp.training.forward_backward import Accumulation
from smp.training.micro_batches import MicroBatches
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.parity.result import layer_norms, layer_of
from tests.training.flag_runs import CountOps, clean_process
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge_lora

transformers = pytest.importorskip("transformers")


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


def sequences(folder: Path, packing: str) -> int:
    """How many the samples need."""
    argv = flags(folder, f"--split 1,0,0 --train-iters 1 --packing {packing}").split()
    data = read_finetune_settings(argv, 1)[1]
    assert data is not None
    return len(data.train)


LORA = "--lora-rank 4 --global-batch-size 4 --train-iters 4 --optimizer adam --adam-eps 1e-4"
HALF = "--exit-interval 2"
OTHER = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Runs of one process, in one start."""
    one, saved = "--split 1,0,0 --train-iters 1 --optimizer sgd", f"--save {tmp_path_factory.mktemp('saved')} --resume"
    runs = {
        "separate": f"{one} --packing off --global-batch-size 60 --micro-batch-size 4",
        "packed": f"{one} --packing best-fit --global-batch-size {sequences(folder, 'best-fit')}",
        "whole": LORA,
        "first half": f"{LORA} {saved} {HALF}",
        "second half": f"{LORA} {saved}",
        "bf16": f"{LORA} --bf16",
        "full": "--global-batch-size 4 --train-iters 1",
    }
    results = run_distributed(tune_all, 1, [flags(folder, more) for more in runs.values()])[0]
    return dict(zip(runs, results, strict=True))


def test_packed_samples_train_as_separate_ones(folder: Path, alone: dict[str, dict[str, Any]]) -> None:
    """The same samples, all of them in one step: 60 sequences of one sample, or as many as packing needs."""
    assert sequences(folder, "off") == 60 and sequences(folder, "best-fit") < 40
    separate, packed = alone["separate"], alone["packed"]
    assert packed["losses"][0] == pytest.approx(separate["losses"][0], rel=1e-6)
    want, got = separate["gradients"][0], packed["gradients"][0]
    norms = layer_norms(want)
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 1e-6 * norms[layer_of(name)], name


def test_a_resume_in_the_same_layout_is_bit_for_bit(alone: dict[str, dict[str, Any]]) -> None:
    """In the middle of an epoch."""
    whole, second = alone["whole"], alone["second half"]
    assert alone["first half"]["losses"] == whole["losses"][:2] and second["losses"] == whole["losses"][2:]
    assert all(torch.equal(second["final"][n], t) for n, t in whole["final"].items())


def test_an_adapter_checkpoint_goes_on_in_another_layout(
    folder: Path, tmp_path: Path, alone: dict[str, dict[str, Any]]
) -> None:
    whole, saved = alone["whole"], f"--save {tmp_path} --resume"
    halves = [flags(folder, LORA, saved, HALF, OTHER), flags(folder, LORA, saved, "--pipeline-model-parallel-size 2")]
    ranks = run_distributed(tune_all, 2, halves)
    first, second = (together([rank[i] for rank in ranks]) for i in range(2))
    assert len(first["losses"]) == 2
    manifest = json.loads((tmp_path / "iter_0000002" / "manifest.json").read_bytes())
    assert all(".lora." in name for name in manifest["tensors"]), "the frozen model is not saved again"
    losses = [*first["losses"], *second["losses"]]
    assert len(losses) == 4
    assert losses == pytest.approx(whole["losses"], rel=1e-5)
    for name, tensor in whole["final"].items():
        moved = (tensor - whole["initial"][name]).norm()
        assert (second["final"][name] - tensor).norm() <= 1e-4 * moved, name


def test_memory_of_the_optimizer_is_that_of_the_adapters_and_the_base_rests_in_bf16(
    alone: dict[str, dict[str, Any]],
) -> None:
    bf16, full, fp32 = alone["bf16"], alone["full"], alone["whole"]
    adapters = sum(t.numel() for t in bf16["final"].values())
    weights = sum(t.numel() for t in full["final"].values())
    assert bf16["optimizer"] == 2 * 4 * adapters, "Adam's two moments, fp32"
    assert full["optimizer"] >= 2 * 4 * weights > 5 * bf16["optimizer"]
    assert bf16["dtypes"] == ({"torch.float32"}, {"torch.bfloat16"})
    assert fp32["dtypes"] == ({"torch.float32"}, {"torch.float32"})
    assert bf16["losses"] != fp32["losses"] and bf16["losses"] == pytest.approx(fp32["losses"], rel=0.02)


def command(folder: Path, text: str, main: Callable[[list[str]], int] = finetune.main) -> tuple[int, str, str]:
    """finetune.py in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with clean_process(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            os.environ.pop(name, None)
        os.chdir(folder)
        code = main(text.split())
    return code, out.getvalue(), err.getvalue()


def test_a_preview_prints_samples_and_trains_nothing(folder: Path) -> None:
    code, out, _ = command(folder, flags(folder, "--preview 2"))
    assert code == 0 and out.count("--- text") == 2 and "⟦" in out and "\x1b" not in out, "colours are for terminals"
    assert "samples: 60 of 60 used" in out and "% full" in out
    code, out, _ = command(folder, f"--load {folder} --data-path {folder}/dpo.jsonl --objective dpo --preview 2")
    assert code == 0 and out.count("--- text") == 4, "two answers of each pair"


def test_a_dry_run_shows_the_settings(folder: Path) -> None:
    code, out, _ = command(folder, flags(folder, "--lora-rank 4 --train-epochs 2 --dry-run"))
    assert code == 0 and "lora_alpha: 8.0" in out and "hidden_size: 32" in out and "train_epochs: 2" in out


def test_an_epoch_that_is_no_whole_number_of_steps_says_what_is_read_again(folder: Path) -> None:
    packed = "--train-epochs 1 --packing off --split 1,0,0 --dry-run --micro-batch-size 4"
    code, out, _ = command(folder, flags(folder, f"{packed} --global-batch-size 16"))
    said = "note: --train-epochs 1 are 60 sequences, but 4 steps of 16 read 64: the last step reads 4 of them again"
    assert code == 0 and said in out
    code, out, _ = command(folder, flags(folder, f"{packed} --global-batch-size 12"))
    assert code == 0 and "note: --train-epochs" not in out


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


def test_an_evaluation_ends_with_the_validation_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches --eval-iters allows: there is one with samples, before the first step and after it."""
    passed, forward = list[int](), Accumulation.forward

    def counted(self: Accumulation, micro_batches: MicroBatches) -> Any:
        passed.append(sum(int((m.labels != IGNORE_INDEX).sum()) for m in micro_batches))
        return forward(self, micro_batches)

    monkeypatch.setattr(Accumulation, "forward", counted)
    more = "--train-iters 1 --global-batch-size 4 --eval-interval 1 --eval-iters 30"
    code, out, err = command(folder, flags(folder, more, QUIET))
    assert code == 0, err
    assert len(passed) == 2 and passed[0] == passed[1] > 0 and out.count("validation loss at iteration") == 2


def test_adapters_that_are_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge_lora(["--load", str(tmp_path), "--adapter", f"{tmp_path}/adapter", "--save", f"{tmp_path}/new"]) == 2
    assert "there is no such folder. A run writes the folder adapter when it ends" in capsys.readouterr().err


def test_an_object_store_gets_checkpoints_and_the_adapter(folder: Path) -> None:
    pytest.importorskip("fsspec")
    more = "--save memory://tuned/run --lora-rank 2 --train-iters 1 --global-batch-size 4"
    code, out, err = command(folder, flags(folder, more, QUIET))
    assert code == 0, err
    assert "adapter in peft's format: memory://" in out
    assert open_folder("memory://tuned/run/adapter").size("adapter_model.safetensors")


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
        assert "attention: math (--attention-backend math; each key/value head is repeated for its query heads)" in out
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
    "a name of the hub": (
        "--load meta-llama/Llama-3.2-1B --data-path x --train-iters 1",
        "there is no such folder; of a model on the hub: --load hub:meta-llama/Llama-3.2-1B",
    ),
    "no such folder": ("--load {0}/gone --data-path x --train-iters 1", "there is no such folder"),
    "not a model": ("--load {0}/logs --data-path x --train-iters 1", "neither a Hugging Face model nor"),
    "no tokenizer": ("--load {0}/bare --data-path x --train-iters 1", "as after an export without a tokenizer"),
    "an old tokenizer": ("--load {0}/old --data-path x --train-iters 1", "save_pretrained writes a tokenizer.json"),
    "named size": ("--load {0} --model debug --data-path x --train-iters 1", "leave it out"),
    "architecture": ("--load {0} --hidden-size 64 --data-path x --train-iters 1", "with --hidden-size 32, not 64"),
    "no such file": ("--load {0} --data-path {0}/gone.jsonl --train-iters 1", "no such file"),
    "no adapters": ("--load {0} --data-path x --train-iters 1 --lora-alpha 3", "give --lora-rank or --load-adapter"),
    "no such layer": (
        f"{ONE} --lora-rank 2 --lora-target-modules q_proj",
        "q_proj chooses no linear layer of this model: they are down, gate, key, output, query, up, value; "
        "Hugging Face's q_proj is query here",
    ),
    "the output matrix": (
        f"{ONE} --lora-rank 2 --lora-target-modules query,lm_head",
        "lm_head is in no block, and adapters on the output matrix or embeddings are not supported",
    ),
    "brought": ("--load {0} --data-path x --train-iters 1 --load-adapter a --lora-rank 3", "brings it"),
    "for dpo": ("--load {0} --data-path x --train-iters 1 --dpo-beta 0.3", "without --objective dpo"),
    "off": (f"{ONE} --objective dpo --dpo-reference adapters-off", "no adapters to switch off"),
    "packed pairs": (f"{ONE} --objective dpo --packing best-fit", "does not pack answers"),
    "labels": ("--load {0} --data-path {0}/kto.jsonl --train-iters 1", "give --objective kto"),
    "pairs": ("--load {0} --data-path {0}/dpo.jsonl --train-iters 1", "give --objective dpo, orpo or reward"),
    "a table for kto": (
        "--load {0} --data-path {0}/kto.jsonl --train-iters 1 --objective kto --dpo-reference precomputed",
        "answers of other samples",
    ),
    "Megatron's": ("--load {0}/megatron --data-path x --train-iters 1", "is a checkpoint of Megatron's: python"),
    "not pairs": (f"{ONE} --objective dpo", "a pair needs chosen and rejected"),
    "resume": ("--load {0} --data-path x --train-iters 1 --resume", "give --save"),
    "smoothing": ("--load {0} --data-path x --train-iters 1 --objective dpo --dpo-label-smoothing 0.5", "below 0.5"),
    "for sigmoid": (
        "--load {0} --data-path x --train-iters 1 --objective dpo --dpo-loss-type ipo --dpo-label-smoothing 0.1",
        "without --dpo-loss-type sigmoid",
    ),
    "for orpo": ("--load {0} --data-path x --train-iters 1 --objective orpo --dpo-beta 0.3", "--objective dpo"),
    "template": ("--load {0} --data-path {0}/sft.jsonl --train-iters 1 --chat-template {0}/gone", "error: --chat"),
    "template in JSON": (
        "--load {0} --data-path {0}/sft.jsonl --train-iters 1 --chat-template {0}/tokenizer_config.json",
        "tokenizer_config.json is JSON: write the template in it to a file of its own",
    ),
    "template's text": (
        "--load {0} --data-path {0}/sft.jsonl --train-iters 1 --chat-template {0}/broken.jinja",
        "broken.jinja: the chat template is not valid",
    ),
    "validation": (f"{ONE} --eval-interval 1 --split 999,1,0", "leaves none of 60 samples for validation"),
    "one to validate kto": (
        "--load {0} --data-path {0}/kto.jsonl --train-iters 1 --objective kto --eval-interval 1 --split 59,1,0",
        "there is one sample only for validation",
    ),
    "pretraining's": ("--load {0} --mock-data", "unknown flag --mock-data"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_line(folder: Path, case: str) -> None:
    text, why = BAD[case]
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "broken.jinja").write_text("{% for")
    for name in ("bare", "old"):  # exported without a tokenizer, and with one as it was saved years ago
        (folder / name).mkdir(exist_ok=True)
        shutil.copyfile(folder / "config.json", folder / name / "config.json")
    (folder / "old" / "vocab.json").write_text("{}")
    (folder / "megatron").mkdir(exist_ok=True)
    (folder / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    code, _, err = command(folder, text.format(folder) + " --no-tensorboard --no-progress-bar")
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and why in lines[0], err


@pytest.fixture(scope="module")
def histories(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs: "lora" and "full" of fine-tuning, "pretraining"."""
    root = tmp_path_factory.mktemp("histories")
    (root / "template").write_text("a template of its own")
    pair = {"prompt": "one and", "chosen": " two", "rejected": " one"}
    (root / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 8)
    more = f"{SHORT} --train-iters 1"
    for name, text in (
        ("lora", f"{flags(folder, more)} --lora-rank 2 --lora-dropout 0.5 --chat-template {root}/template"),
        ("full", flags(folder, more)),
    ):
        assert command(folder, f"{text} --save {root / name} {QUIET}")[0] == 0
    assert pretrain(folder, f"--load {folder} --finetune {PRETRAINING} --save {root / 'pretraining'}")[0] == 0
    return root


SHORT, QUIET = "--global-batch-size 4", "--no-tensorboard --no-progress-bar"
PRETRAINING = "--mock-data --seq-length 48 --train-iters 1 --log-dir logs"


def pretrain(folder: Path, text: str) -> tuple[int, str, str]:
    return command(folder, f"{text} {QUIET}", pretrain_gpt.main)


REFUSED = {
    "another kind": ("--save {0}/pretraining --resume", "is not of a fine-tuning run, so --resume cannot continue"),
    "no adapters now": ("--save {0}/lora --resume", "of rank 2, scaled by 2, in this run none; give --lora-rank"),
    "adapters now": ("--save {0}/full --resume --lora-rank 2", "is none, in this run of rank 2, scaled by 2; give"),
    "another rank": ("--save {0}/lora --resume --lora-rank 3", "of rank 2, scaled by 2, in this run of rank 3"),
    "another scale": ("--save {0}/lora --resume --lora-rank 2 --lora-alpha 9", "in this run of rank 2, scaled by 4.5"),
    "other layers": ("--save {0}/lora --resume --lora-rank 2 --lora-target-modules up", "key is of rank 2"),
    "another objective": (
        "--save {0}/full --resume --objective orpo --data-path {0}/pairs.jsonl",
        "is of a run with --objective sft, which --objective orpo cannot continue: give another --save",
    ),
    "another optimizer": ("--save {0}/full --resume --optimizer sgd", "give --optimizer as it was"),
    "adapters alone": ("--load {0}/lora", "holds adapters without their model: python tools/merge_lora.py"),
    "an adapter's folder": ("--load {0}/lora/adapter", "neither a Hugging Face model nor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_goes_on_from_its_own_kind_only(folder: Path, histories: Path, case: str) -> None:
    more, why = REFUSED[case]
    text = f"{flags(folder, '--train-iters 3 --global-batch-size 4')} {more.format(histories)} {QUIET}"
    code, _, err = command(folder, text)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and why in lines[0], err


def test_a_save_that_cannot_be_used_is_refused_before_data_are_read(
    folder: Path, histories: Path, tmp_path: Path
) -> None:
    """There are no data to be read; who read them first would say so."""
    shutil.copytree(histories / "full", tmp_path / "used")
    held = json.dumps(asdict(Holder.here()))  # of a process that lives: this one
    (tmp_path / "used" / "lock").write_text(held)
    command_line = f"--load {folder} --data-path {folder}/gone.jsonl --train-iters 1 --log-dir {folder}/logs {QUIET}"
    for more, why in (
        (f"--save {tmp_path}/used --resume", f"--save {tmp_path}/used is in use by process"),
        (f"--save {histories}/full", "--resume continues from there"),
        (f"--save {folder}/sft.jsonl/x", f"--save {folder}/sft.jsonl/x: "),
        ("--save-interval 2", "--save-interval 2 needs --save"),
        ("--exit-interval 2", "saves and stops: give --save"),
        (f"--save {tmp_path}/new --async-save", "gone.jsonl: no such file"),
    ):
        code, _, err = command(folder, f"{command_line} {more}")
        assert code == 2 and err.count("error: ") == 1 and why in err, (more, err)
    assert (tmp_path / "used" / "lock").read_text() == held and not (histories / "full" / "lock").exists()
    assert not (tmp_path / "new").exists()


def test_pretraining_takes_weights_of_fine_tuning_but_does_not_go_on_with_it(folder: Path, histories: Path) -> None:
    code, _, err = pretrain(folder, f"--load {histories}/full {PRETRAINING}")
    assert code == 2 and "is of a fine-tuning run, which finetune.py --resume continues" in err
    code, out, err = pretrain(folder, f"--load {histories}/full --finetune {PRETRAINING}")
    assert code == 0 and "weights are those of iteration 1" in out, err


def test_a_resume_names_what_changed_and_nothing_else(folder: Path, histories: Path, tmp_path: Path) -> None:
    """The same command first, then one with another model, layout of sequences and dropout."""
    shutil.copytree(histories / "lora", tmp_path / "lora")
    same = f"{SHORT} --train-iters 2 --lora-rank 2 --lora-dropout 0.5 --save {tmp_path}/lora --resume {QUIET}"
    code, out, err = command(folder, f"{flags(folder, same)} --chat-template {histories}/template")
    assert code == 0, err
    others = ("lr_decay_iters", "have a prompt and an answer as text")  # the latter is of the samples, not of a change
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert [line for line in notes if not any(said in line for said in others)] == []
    text = flags(folder, same).replace(f"--load {folder}", f"--load {histories}/full")
    code, out, err = command(folder, f"{text} --train-iters 3 --lora-dropout 0 --packing off")
    assert code == 0, err
    for name, before, now in (
        ("load", folder, f"{histories}/full"),
        ("packing", "best-fit", "stream"),
        ("lora_dropout", 0.5, 0.0),
        ("chat_template", f"{histories}/template", None),
    ):
        assert f"note: {name} was {before} in the checkpoint and is {now} now" in out, name


def test_an_exported_model_has_the_tokenizer_and_the_template_of_its_run(
    folder: Path, histories: Path, tmp_path: Path
) -> None:
    """Merged adapters, and a model that was trained whole: one command each, and what comes out can be trained on."""
    merged, full = str(tmp_path / "merged"), str(tmp_path / "full")
    assert merge_lora(["--load", str(folder), "--adapter", f"{histories}/lora/adapter", "--save", merged]) == 0
    assert convert(["--load", f"{histories}/full", "--save", full]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for out in (merged, full):
            assert (Path(out) / name).read_bytes() == (folder / name).read_bytes()
    assert (Path(merged) / "chat_template.jinja").read_text() == "a template of its own"
    assert not (Path(full) / "chat_template.jinja").exists()
    for source in (merged, f"{histories}/full", f"{histories}/full/iter_0000001"):
        code, _, err = command(folder, f"--load {source} --data-path {folder}/sft.jsonl --preview 1")
        assert code == 0, err


@pytest.mark.parametrize("implementation", ["smp", "transformers"])
def test_an_exported_model_stops_where_its_texts_ended(folder: Path, tmp_path: Path, implementation: str) -> None:
    """A base model, whose texts end with another token than the turns of the template that it is trained with."""
    base, said = tmp_path / "base", "note: texts end with <|im_end|>, at which generation by the model's files does not"
    shutil.copytree(folder, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (base / "generation_config.json").unlink()  # which transformers made of it
    words = f"--train-iters 1 --save-hf --model-implementation {implementation} --no-tensorboard"
    code, out, err = command(folder, f"{flags(base, words)} --save {tmp_path}/run")
    assert code == 0 and said in out, err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf_model")
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == ([0, 2], 0)
    assert model.config.eos_token_id == 0, "of the model's files"
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 2], "top_p": 0.5}')
    code, out, err = command(folder, f"{flags(base, words)} --save {tmp_path}/named")
    assert code == 0 and said not in out, err
    kept = (tmp_path / "named/hf_model/generation_config.json").read_bytes()
    assert kept == (base / "generation_config.json").read_bytes()


def test_dropout_of_an_adapter_is_kept_unless_it_is_given(folder: Path, histories: Path) -> None:
    """Also as 0: the adapter came with 0.5."""
    losses = []
    for more in ("", "--lora-dropout 0", "--lora-dropout 0.5"):
        start = f"--load-adapter {histories}/lora/adapter --train-iters 1 --global-batch-size 4 --log-interval 1"
        code, out, err = command(folder, f"{flags(folder, start)} {more} {QUIET}")
        assert code == 0, err
        losses.append(out.split("lm loss: ")[1].split(" ")[0])
    assert losses[0] == losses[2] != losses[1]


def test_processes_that_read_different_samples_do_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp.training.tuning.finetuning.gather", lambda value: [value, "of another file"])
    code, _, err = command(folder, f"{flags(folder, '--train-iters 1')} {QUIET}")
    assert code == 2 and "the processes do not read the same samples" in err


@pytest.mark.slow
def test_a_compiled_model_trains_adapters_alike(folder: Path) -> None:
    more = f"{LORA} --lora-dropout 0.2 --seq-length 32"
    plain = run_distributed(tune_all, 1, [flags(folder, more)])[0][0]
    flag = flags(folder, more, "--compile --tensor-model-parallel-size 2")
    compiled = together([rank[0] for rank in run_distributed(tune_all, 2, [flag])])
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
