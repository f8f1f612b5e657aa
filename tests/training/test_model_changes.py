"""Runs from weights that were trained with other settings of the model: what fits may change, and is said in one line.

Which settings fit is in tests/convert/test_changes.py; here are whole runs: a context that grows, resumed, exported,
with adapters, and a run that goes on from its own checkpoint with and without its flags.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from tests.training.flag_runs import Run, Runs, proves, run_here
from tests.training.test_finetune_runs import command
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tools.convert_checkpoint import main as convert
from tools.merge_lora import main as merge_lora

pytest.importorskip("transformers")
RUN = (
    "--mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 2 --log-interval 1 --lr 0.01 "
    "--lr-decay-style constant --no-tensorboard --no-progress-bar --log-dir logs"
)
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 97 --max-position-embeddings 32 "
    "--init-method-std 0.2"
)
YARN = "--use-rope-scaling --rope-scaling-type yarn --rope-scaling-factor 4 --rope-original-max-position 32"
LONGER = f"--max-position-embeddings 128 --seq-length 64 {YARN}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run of two iterations, with dropout and biases of queries, keys and values (as Qwen's)."""
    folder = tmp_path_factory.mktemp("own")
    run = run_here(folder, f"{SIZES} --add-qkv-bias --hidden-dropout 0.1 --train-iters 2 --save ck", base=RUN)
    assert run.code == 0, run.err
    return folder / "ck"


def said(run: Run | str) -> list[str]:
    text = run if isinstance(run, str) else run.out
    return [line.partition(" differs from ")[2] for line in text.splitlines() if "differs from" in line]


def same(one: Run, other: Run) -> bool:
    return one.final.keys() == other.final.keys() and all(torch.equal(one.final[n], other.final[n]) for n in one.final)


LONGER_SAID = (
    "how it was trained: --max-position-embeddings 32 -> 128, --use-rope-scaling false -> true, "
    "--rope-scaling-type llama3 -> yarn, --rope-scaling-factor 8 -> 4, --rope-original-max-position 8192 -> 32"
)


def test_a_longer_context_is_said_once_and_exact_on_resume(own: Path, runs: Runs, tmp_path: Path) -> None:
    start = f"--finetune --load {own} {LONGER} --hidden-dropout 0.1"
    whole = run_here(tmp_path / "whole", f"{start} --train-iters 4", base=RUN)
    assert whole.code == 0, whole.err
    assert said(whole) == [LONGER_SAID]
    first = run_here(tmp_path / "parts", f"{start} --train-iters 2 --save ck", base=RUN)
    assert first.losses == whole.losses[:2] and first.losses[0] != run_here(tmp_path / "x", "", base=RUN).losses
    sizes = f"{SIZES} --add-qkv-bias {LONGER} --hidden-dropout 0.1 --train-iters 4"
    for how in (f"{sizes} --load auto --save ck", "--load ck --hidden-dropout 0.1 --train-iters 4 --seq-length 64"):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        shutil.copytree(tmp_path / "parts" / "ck", tmp_path / "again" / "ck")
        again = run_here(tmp_path / "again", how, base=RUN)
        assert again.code == 0, again.err
        # The second knows by itself what it is: the settings are those of the checkpoint.
        assert said(again) == [] and again.losses == whole.losses[2:] and same(again, whole)


def test_a_resume_with_another_setting_is_said_too(own: Path, tmp_path: Path) -> None:
    for flags, line in (
        ("--hidden-dropout 0.1 --rotary-base 500000", "--rotary-base 10000 -> 500000"),
        ("--hidden-dropout 0", "--hidden-dropout 0.1 -> 0"),
        ("--hidden-dropout 0.1 --window-size 8", "--window-size none -> 8"),
        ("--hidden-dropout 0.1", None),
    ):
        run = run_here(tmp_path / "run", f"--load {own} --train-iters 3 {flags}", base=RUN)
        assert run.code == 0 and "at iteration 2" in run.out, run.err
        assert said(run) == ([f"how it was trained: {line}"] if line else [])


def test_what_has_other_tensors_is_refused_in_one_line(own: Path, tmp_path: Path) -> None:
    learned = f"{SIZES} --position-embedding-type learned_absolute --train-iters 1 --save ck"
    assert run_here(tmp_path / "learned", learned, base=RUN).code == 0
    for load, flags, line in (
        (tmp_path / "learned/ck", "--max-position-embeddings 64", "--max-position-embeddings 32, this run has 64"),
        (own, "--no-untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights True, this run has F"),
        (own, "--num-layers 3 --rotary-base 5", "--num-layers 2, this run has 3"),
        (own, "--qk-layernorm --rotary-base 5", "--qk-layernorm False, this run has True"),
    ):
        for how in ("", "--finetune"):
            run = run_here(tmp_path / "run", f"--load {load} {how} --train-iters 3 {flags}", base=RUN)
            assert run.code == 2 and len(run.errors) == 1
            assert f"the checkpoint was trained with {line}" in run.errors[0]


def test_layers_of_multi_token_prediction_may_be_left_out_at_finetune(tmp_path: Path) -> None:
    first = run_here(tmp_path, f"{SIZES} --mtp-num-layers 2 --train-iters 1 --save ck", base=RUN)
    assert first.code == 0, first.err
    for number in ("none", "1"):
        run = run_here(tmp_path, f"--load ck --finetune --mtp-num-layers {number} --train-iters 1", base=RUN)
        assert run.code == 0, run.err
        assert said(run) == [f"how it was trained: --mtp-num-layers 2 -> {number}"]
        assert all(torch.equal(run.initial[name], first.final[name]) for name in run.initial)
        resumed = run_here(tmp_path, f"--load ck --mtp-num-layers {number} --train-iters 2", base=RUN)
        assert resumed.code == 2 and f"--mtp-num-layers 2, this run has {number.title()}" in resumed.err
    more = run_here(tmp_path, "--load ck --finetune --mtp-num-layers 3 --train-iters 1", base=RUN)
    assert more.code == 2 and "--mtp-num-layers 2, this run has 3" in more.err


@pytest.fixture(scope="module")
def exported(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    assert convert(["--load", str(own), "--save", str(folder)]) == 0
    return folder


def test_a_hugging_face_folder_gets_a_longer_context(exported: Path, tmp_path: Path) -> None:
    """The command of docs/context-parallelism.md, and what it trained as a Hugging Face folder again."""
    run = run_here(tmp_path, f"--load {exported} --finetune {LONGER} --train-iters 2 --save ck", base=RUN)
    assert run.code == 0, run.err
    assert said(run) == [LONGER_SAID] and len(run.losses) == 2
    assert convert(["--load", str(tmp_path / "ck"), "--save", str(tmp_path / "hf")]) == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["max_position_embeddings"] == 128
    rope = config.get("rope_parameters") or config["rope_scaling"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 32)


@pytest.mark.parametrize(
    ("rope", "flags", "line"),
    [
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
            "--rope-scaling-type yarn",
            "--rope-scaling-type llama3 -> yarn, --rope-low-freq-factor 2 -> 1, --rope-high-freq-factor 8 -> 4",
        ),
        (
            {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0},
            "--rope-scaling-type linear",
            "--rope-scaling-type yarn -> linear, --rope-original-max-position 32 -> 8192, --yarn-beta-fast 16 -> 32",
        ),
        (
            {"rope_type": "yarn", "factor": 8.0},
            "--no-use-rope-scaling",
            "--use-rope-scaling true -> false, --rope-scaling-type yarn -> llama3, "
            "--rope-original-max-position 32 -> 8192",
        ),
        ({"rope_type": "linear", "factor": 8.0}, "--rope-scaling-factor 16", "--rope-scaling-factor 8 -> 16"),
        ({"rope_type": "default"}, "--position-embedding-type none", "--position-embedding-type rope -> none"),
    ],
)
def test_another_scaling_takes_the_place_of_the_folders_own(
    rope: dict[str, Any], flags: str, line: str, exported: Path, tmp_path: Path
) -> None:
    """What belonged to the scaling that was there goes with it, in both entry points."""
    folder = shutil.copytree(exported, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    if rope["rope_type"] in ("llama3", "yarn"):
        rope = rope | {"original_max_position_embeddings": 32}
    config |= {"rope_parameters": rope | {"rope_theta": 10000.0}}
    config.pop("rope_scaling", None)
    (folder / "config.json").write_text(json.dumps(config))
    run = run_here(tmp_path, f"--load {folder} --finetune {flags} --train-iters 1", base=RUN)
    assert run.code == 0, run.err
    assert said(run) == [f"how it was trained: {line}"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder, count=12)
    return folder


TUNE = "--global-batch-size 2 --micro-batch-size 2 --no-tensorboard --no-progress-bar --train-iters 1 --seq-length 48"


def tune(folder: Path, flags: str) -> tuple[int, str, str]:
    own = f"--data-path {folder}/sft.jsonl --log-dir {folder}/logs"
    return command(folder, f"{own} {TUNE} {flags}", finetune.main)


def test_fine_tuning_with_a_longer_context(chat: Path, tmp_path: Path) -> None:
    longer = "--max-position-embeddings 256 --rotary-base 500000 --window-size 32"
    code, out, err = tune(chat, f"--load {chat} {longer} --save {tmp_path}/full")
    assert code == 0, err
    assert said(out) == [
        "how it was trained: --max-position-embeddings 64 -> 256, --rotary-base 10000 -> 500000, "
        "--window-size none -> 32"
    ]
    # As a base it is what it was trained as; another base of RoPE is said again.
    code, out, err = tune(chat, f"--load {tmp_path}/full --tokenizer-model {chat} --rotary-base 1000000")
    assert code == 0 and said(out) == ["how it was trained: --rotary-base 500000 -> 1000000"], err
    code, out, err = tune(chat, f"--load {tmp_path}/full --tokenizer-model {chat}")
    assert code == 0 and said(out) == [], err
    for flags, line in (
        ("--num-layers 3", "--num-layers 2, not 3; leave --num-layers out"),
        ("--mtp-num-layers 1", "--mtp-num-layers None, not 1; leave --mtp-num-layers out"),
        ("--rotary-base 5 --qk-layernorm", "--qk-layernorm False, not True; leave --qk-layernorm out"),
    ):
        code, out, err = tune(chat, f"--load {chat} {flags}")
        assert code == 2 and f"--load {chat} is a model with {line}" in err


def test_a_fine_tuning_run_goes_on_with_another_setting(chat: Path, tmp_path: Path) -> None:
    lora = f"--load {chat} --lora-rank 2 --save {tmp_path}/lora"
    code, out, err = tune(chat, f"{lora} --rotary-base 500000")
    assert code == 0 and said(out)[0] == "how it was trained: --rotary-base 10000 -> 500000", err
    code, out, err = tune(chat, f"{lora} --resume --train-iters 2 --rotary-base 700000")
    assert code == 0, err
    assert said(out)[:2] == [
        "how it was trained: --rotary-base 10000 -> 700000",  # than the base model
        "how it was trained: --rotary-base 500000 -> 700000",  # than the run before
    ]


def test_adapters_are_merged_into_the_model_that_they_were_trained_with(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = f"--load {chat} --lora-rank 2 --rotary-base 500000 --window-size 32 --save {tmp_path}/lora"
    code, out, err = tune(chat, lora)
    assert code == 0, err
    changed = "--rotary-base 10000 -> 500000, --window-size none -> 32"
    warning = f"what the adapter was trained with: {changed}; checkpoints know it"
    assert any(line.startswith("WARNING: that format says nothing") and warning in line for line in out.splitlines())
    bases = {}
    for adapter in ("lora", "lora/adapter"):
        save = tmp_path / adapter.replace("/", "-")
        save = save.with_name(f"merged-{save.name}")
        assert merge_lora(["--load", str(chat), "--adapter", str(tmp_path / adapter), "--save", str(save)]) == 0
        config = json.loads((save / "config.json").read_text())
        bases[adapter] = (config.get("rope_parameters") or config)["rope_theta"], config.get("sliding_window")
    assert f"the settings that the adapters were trained with: {changed}" in capsys.readouterr().out
    assert bases == {"lora": (500000.0, 32), "lora/adapter": (10000.0, None)}


def test_the_same_settings_are_not_said(chat: Path, tmp_path: Path) -> None:
    code, out, err = tune(chat, f"--load {chat} --lora-rank 2 --rotary-base 10000 --save {tmp_path}/lora")
    assert code == 0 and said(out) == [] and "WARNING" not in out, err


OWN = [
    "--num-experts 4 --moe-ffn-hidden-size 64",
    "--num-experts 4 --moe-layer-freq 2",
    "--num-experts 4 --moe-layer-freq [0,1]",
    "--num-experts 4 --moe-router-topk-scaling-factor 1.0",
    "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 2",
    "--num-experts 4 --moe-shared-expert-intermediate-size 32",
    "--attention-chunk-size 64",
    "--attention-chunk-size 8",
    "--softmax-scale 0.25",
    "--softmax-scale 0.35355339059327373",
    "--window-size 8 --window-attn-skip-freq [1,0]",
    "--window-size 8 --rotary-base-local 10000",
    "--no-rope-freq [0,1] --attn-temperature-tuning --floor-scale 4",
    "--layer-types attention",
    "--use-rope-scaling --rope-scaling-type longrope --rope-original-max-position 16 --longrope-short-factor 1 1 1 1 "
    "--longrope-long-factor 2 2.50 3 4",
    "--use-rope-scaling --rope-scaling-type linear --rope-scaling-factor 2",
    "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8",
    "--position-embedding-type alibi --normalization LayerNorm --no-layernorm-bias",
    "--mtp-num-layers 1",
    "--model debug --num-layers 1",
]


@proves("load")
@pytest.mark.parametrize("flags", OWN)
def test_a_run_goes_on_from_its_own_checkpoint_with_and_without_its_flags(flags: str, tmp_path: Path) -> None:
    """However a setting is written, and whatever it is the default of: the same model, the same bits, nothing said."""
    whole = run_here(tmp_path / "whole", f"{SIZES} {flags} --train-iters 2", base=RUN)
    first = run_here(tmp_path / "first", f"{SIZES} {flags} --train-iters 2 --exit-interval 1 --save ck", base=RUN)
    assert (whole.code, first.code) == (0, 0), first.err
    for again in (f"{SIZES} {flags}", ""):
        run = run_here(tmp_path / "again", f"{again} --train-iters 2 --load {tmp_path}/first/ck", base=RUN)
        assert run.code == 0, run.err
        assert said(run) == [] and same(run, whole) and run.losses == whole.losses[1:]


def test_an_iteration_that_is_asked_for_says_what_model_it_is(own: Path, tmp_path: Path) -> None:
    """The newest checkpoint of the folder has other settings."""
    ck = shutil.copytree(own, tmp_path / "ck")
    longer = run_here(tmp_path, f"--load {ck} --save {ck} --rotary-base 500000 --train-iters 3", base=RUN)
    assert longer.code == 0, longer.err
    for step, base in ((2, 10000.0), (3, 500000.0)):
        run = run_here(tmp_path, f"--load {ck} --ckpt-step {step} --train-iters 4 --hidden-dropout 0.1", base=RUN)
        assert run.code == 0 and run.config.model.rotary_base == base, run.err
