"""Every setting that only fine-tuning has changes a real run; its default and its other values are told apart."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.config.command_line.entry_points import FINETUNE
from smp.config.command_line.fields import settings
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.training import (
    test_distilling,
    test_environments,
    test_flags_elastic,
    test_reinforcement_runs,
    test_rollout_engines,
    test_teacher_layouts,
    test_teacher_with_experts,
    test_valid_data,
    test_vision,
)
from tests.training.flag_runs import proves
from tests.training.test_finetune_runs import command
from tests.training.tiny_hf import TEMPLATE, write_adapter, write_model, write_pieces, write_samples, write_tokenizer
from tests.training.tuning_lab import QUIET, tune_all
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge

pytest.importorskip("transformers")
pytest.importorskip("peft")

LORA = "--lora-rank 2 --train-iters 2 --lr 0.05"
DPO = "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 2 --train-iters 2 --lr 0.05"
KTO = DPO.replace("dpo", "kto")
REWARD = "--data-path {0}/dpo.jsonl --objective reward --train-iters 2 --lr 0.05"
RUNS = {
    "base": "--train-iters 2 --lr 0.05",
    "lora": LORA,
    "alpha": f"{LORA} --lora-alpha 9",
    "dropout": f"{LORA} --lora-dropout 0.5",
    "targets": f"{LORA} --lora-target-modules up",
    "dora": f"{LORA} --use-dora",
    "adapter": "--load-adapter {0}/theirs --train-iters 2 --lr 0.05",
    "plain": f"{LORA} --load {{0}}/wide",
    "4 bits": f"{LORA} --load {{0}}/wide --load-in-4bit",
    "4 bits, plain scales": f"{LORA} --load {{0}}/wide --load-in-4bit --no-bnb-4bit-use-double-quant",
    "dpo": DPO,
    "beta": f"{DPO} --dpo-beta 0.5",
    "smoothing": f"{DPO} --dpo-label-smoothing 0.2",
    "copy": f"{DPO} --dpo-reference copy",
    "hinge": f"{DPO} --dpo-loss-type hinge",
    "orpo": DPO.replace("objective dpo", "objective orpo"),
    "odds": DPO.replace("objective dpo", "objective orpo --orpo-beta 0.7"),
    "reward": REWARD,
    "centred": f"{REWARD} --reward-center-coefficient 0.5",
    "kto": KTO,
    "kto beta": f"{KTO} --kto-beta 0.5",
    "kto liked": f"{KTO} --kto-desirable-weight 2",
    "kto disliked": f"{KTO} --kto-undesirable-weight 2",
    "decay": "--train-iters 2 --lr 0.05 --weight-decay 0.5",
    "epochs": "--train-epochs 2 --global-batch-size 8 --lr 0.05",
    "whole prompt": "--train-iters 2 --lr 0.05 --no-mask-prompt",
    "unpacked": "--train-iters 2 --lr 0.05 --packing off",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path)
    write_samples(path)
    write_tokenizer(path / "wide")
    write_tokenizer(path / "bare", template=None)
    write_model(path / "wide", layers=1, hidden=64)
    write_adapter(path, path / "theirs", r=3, lora_alpha=10, target_modules=["q_proj"])
    return path


def flags(folder: Path, more: str) -> str:
    common = "--data-path {0}/sft.jsonl --log-dir {0}/logs --seq-length 48 --global-batch-size 4"
    return f"{'' if '--load ' in more else '--load {0}'} {common} {more}".format(folder)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    results = run_distributed(tune_all, 1, [flags(folder, more) for more in RUNS.values()])[0]
    return dict(zip(RUNS, results, strict=True))


def ranks(run: dict[str, Any]) -> set[int]:
    return {t.shape[0] for name, t in run["initial"].items() if name.endswith(".lora.a")}


@proves("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "load_adapter")
def test_adapters(runs: dict[str, dict[str, Any]]) -> None:
    assert ranks(runs["base"]) == set() and ranks(runs["lora"]) == {2} and ranks(runs["adapter"]) == {3}
    base, lora = runs["base"]["losses"], runs["lora"]["losses"]
    assert lora[0] == pytest.approx(base[0], rel=1e-6) and lora[1] != base[1], "they begin as no change"
    assert runs["alpha"]["losses"][0] == lora[0] and runs["alpha"]["losses"][1] != lora[1], "--lora-alpha"
    assert runs["dropout"]["losses"][1] != lora[1], "--lora-dropout"
    assert {name.split(".")[-3] for name in runs["targets"]["initial"]} == {"up"}, "--lora-target-modules"
    assert runs["adapter"]["losses"][0] != pytest.approx(base[0], rel=1e-3), "--load-adapter"


@proves("use_dora")
def test_row_norms_are_trained(runs: dict[str, dict[str, Any]]) -> None:
    """--use-dora: the model begins as it was, and norms of rows move beside A and B."""
    lora, dora = runs["lora"], runs["dora"]
    assert dora["losses"][0] == pytest.approx(lora["losses"][0], rel=1e-5) and dora["losses"][1] != lora["losses"][1]
    names = {name for name in dora["initial"] if name.endswith(".lora.magnitude")}
    assert len(names) == len({name for name in lora["initial"] if name.endswith(".lora.a")})
    assert names <= dora["moved"][0] and not any("magnitude" in name for name in lora["initial"])


@proves("load_in_4bit", "bnb_4bit_use_double_quant")
def test_weights_in_4_bits(runs: dict[str, dict[str, Any]]) -> None:
    plain, double, single = (runs[name] for name in ("plain", "4 bits", "4 bits, plain scales"))
    assert len({run["losses"][0] for run in (plain, double, single)}) == 3
    assert double["losses"][0] == pytest.approx(plain["losses"][0], rel=0.05)
    assert single["losses"][0] == pytest.approx(double["losses"][0], rel=0.01)
    assert double["held"] < plain["held"]


@proves("objective", "dpo_loss_type", "dpo_beta", "dpo_label_smoothing", "dpo_reference", "orpo_beta")
def test_preferences(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["dpo"]["more"] and not runs["lora"]["more"], "--objective"
    first, second = runs["dpo"]["losses"]
    assert first == pytest.approx(0.693147, abs=1e-6) and second < first
    assert runs["beta"]["losses"][1] != second and runs["smoothing"]["losses"][1] != second
    assert runs["copy"]["losses"] == runs["dpo"]["losses"], "a copy says the same as adapters that are off ..."
    assert runs["copy"]["held"] > runs["dpo"]["held"], "... from weights of its own"
    assert runs["hinge"]["losses"][0] == 1.0 and runs["hinge"]["losses"][1] < 1.0, "--dpo-loss-type"
    assert runs["orpo"]["held"] == runs["dpo"]["held"] and runs["orpo"]["losses"][0] > 1.0, "no reference"
    assert runs["odds"]["losses"][0] > runs["orpo"]["losses"][0], "--orpo-beta"


@proves("reward_center_coefficient")
def test_scores(runs: dict[str, dict[str, Any]]) -> None:
    plain, centred = runs["reward"], runs["centred"]
    assert plain["initial"]["head.weight"].shape == (1, 32) and "reward accuracy" in plain["more"][0]
    assert centred["losses"][0] > plain["losses"][0]


@proves("kto_beta", "kto_desirable_weight", "kto_undesirable_weight")
def test_labels(runs: dict[str, dict[str, Any]]) -> None:
    first, second = runs["kto"]["losses"]
    assert first == 0.5, "1 - sigmoid(0), where policy and reference are the same"
    assert runs["kto beta"]["losses"][0] == 0.5 and runs["kto beta"]["losses"][1] != second
    liked, disliked = runs["kto liked"]["losses"][0], runs["kto disliked"]["losses"][0]
    assert liked > 0.5 and disliked > 0.5 and liked + disliked == pytest.approx(1.5), "shares of both kinds"
    assert set(runs["kto"]["more"][0]) == {"KL", "reward of desirable", "reward of undesirable"}


@proves("lr", "weight_decay", "train_epochs", "mask_prompt", "packing")
def test_training(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    config, data = read_finetune_settings(shlex.split(flags(folder, f"{QUIET} --train-iters 1")), 1)
    assert config.optim.lr == 2e-5 and config.data.packing == "best-fit" and data is not None
    assert runs["decay"]["losses"][0] == runs["base"]["losses"][0]
    assert any((runs["decay"]["final"][n] != t).any() for n, t in runs["base"]["final"].items()), "--weight-decay"
    assert len(runs["epochs"]["losses"]) == -(-2 * len(data.train) // 8), "--train-epochs"
    assert runs["whole prompt"]["losses"][0] != runs["base"]["losses"][0], "--no-mask-prompt"
    assert runs["unpacked"]["tokens"][0] < runs["base"]["tokens"][0], "--packing off: fewer tokens in a sequence"


@proves("log_dir", "split", "data_path", "seq_length", "micro_batch_size", "global_batch_size")
def test_what_the_data_are_laid_out_as(folder: Path) -> None:
    def read(more: str) -> tuple[Any, Any]:
        return read_finetune_settings(shlex.split(f"{flags(folder, '--train-iters 1')} {more}"), 1)

    config, data = read("")
    assert len(read("--split 50,50,0")[1].valid.order) == 30 and len(data.valid.order) == 3
    assert read("--seq-length 24")[1].train.length == 24 and len(read("--seq-length 24")[1].train) > len(data.train)
    again = shutil.copy(f"{folder}/sft.jsonl", f"{folder}/again.jsonl")
    assert read(f"--data-path {folder}/sft.jsonl {again}")[1].samples.offsets[-1] == 2 * len(data.samples.tokens)
    assert read("--micro-batch-size 2")[0].data.micro_batch_size == 2
    assert read("--global-batch-size 8")[0].data.global_batch_size == 8
    assert config.logging.log_dir == f"{folder}/logs" and settings(FINETUNE)["log_dir"].default == "runs/finetune"


@proves("chat_template", "tokenizer_model", "bad_sample_threshold", "preview")
def test_reading(folder: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]}
    chats.write_text("".join(json.dumps(row) + "\n" for row in [good, good, good, {"messages": []}]))
    argv = f"--load {folder} --train-iters 1 --data-path {chats} --split 1,0,0"
    code, _, err = command(folder, argv)
    assert code == 2 and "1 of 4 samples cannot be used" in err and "chats.jsonl:4" in err
    (tmp_path / "template").write_text("ASKED:{{ messages[0].content }}" + TEMPLATE)
    more = f"--bad-sample-threshold 0.5 --chat-template {tmp_path}/template --preview 1"
    code, out, _ = command(folder, f"{argv} {more}")
    assert code == 0 and "ASKED:hi" in out and out.count("--- text") == 1 and "1 dropped" in out
    write_tokenizer(tmp_path / "other", template=None)
    code, _, err = command(folder, f"{argv} --bad-sample-threshold 0.5 --tokenizer-model {tmp_path}/other")
    assert code == 2 and "there is no chat template" in err
    write_pieces(tmp_path / "pieces/tokenizer.model")
    shutil.copyfile(tmp_path / "template", tmp_path / "pieces/chat_template.jinja")
    code, _, err = command(folder, f"{argv} --bad-sample-threshold 0.5 --tokenizer-model {tmp_path}/pieces")
    assert code == 2 and err.startswith("error: --data-path 4 of 4 samples cannot be used") and err.count("\n") == 1
    assert f"the chat template in {tmp_path}/pieces/chat_template.jinja is not read with" in err


@proves("apply_chat_template")
def test_texts_as_messages(folder: Path) -> None:
    """Samples that say more than is used, and texts that are trained without the template, are told in a line each."""
    (folder / "more.jsonl").write_text('{"prompt": "hi ", "completion": "it is", "id": 1}\n' * 3)
    argv = f"--load {folder} --train-iters 1 --data-path {folder}/more.jsonl --split 1,0,0 --preview 1"
    code, out, _ = command(folder, argv)
    assert code == 0 and "\nhi ⟦it is<|im_end|>⟧" in out
    assert "note: rows also have id (3): not used" in out
    assert "note: 3 samples have a prompt and an answer as text" in out and "--apply-chat-template makes" in out
    code, out, _ = command(folder, f"{argv} --apply-chat-template")
    assert code == 0 and "<|im_start|>assistant\n⟦it is<|im_end|>⟧" in out and "as text" not in out
    assert "names sep_token" not in out
    (folder / "sep.jinja").write_text("{{ sep_token }}" + TEMPLATE)
    code, out, _ = command(folder, f"{argv} --chat-template {folder}/sep.jinja")
    assert code == 0 and "note: the chat template names sep_token, which the tokenizer does not have" in out
    code, out, _ = command(folder, f"{argv} --tokenizer-model {folder}/bare")
    assert code == 0 and "as text" not in out, "there is no template to apply"


@proves(
    *("load", "ckpt_step", "save", "resume", "save_interval", "save_mtbf_hours", "async_save", "keep_last_k"),
    *("save_retain_interval", "keep_best_k"),
)
def test_checkpoints(folder: Path, tmp_path: Path) -> None:
    def tuned(name: str, more: str) -> set[str]:
        text = f"{flags(folder, '--train-iters 4 --lr 0.05 --eval-interval 2')} --save {tmp_path / name} {more}"
        code, out, err = command(folder, f"{text} --no-tensorboard --no-progress-bar")
        assert code == 0, err
        seen.append(out)
        return {path.name for path in (tmp_path / name).iterdir() if path.name.startswith("iter")}

    seen: list[str] = []
    every = tuned("a", "--save-interval 1")
    assert every == {f"iter_000000{i}" for i in range(1, 5)}
    assert tuned("b", "--save-interval 1 --keep-last-k 2") == {"iter_0000003", "iter_0000004"}
    kept = tuned("c", "--save-interval 1 --save-retain-interval 2 --async-save")
    assert kept == {"iter_0000002", "iter_0000003", "iter_0000004"}
    assert tuned("d", "--save-interval 1 --keep-last-k 2 --keep-best-k 1") >= {"iter_0000004"}
    assert "iter_0000001" in tuned("e", "--save-mtbf-hours 1000")
    assert tuned("a", "--resume --train-iters 5") == {*every, "iter_0000005"} and "resumed from" in seen[-1]
    code, out, err = command(folder, f"{flags(folder, '--train-iters 4')} --save {tmp_path / 'a'}")
    assert code == 0 and "resumed from" in out, "the same run, started again"
    losses = []
    for step in ("", "--ckpt-step 1"):  # a checkpoint of ours is a model to start from
        argv = flags(folder, f"--train-iters 1 --lr 0.05 --tokenizer-model {folder} {step}")
        argv = argv.replace(f"--load {folder}", f"--load {tmp_path / 'a'}")
        code, out, err = command(folder, f"{argv} --no-tensorboard --no-progress-bar --log-interval 1")
        assert code == 0, err
        losses.append(out.split("lm loss: ")[1].split(" ")[0])
    assert losses[0] != losses[1], "--ckpt-step"


@proves("save_hf")
@pytest.mark.parametrize("more", ["", "--lora-rank 2", "--bf16"])
def test_the_end_is_a_hugging_face_folder(folder: Path, tmp_path: Path, more: str) -> None:
    """The same files as the tools write of the run's last checkpoint, also when the run is asked for again."""
    argv = f"{flags(folder, '--train-iters 2 --lr 0.05')} --save {tmp_path}/run {more} --no-tensorboard"
    for _ in range(2):
        code, out, err = command(folder, f"{argv} --save-hf --resume --no-progress-bar")
        assert code == 0 and f"Hugging Face folder: {tmp_path}/run/hf_model\n" in out, err
        tool = f"--load {tmp_path}/run --save {tmp_path}/other" + (" --dtype bf16" if "bf16" in more else "")
        words = f"--load {folder} --adapter {tmp_path}/run/adapter --save {tmp_path}/other"
        code, _, err = command(folder, words if "lora" in more else tool, merge if "lora" in more else convert)
        assert code == 0, err
        names = {path.name for path in (tmp_path / "other").iterdir()}
        assert names == {path.name for path in (tmp_path / "run/hf_model").iterdir()} >= {"config.json"}
        for name in names:
            assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "run/hf_model" / name).read_bytes(), name
        shutil.rmtree(tmp_path / "other")
    assert sorted(path.name for path in (tmp_path / "run").glob("hf_model*")) == ["hf_model"]
    code, _, err = command(folder, flags(folder, "--train-iters 1 --save-hf"))
    assert code == 2 and "--save-hf needs --save" in err
    code, _, err = command(folder, flags(folder, "--train-iters 1 --save-hf --save s3://bucket/run"))
    assert code == 2 and "--save-hf writes to a file system" in err


@proves("truncation_side")
@pytest.mark.parametrize("side", ["right", "left"])
def test_long_texts_lose_one_of_their_ends(folder: Path, tmp_path: Path, side: str) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "this one is first ", "completion": "it is and here it ends"}) + "\n")
    argv = f"--load {folder} --train-iters 1 --data-path {file} --split 1,0,0 --truncation-side {side}"
    config, whole = read_finetune_settings(shlex.split(f"{argv} --seq-length 64"), 1)
    assert config.data.truncation_side == side and whole is not None
    ids, trained = (list(part) for part in whole.samples[0])
    length = len(ids) - 3
    assert 12 < len(ids) < 64 and trained[-1]
    cut = read_finetune_settings(shlex.split(f"{argv} --seq-length {length - 1}"), 1)[1]
    assert cut is not None and "1 texts cut" in " ".join(cut.lines)
    kept, of_them = (list(part) for part in cut.samples[0])
    where = slice(0, length) if side == "right" else slice(3, None)
    assert kept == ids[where] and of_them[1:] == trained[where][1:] and not of_them[0]
    short = next(n for n in range(2, len(ids)) if not any(trained[1:n]) and trained[n])
    try:
        left = read_finetune_settings(shlex.split(f"{argv} --seq-length {short - 1}"), 1)[1]
        assert side == "left" and left is not None and left.samples[0][1][1:].all()
    except ConfigError as error:
        assert side == "right" and f"nothing in its first {short} tokens is trained" in str(error)


def test_every_setting_of_its_own_is_proven() -> None:
    proofs: dict[str, Callable[..., Any]] = {}
    modules = sys.modules[__name__], test_reinforcement_runs, test_distilling, test_environments, test_flags_elastic
    modules += test_rollout_engines, test_teacher_with_experts, test_teacher_layouts
    modules += (test_valid_data, test_vision)
    for module in modules:
        for _, test in inspect.getmembers(module, inspect.isfunction):
            proofs |= dict.fromkeys(getattr(test, "proves", ()), test)
    shared = settings()
    own = {n for n, s in settings(FINETUNE).items() if n not in shared or s.group in ("data", "checkpoint")}
    own |= {n for n, s in settings(FINETUNE).items() if n in shared and s.default != shared[n].default}
    assert own <= set(proofs) and set(proofs) - own <= set(shared)
