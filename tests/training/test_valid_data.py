"""Validation samples of files of their own: what their loss is, with every objective and in every layout."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE
from tests.training.flag_runs import proves
from tests.training.rl_lab import write_inputs
from tests.training.test_finetune_runs import command
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import QUIET, together, tune_all

pytest.importorskip("transformers")

STEPS = "--train-iters 2 --seq-length 48 --micro-batch-size 2 --lr 0.02 --optimizer sgd --log-dir {0}/logs"
METHODS = {
    "packed": "sft.jsonl",
    "alone": "sft.jsonl --packing off --lora-rank 2",
    "orpo": "dpo.jsonl --objective orpo",
    "dpo": "dpo.jsonl --objective dpo --lora-rank 2",
    "table": "dpo.jsonl --objective dpo --lora-rank 2 --dpo-reference precomputed",
    "reward": "dpo.jsonl --objective reward",
    "kto": "kto.jsonl --objective kto --lora-rank 2",
    "distill": "sft.jsonl --objective distill --teacher {0}/big",
    "stored": "sft.jsonl --objective distill --logits-load-dir {0}/logits --logits-top-k 128",
    "grpo": "prompts.jsonl --objective grpo --reward-funcs {0}/rewards.py:vowels --num-generations 2 "
    "--max-completion-length 6",
}
PLAIN = ("packed", "alone", "orpo", "reward")
"""Those whose loss is a function of the model and the samples alone, and not constant at the start."""
LAYOUTS = {
    "tp 2 + sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp 2": "--pipeline-model-parallel-size 2",
    "cp 2": "--context-parallel-size 2 --cp-comm-type p2p",
    "shard 2": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as users have them: some for training, others, of another kind, for validation below ``held``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("valid")
    write_inputs(folder)
    write_samples(folder, 24)
    write_tokenizer(folder / "big")
    write_model(folder / "big", "gemma2", layers=1)
    (folder / "held").mkdir()
    for file in ("sft", "dpo", "kto", "prompts"):
        rows = [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
        for n, row in enumerate(rows):
            row["prompt"] += "five " * (n % 3)
        pq.write_table(pa.Table.from_pylist(rows[:13]), folder / f"held/{file}.parquet")
    return folder


def flags(folder: Path, method: str, *more: str, own: bool = True, batch: int = 8) -> str:
    """``own``: trained on other samples than those in ``held``, which are then for validation."""
    data, _, rest = METHODS[method].partition(" ")
    held = f"{{0}}/held/{data.replace('jsonl', 'parquet')}"
    paths = f"--data-path {{0}}/{data} --valid-data-path {held} --eval-interval 2" if own else f"--data-path {held}"
    return f"--load {{0}} {paths} {rest} {STEPS} --global-batch-size {batch} {' '.join(more)}".format(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    save = flags(folder, "stored", "--load {0}/big --logits-save-dir {0}/logits", "--logits-save-dtype fp32")
    for gone in ("--load {0}", "--logits-load-dir {0}/logits", "--eval-interval 2", "--train-iters 2", "--lr 0.02"):
        save = save.replace(gone.format(folder), "", 1)
    code, _, err = command(folder, f"{save} --no-tensorboard")
    assert code == 0, err
    whole = [flags(folder, m, "--split 1,0,0 --packing off", own=False, batch=13) for m in PLAIN]
    methods = [flags(folder, m).replace("--logits-top-k 128", "") for m in METHODS]
    found = run_distributed(tune_all, 1, methods + whole)[0]
    return dict(zip([*METHODS, *(f"{name}, trained" for name in PLAIN)], found, strict=True))


def test_the_loss_is_that_of_these_samples(folder: Path, alone: dict[str, Any]) -> None:
    """Before the first step it is what a first step on all of them would have."""
    for name in PLAIN:
        code, out, err = command(folder, f"{flags(folder, name)} {QUIET}")
        assert code == 0, err
        first = float(out.split("validation loss at iteration 0 | lm loss value: ")[1].split(" ")[0])
        assert first == pytest.approx(alone[f"{name}, trained"]["losses"][0], rel=1e-5), name
        last = out.split("validation loss at iteration 2 | lm loss value: ")[1].split(" ")[0]
        assert float(last) == pytest.approx(alone[name]["validation"][1], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_objective_in_every_layout(folder: Path, alone: dict[str, Any], layout: str) -> None:
    chosen = [m for i, m in enumerate(METHODS) if i % len(LAYOUTS) in _turns(layout)]
    words = [flags(folder, m, LAYOUTS[layout]).replace("--logits-top-k 128", "") for m in chosen]
    ranks = run_distributed(tune_all, 2, words)
    for n, method in enumerate(chosen):
        got = together([rank[n] for rank in ranks])["validation"]
        assert got[0] == 2 and got[1] == pytest.approx(alone[method]["validation"][1], rel=TOLERANCE), method


def _turns(layout: str) -> set[int]:
    """Two layouts for each method."""
    n = list(LAYOUTS).index(layout)
    return {n, (n + 1) % len(LAYOUTS)}


def test_training_does_not_depend_on_them(folder: Path, tmp_path: Path) -> None:
    """The samples, their order and their losses are the same; a resume with other validation files is no other run."""
    seen = []
    for more in ("--split 1,0,0", "--eval-interval 2 --valid-data-path {0}/held/sft.parquet"):
        argv = f"--load {{0}} --data-path {{0}}/sft.jsonl {STEPS} --global-batch-size 4 {more}".format(folder)
        save = f"--save {tmp_path}/run --resume --no-tensorboard --no-progress-bar --log-interval 1"
        if seen:
            argv = argv.replace("--train-iters 2", "--train-iters 3")
        code, out, err = command(folder, f"{argv} {save}")
        assert code == 0, err
        seen.append(out)
    assert "resumed from" in seen[1], "".join(seen)
    assert "done: 3 iterations trained" in seen[1]
    assert "samples of the checkpoint" not in seen[1] and "split was" not in seen[1]
    assert "validation samples: 13 of 13 used" in seen[1] and "samples: 24 of 24 used" in seen[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--split 1,0,0", "read where --eval-interval or --eval-epochs says when"),
        ("--eval-interval 2 --split 90,10", "--split 90,10 divides --data-path, and validation is --valid-data-path"),
        ("--eval-interval 2 --split 95,5,0", "--split 95,5,0 divides --data-path"),  # the default, typed
        ("--eval-interval 2 --eval-epochs 1", "--eval-interval 2 and --eval-epochs 1.0 are both given"),
        ("--eval-epochs 1 --valid-data-path {0}/none.jsonl", "--valid-data-path {0}/none.jsonl"),
        ("--eval-epochs 1 --valid-data-path {0}/dpo.jsonl", "--valid-data-path 24 of 24 samples cannot be used"),
        ("--eval-epochs 0 --split 1,0,0", "--eval-epochs 0.0 must be above 0"),
        ("--eval-epochs 1 --full-validation --eval-iters 3", "--eval-iters 3 and --full-validation are both given"),
        ("--save-epochs 1 --save-interval 2 --eval-epochs 1", "--save-interval 2 and --save-epochs 1.0 are both given"),
    ],
)
def test_what_does_not_go_together(folder: Path, words: str, message: str) -> None:
    valid = "" if "--valid-data-path" in words else "--valid-data-path {0}/held/sft.parquet "
    argv = f"--load {{0}} --data-path {{0}}/sft.jsonl {STEPS} --save {{0}}/x {valid}{words}".format(folder)
    code, _, err = command(folder, argv)
    assert code == 2 and message.format(folder) in err and err.count("\n") == 1


@proves("valid_data_path", "eval_epochs", "save_epochs", "full_validation")
def test_epochs_are_iterations(folder: Path) -> None:
    """--eval-epochs and --save-epochs, and what --eval-iters leaves out."""
    argv = f"--load {{0}} --data-path {{0}}/sft.jsonl {STEPS} --packing off --split 1,0,0 --global-batch-size 4"
    words = "--save {0}/x --save-epochs 0.5 --eval-epochs 1 --eval-iters 2 --valid-data-path {0}/held/sft.parquet"
    config, data = read_finetune_settings(shlex.split(f"{argv} {words}".replace("--split 1,0,0", "").format(folder)), 1)
    assert (config.training.eval_interval, config.checkpoint.save_interval) == (6, 3) and data is not None
    assert "--eval-epochs 1: every 6 iterations" in data.lines and "--save-epochs 0.5: every 3 iterations" in data.lines
    assert "note: --eval-iters 2 of 4 read 8 of 13 validation sequences; --full-validation reads all" in data.lines
    config, data = read_finetune_settings(
        shlex.split(
            f"{argv} {words} --full-validation".replace("--split 1,0,0", "")
            .replace("--eval-iters 2", "")
            .format(folder)
        ),
        1,
    )
    assert config.training.eval_iters == 4 and data is not None and "--eval-iters" not in " ".join(data.lines)
