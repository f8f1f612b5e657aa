"""``--load A --save B`` started again by the same command, as a scheduler does with a job: it goes on from B, to the
same bits as a run that was never interrupted. A folder with another run's checkpoints is refused as before.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp.checkpoint.folders.folder import open_folder
from smp.config import CheckpointConfig, Config
from smp.config.objectives import ObjectiveConfig
from smp.training.checkpoints.origin import ORIGIN, Origin
from tests.checkpoint.plain_reader import read_checkpoint
from tests.training.flag_runs import Run, Runs, run_here
from tests.training.test_finetune_runs import command
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tools.convert_checkpoint import main as convert

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 97 --max-position-embeddings 32"
RUN = (
    "--mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 2 --log-interval 1 --lr 0.01 "
    "--no-tensorboard --no-progress-bar --log-dir logs"
)
GOES_ON = "holds this run, which started from --load"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "own", a run's checkpoints of iterations 1 and 2, and the same as a Hugging Face folder, "hf"."""
    folder = tmp_path_factory.mktemp("a")
    run = run_here(folder, f"{SIZES} --train-iters 2 --save-interval 1 --save own", base=RUN)
    assert run.code == 0, run.err
    assert convert(["--load", f"{folder}/own", "--save", f"{folder}/hf"]) == 0
    return folder


def same(one: Run, other: Run) -> bool:
    return one.final.keys() == other.final.keys() and all(torch.equal(one.final[n], other.final[n]) for n in one.final)


def assert_same_state(one: Path, other: Path) -> None:
    """Of the newest checkpoints of two runs, with the optimizer's."""
    state = [read_checkpoint(run / (run / "latest").read_text().strip())[0] for run in (one, other)]
    assert state[0].keys() == state[1].keys() and any(name.startswith("optim.") for name in state[0])
    assert [name for name in state[0] if not np.array_equal(state[0][name], state[1][name])] == []


HOW = {
    "its weights": "--load {a}/own --finetune --train-iters 4",
    "a Hugging Face folder": "--load {a}/hf --train-iters 4",
    "all of it": "--load {a}/own --train-iters 6",
    "without its optimizer": "--load {a}/own --no-load-optim --train-iters 6",
    "an older iteration": "--load {a}/own --ckpt-step 1 --train-iters 5",
    "one checkpoint": "--load {a}/own/iter_0000001 --train-iters 5",
    "other settings": "--load {a}/hf --rotary-base 500000 --hidden-dropout 0.1 --train-iters 4",
    "nothing there": SIZES + " --load {a}/none --no-exit-on-missing-checkpoint --train-iters 4",
}


@pytest.mark.parametrize("how", HOW)
def test_the_same_command_goes_on_to_the_same_bits(how: str, a: Path, tmp_path: Path) -> None:
    flags = HOW[how].format(a=a) + " --save b --save-interval 1"
    whole = run_here(tmp_path / "whole", flags, base=RUN)
    assert whole.code == 0, whole.err
    # Ended by a time limit three times; the checkpoints of the last start are its own again.
    parts = [run_here(tmp_path / "parts", f"{flags} --exit-interval 1", base=RUN) for _ in range(4)]
    assert [run.code for run in parts] == [0, 0, 0, 0], [run.err for run in parts]
    assert [GOES_ON in run.out for run in parts] == [False, True, True, True]
    assert len(whole.losses) == 4 and parts[-1].losses == whole.losses and same(parts[-1], whole)
    assert_same_state(tmp_path / "parts/b", tmp_path / "whole/b")
    done = run_here(tmp_path / "parts", flags, base=RUN)
    assert done.code == 0 and "nothing left to train" in done.out


def test_what_a_crash_left_is_no_checkpoint_and_what_is_damaged_is_passed_over(a: Path, tmp_path: Path) -> None:
    flags = f"--load {a}/own --finetune --train-iters 4 --save {tmp_path}/b --save-interval 1"
    whole = run_here(tmp_path / "whole", flags.replace("/b ", "/whole/b "), base=RUN)
    b = tmp_path / "b"
    # The first save was cut off: there is nothing yet to go on from.
    (b / "iter_0000001").mkdir(parents=True)
    (b / "iter_0000001/shard_00000.safetensors").write_bytes(b"half of it")
    first = run_here(tmp_path / "run", f"{flags} --exit-interval 2", base=RUN)
    assert first.code == 0 and GOES_ON not in first.out and first.losses == whole.losses[:2], first.err
    # The third save was cut off, and the second is damaged.
    shutil.copytree(b / "iter_0000002", b / "iter_0000003")
    (b / "iter_0000003/manifest.json").unlink()
    data = b / "iter_0000002/shard_00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    second = run_here(tmp_path / "run", flags, base=RUN)
    assert second.code == 0 and GOES_ON in second.out and "is damaged" in second.out, second.err
    assert second.losses == whole.losses and same(second, whole)


@pytest.mark.parametrize("what", ["manifest.json", "shard_00000.safetensors"])
def test_where_all_is_damaged_it_does_not_begin_again(what: str, a: Path, tmp_path: Path) -> None:
    flags = f"--load {a}/own --finetune --train-iters 2 --save {tmp_path}/b"
    assert run_here(tmp_path / "run", flags, base=RUN).code == 0
    path = tmp_path / "b/iter_0000002" / what
    path.write_bytes(path.read_bytes()[:-9])
    for _ in range(2):  # the second time it is set aside already
        run = run_here(tmp_path / "run", flags, base=RUN)
        assert run.code == 1 and "holds no checkpoint that is whole, only damaged ones" in run.errors[0]


def test_another_runs_folder_is_refused(a: Path, tmp_path: Path) -> None:
    b = f"--save {tmp_path}/b --train-iters 3"
    assert run_here(tmp_path / "run", f"--load {a}/own --finetune {b}", base=RUN).code == 0
    for flags, why in (
        (f"--load {a}/own", "of another run than --load"),
        (f"--load {a}/own --ckpt-step 1 --finetune", "of another run than --load"),
        (f"--load {a}/own/iter_0000002 --finetune", "of another run than --load"),
        (f"--load {a}/hf", "which is newer than where this run starts"),
        (SIZES, "which is newer than where this run starts"),
        (f"--load {a}/own --finetune --seed 5", "with other --seed: --load auto continues from there"),
        (f"--load {a}/own --finetune --seq-length 8 --seed 5", "with other --seed, --seq-length: --load auto"),
    ):
        run = run_here(tmp_path / "run", f"{flags} {b}", base=RUN)
        assert run.code == 2 and len(run.errors) == 1 and why in run.errors[0], (flags, run.err)
        assert "kernels" not in run.out, "found before the model is built"
    assert not (tmp_path / "b/lock").exists()


def test_a_run_that_went_on_by_auto_still_knows_where_it_began(a: Path, tmp_path: Path) -> None:
    asked = f"--load {a}/own --finetune --save b"
    assert run_here(tmp_path, f"{asked} --train-iters 2", base=RUN).code == 0
    assert run_here(tmp_path, f"{SIZES} --load auto --save b --train-iters 3", base=RUN).code == 0
    assert run_here(tmp_path, "--load b --save b --train-iters 4", base=RUN).code == 0
    last = run_here(tmp_path, f"{asked} --train-iters 5 --lr 0.02", base=RUN)
    assert last.code == 0 and GOES_ON in last.out and last.records("iteration")[-1:] == [5], last.err
    # What changed is said, as with --load auto.
    assert "note: lr was 0.01 in the checkpoint and is 0.02 now" in last.out
    extra = json.loads((tmp_path / "b/iter_0000005/manifest.json").read_text())["extra"]
    assert extra[ORIGIN]["folder"] == f"{a}/own" and extra["config"]["load"] == "auto"


def test_where_it_began_may_be_gone_by_then(a: Path, tmp_path: Path) -> None:
    """Pruned by the run that made it: what was saved knows what model it is."""
    shutil.copytree(a / "own", tmp_path / "own")
    flags = f"--load {tmp_path}/own/iter_0000001 --train-iters 4 --save {tmp_path}/b"
    assert run_here(tmp_path / "run", f"{flags} --exit-interval 1", base=RUN).code == 0
    shutil.rmtree(tmp_path / "own")
    again = run_here(tmp_path / "run", flags, base=RUN)
    assert again.code == 0 and GOES_ON in again.out and again.records("iteration")[-2:] == [3, 4], again.err
    for other in (f"--load {tmp_path}/typo", f"--load {tmp_path}/own/iter_0000001 --finetune"):
        run = run_here(tmp_path / "run", f"{other} --train-iters 4 --save {tmp_path}/b", base=RUN)
        assert run.code == 2 and "there is no such folder" in run.errors[0]


def test_a_relative_path_from_another_copy_of_the_code(a: Path, tmp_path: Path) -> None:
    for copy, code in (("one", 0), ("two", 0)):
        shutil.copytree(a / "hf", tmp_path / copy / "model")
        run = run_here(tmp_path / copy, f"--load model --save {tmp_path}/b --exit-interval 1 --train-iters 3", base=RUN)
        assert run.code == code, run.err
    assert GOES_ON in run.out


def test_what_a_command_line_begins_from() -> None:
    def asked(tuning: bool = False, **given: Any) -> Origin | None:
        return Origin.asked(
            Config(checkpoint=CheckpointConfig(**given), objective=ObjectiveConfig() if tuning else None)
        )

    assert asked() is asked(save="/b") is asked(load="auto", save="/b") is asked(load="/a") is None
    assert asked(load="/b/", save="/b") is None and asked(load="/b", save="/b", ckpt_step=3) is not None
    assert asked(load="/a", save="/b") == Origin("/a", "/a", False, None)
    assert asked(load="/a", save="/b", finetune=True, ckpt_step=3) == Origin("/a", "/a", True, 3)
    assert asked(load="a/../c", save="/b") == Origin("a/../c", str(Path.cwd() / "c"), False, None)
    assert asked(tuning=True, load="/a", save="/b", resume=True) == Origin("/a", "/a", True, None)
    secret = asked(load="s3://key:word@bucket/a", save="/b")
    assert secret is not None and "word" not in str(secret.note())
    for extra in ({}, {ORIGIN: None}, {ORIGIN: 3}, {ORIGIN: {"load": "/a"}}, {ORIGIN: {"folder": 1, "x": 2}}):
        assert Origin.noted(extra) is None
    assert Origin.noted({ORIGIN: secret.note()}) == secret


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder, count=12)
    return folder


TUNE = "--global-batch-size 2 --micro-batch-size 2 --seq-length 48 --no-tensorboard --no-progress-bar --train-iters 4"
TUNINGS = {
    "all weights": "",
    "adapters": "--lora-rank 2 --lora-dropout 0.1",
    "adapters that begin somewhere": "--load-adapter {b}/first/adapter",
    "preferences": "--objective dpo --lora-rank 2",
    "a reward model": "--objective reward",
}


def tune(folder: Path, flags: str, data: str = "sft") -> tuple[int, str, str]:
    data = "dpo" if "--objective" in flags else data
    return command(folder, f"--load {folder} --data-path {folder}/{data}.jsonl --log-dir {folder}/logs {TUNE} {flags}")


@pytest.mark.parametrize("how", TUNINGS)
def test_a_fine_tuning_run_goes_on_to_the_same_bits(how: str, chat: Path, tmp_path: Path) -> None:
    flags = TUNINGS[how].format(b=tmp_path)
    if "--load-adapter" in flags:
        assert tune(chat, f"--lora-rank 2 --lora-dropout 0.1 --train-iters 1 --save {tmp_path}/first")[0] == 0
    code, _, err = tune(chat, f"{flags} --save {tmp_path}/whole")
    assert code == 0, err
    for number in range(4):
        code, out, err = tune(chat, f"{flags} --save {tmp_path}/parts --exit-interval 1")
        assert code == 0, err
        assert (GOES_ON in out) == (number > 0)
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


def test_another_fine_tuning_from_the_same_model_is_refused(chat: Path, tmp_path: Path) -> None:
    save = f"--save {tmp_path}/b"
    assert tune(chat, f"{save} --resume --train-iters 1 --lora-rank 2")[0] == 0
    for flags, other in (
        ("--lora-rank 3", "--lora-rank, --lora-alpha"),
        ("", "--lora-rank, --lora-alpha, --lora-target-modules"),
        ("--lora-rank 2 --objective dpo", "--packing, --data-path, --objective"),
        ("--lora-rank 2 --seed 9 --no-mask-prompt", "--seed, --mask-prompt"),
    ):
        code, _, err = tune(chat, f"{save} {flags}")
        assert code == 2 and f"with other {other}" in err and "--resume continues from there" in err, err
    code, out, err = tune(chat, f"{save} --lora-rank 2 --train-iters 2")
    assert code == 0 and GOES_ON in out, err


def test_an_object_store_is_gone_on_from(a: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    flags = f"--load {a}/hf --train-iters 3 --save memory://started-again/{tmp_path.name}"
    parts = [run_here(tmp_path, f"{flags} --exit-interval 1", base=RUN) for _ in range(3)]
    assert [run.code for run in parts] == [0, 0, 0], parts[-1].err
    assert [GOES_ON in run.out for run in parts] == [False, True, True]
    assert len(open_folder(f"memory://started-again/{tmp_path.name}").names()) == 4
