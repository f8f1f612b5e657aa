"""The examples of one's own loop, data set, callback and notebook do what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import finetune
from tests.programs import run_program
from tests.training.flag_runs import TINY, clean_process, run_here
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = TINY.replace("--vocab-size 97 --mock-data", "")


def records(folder: Path, name: str) -> list[Any]:
    """The values of one name in the metrics of the run in ``folder``."""
    rows = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_a_loop_of_ones_own_has_the_losses_of_pretrain_gpt(tmp_path: Path) -> None:
    want = run_here(tmp_path / "run", "--untie-embeddings-and-output-weights --clip-grad 0.5").losses
    for processes, flags in ((1, ""), (2, "--tensor-model-parallel-size 2 --sequence-parallel"), (2, "--save kept")):
        words = f"{TINY} --untie-embeddings-and-output-weights --clip-grad 0.5 {flags}".split()
        run = run_program(EXAMPLES / "own_loop.py", words, tmp_path, processes, launcher=True)
        assert run.returncode == 0, run.stderr
        losses = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", run.stdout)]
        assert losses == pytest.approx(want, rel=1e-5) and len(losses) == 3
    assert (tmp_path / "kept/manifest.json").exists()


def test_a_data_set_of_ones_own_goes_on_in_another_layout(tmp_path: Path) -> None:
    def losses(name: str, processes: int, flags: str) -> list[float]:
        (tmp_path / name).mkdir()
        words = f"{MODEL} --train-iters 4 --lr-decay-style constant {flags}".split()
        run = run_program(EXAMPLES / "own_dataset.py", words, tmp_path / name, processes)
        assert run.returncode == 0, run.stderr
        assert "the blend changes" not in run.stdout
        return records(tmp_path / name, "lm loss")

    whole = losses("whole", 1, "--eval-interval 2")
    first = losses("first", 1, "--save ../kept --exit-interval 2")
    rest = losses("rest", 2, "--save ../kept --load auto")
    assert first + rest == pytest.approx(whole, rel=1e-5) and len(whole) == 4
    assert len(set(records(tmp_path / "whole", "validation loss"))) == 2


def test_a_callback_sees_each_step_with_its_weights(tmp_path: Path) -> None:
    def scales(name: str, processes: int, flags: str) -> list[dict[str, Any]]:
        (tmp_path / name).mkdir()
        words = f"{TINY} --vocab-size 256 --lr-decay-style constant --train-iters 10 {flags}".split()  # no padding
        run = run_program(EXAMPLES / "step_callback.py", words, tmp_path / name, processes)
        assert run.returncode == 0, run.stderr
        return [json.loads(line) for line in (tmp_path / name / "weights.jsonl").read_text().splitlines()]

    whole = scales("whole", 1, "")
    sliced = scales("sliced", 2, "--tensor-model-parallel-size 2 --save ../kept --exit-interval 7")
    rest = scales("rest", 2, "--save ../kept --load auto")
    assert [line["iteration"] for line in whole] == [5, 10]
    assert [line["iteration"] for line in (*sliced, *rest)] == [5, 10]
    for got, want in zip((*sliced, *rest), whole, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["scales"] == pytest.approx(want["scales"], rel=1e-5) and len(want["scales"]) > 10


def test_fine_tuning_takes_callbacks_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    write_model(tmp_path, layers=1)
    write_samples(tmp_path)
    seen: list[tuple[int, float]] = []
    words = f"--load {tmp_path} --data-path {tmp_path}/sft.jsonl --log-dir {tmp_path}/logs --train-iters 3"
    words += " --lora-rank 2 --seq-length 48 --no-tensorboard --no-progress-bar --log-interval 1"
    with clean_process():
        callbacks = [lambda result, model: seen.append((result.iteration, result.loss))]
        assert finetune.main(words.split(), callbacks=callbacks) == 0
    assert [iteration for iteration, _ in seen] == [1, 2, 3]
    assert [loss for _, loss in seen] == pytest.approx(records(tmp_path, "lm loss"))


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)  # a diff of this file is a diff of its text
    program = tmp_path / "notebook.py"
    # A tenth of the steps: what they do is seen just as well.
    program.write_text(re.sub(r"--train-iters (\d+)0\b", r"--train-iters \1", "\n\n".join(code)))
    run = run_program(program, [], tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "notebook/loss.png").stat().st_size > 0
    assert "model.layers.0.attention.query.weight" in run.stdout and "iteration 8/8" in run.stdout
