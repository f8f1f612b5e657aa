"""--logits-save-dir stops at a signal, and the same command continues, in another layout too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from smp.training.distillation.meaning import read_meaning
from smp.training.distillation.stored import StoredLogits
from smp.training.tuning.saving_logits import SavingLogits
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import clean_process
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import tune_all

pytest.importorskip("transformers")
SAVING = (
    "--load {0} --data-path {0}/sft.jsonl --objective distill --seq-length 48 --micro-batch-size 2 "
    "--global-batch-size 8 --logits-top-k 7 --logits-save-dtype fp32 --log-dir {0}/logs"
)
QUIET = "--no-tensorboard --no-progress-bar"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder)
    return folder


def saving(folder: Path, target: Path, more: str = "") -> str:
    return f"{SAVING} --logits-save-dir {target} {more}".format(folder)


def contents(folder: Path, target: Path) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Of each label that is trained, what is kept."""
    _, data = read_finetune_settings([*saving(folder, target).split()], 1)
    samples: Any = data.samples  # type: ignore[union-attr]
    meaning, parts = read_meaning(str(target))
    stored = StoredLogits(str(target), meaning, parts, samples)  # raises where a label is missing or a file damaged
    numbers = torch.arange(len(samples.tokens))
    top = stored[numbers]
    return {i: (top.ids[i], top.log_probs[i]) for i in range(len(numbers)) if top.ids[i].any()}


def assert_equal(one: dict[int, Any], other: dict[int, Any]) -> None:
    assert one.keys() == other.keys() and len(one) > 50
    for number, (ids, log_probs) in one.items():
        assert torch.equal(ids, other[number][0]), number
        torch.testing.assert_close(log_probs, other[number][1], rtol=1e-5, atol=1e-5)


def run(words: str) -> int:
    return finetune.main(f"{words} {QUIET}".split())


def test_a_signal_stops_it_and_the_same_command_goes_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write, steps = SavingLogits._write, []

    def signalled(self: Any, *args: Any) -> None:
        write(self, *args)
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with clean_process():
        assert run(saving(folder, whole)) == 0
    with clean_process(), monkeypatch.context() as patch:
        patch.setattr(SavingLogits, "_write", signalled)
        run(saving(folder, cut))
    assert "stopped by SIGTERM; 16 of" in capfd.readouterr().out and len(steps) == 2
    assert not (cut / "manifest.json").exists()
    with clean_process():  # of another command: nothing is mixed
        assert run(saving(folder, cut, "--temperature 2")) == 2
        assert (
            run(
                f"{SAVING} --logits-load-dir {cut} --train-iters 1".format(folder)
                .replace("--logits-top-k 7 ", "")
                .replace("--logits-save-dtype fp32 ", "")
            )
            == 2
        )
    error = capfd.readouterr().err
    assert "meaning: temperature: 1.0 there, 2.0 here" in error and "or not all" in error
    (cut / "part-00000-00009.safetensors").write_bytes(b"of after the last note")
    with clean_process():
        assert run(saving(folder, cut)) == 0
    assert "16 sequences are done; continuing after them" in capfd.readouterr().out
    assert {path.name for path in cut.iterdir()} >= {"manifest.json"} and not (cut / "unfinished.json").exists()
    parts = json.loads((cut / "manifest.json").read_text())["parts"]
    assert len(parts) > 1 and all(part["file"] != "part-00000-00009.safetensors" for part in parts)
    assert not (cut / "part-00000-00009.safetensors").exists()
    assert_equal(contents(folder, whole), contents(folder, cut))
    with clean_process():
        assert run(saving(folder, cut)) == 2
    assert "is not empty" in capfd.readouterr().err


def test_another_checkpoint_or_dtype_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same folder in --load may mean another teacher."""
    runs, target = tmp_path / "runs", tmp_path / "cut"
    tuned = (
        f"--load {folder} --data-path {folder}/sft.jsonl --objective sft --seq-length 48 --micro-batch-size 2 "
        f"--global-batch-size 8 --train-iters 2 --lr 0.02 --save {runs} --save-interval 1 --log-dir {tmp_path}/logs"
    )
    of_run = saving(folder, target).replace(f"--load {folder}", f"--load {runs}")
    with clean_process():
        assert run(tuned) == 0
    with clean_process():  # of the newest
        run(f"{of_run} --exit-interval 1")
    work = json.loads((target / "unfinished.json").read_text())["work"]
    assert (work["iteration"], work["dtype"], work["adapter"]) == (2, "fp32", None)
    capfd.readouterr()
    for more, wanted in (("--ckpt-step 1", "iteration: 2 there, 1 here"), ("--bf16", "dtype: fp32 there, bf16 here")):
        with clean_process():
            assert run(f"{of_run} {more}") == 2
        said = capfd.readouterr().err
        assert "holds the unfinished output of another command" in said and wanted in said
    with clean_process():
        assert run(f"{of_run} --ckpt-step 2") == 0
    assert (target / "manifest.json").exists() and not (target / "unfinished.json").exists()


def test_another_layout_goes_on(folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_distributed(tune_all, 2, [saving(folder, whole), saving(folder, cut, "--exit-interval 2")])
    assert json.loads((cut / "unfinished.json").read_text())["sequences"] == 16
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --exit-interval 1"
    run_distributed(tune_all, 2, [saving(folder, cut, layout)])
    assert json.loads((cut / "unfinished.json").read_text())["sequences"] == 24
    run_distributed(tune_all, 1, [saving(folder, cut)])
    assert_equal(contents(folder, whole), contents(folder, cut))
