from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.preloaded import python_path
from tools.demo import Runner, bigram_figures, last_validation_loss, layout, side_by_side, summary, validation_losses
from tools.demo_corpus import functions
from tools.demo_corpus import main as demo_corpus

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("gpus", "processes"), [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_every_process_has_a_gpu_or_none_has(gpus: int, processes: int) -> None:
    count, flags = layout(gpus)
    assert count == processes
    assert ("--sequence-parallel" in flags) == (processes == 2)
    assert ("--bf16" in flags) == (gpus > 0)


def test_figures_are_those_of_the_printed_line() -> None:
    line = (
        "bigram: 4.2487 nats per token over 12 validation tokens, 1.9478 bits per byte at 3.1470 bytes per token (...)"
    )
    assert bigram_figures(line) == (4.2487, 3.147)


@pytest.mark.parametrize(("loss", "word"), [(3.0, "below"), (4.25, "not below"), (4.3, "not below")])
def test_summary_compares_with_the_bigram_model(loss: float, word: str) -> None:
    text = summary(loss, 4.25, 3.0)
    assert f": {word} what" in text
    assert f"{4.25 / 3 / 0.6931471805599453:.3f} bits per byte" in text


def test_the_last_evaluation_counts(tmp_path: Path) -> None:
    records = [{"validation loss": 5.0}, {"validation loss": 4.0}, {"lm loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert last_validation_loss(tmp_path / "metrics.jsonl") == 4.0


def test_a_failed_step_ends_the_demo(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Runner(2).python("-c", "import sys; print('so far'); sys.exit(7)")
    assert ended.value.code == 7
    shown = capfd.readouterr().out.splitlines()
    assert shown[1].startswith("$ ") and shown[2] == "so far"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_demo_from_corpus_to_sample(tmp_path: Path, times: int) -> None:
    pytest.importorskip("matplotlib")
    small = ["--train-iters", "3", "--eval-iters", "1", "--num-layers", "1", "--seq-length", "32"]
    for _ in range(times):  # the second replaces the first
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "demo.py"), "--folder", str(tmp_path), *small],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("\n$ ") == 7 and "--tensor-model-parallel-size 2 --sequence-parallel" in done.stdout
        assert "validation loss" in done.stdout and "what the last token alone can tell" in done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "logs" / "status.json").read_text())["iteration"] == 3


@pytest.mark.slow
def test_demo_of_experts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = ["--train-iters", "3", "--eval-interval", "3", "--eval-iters", "1", "--seq-length", "32"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "demo.py"), "--experts", "--folder", str(tmp_path), *small],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n$ ") == 6 and "--expert-model-parallel-size 2" in done.stdout
    assert "validation loss, nats per token: " in done.stdout
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")


def test_validation_before_and_after_are_the_first_and_the_last(tmp_path: Path) -> None:
    records = [{"validation loss": 5.0}, {"lm loss": 3.0}, {"validation loss": 4.5}, {"validation loss": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert validation_losses(tmp_path / "metrics.jsonl") == (5.0, 4.0)


def test_two_texts_stand_side_by_side_and_long_lines_go_on() -> None:
    lines = side_by_side("one\n", "a longer text\n\ttwo", width=8).splitlines()
    assert lines[2:] == ["one      | a longer", "         |  text", "         |", "         | two"]


def test_pairs_are_heads_of_functions_and_the_beginning_of_their_docstrings(tmp_path: Path) -> None:
    source = '''
class A:
    @staticmethod
    def f(x,
          y):
        """Do it.

        More."""
        return 1

    def none(self): return 2

def short(): "In one line."
'''
    found = list(functions(source))
    assert found == [('def f(x,\n      y):\n    """', 'Do it."""')]
    assert not list(functions("def broken(:"))
    demo_corpus(["--output", str(tmp_path / "pairs.jsonl"), "--pairs", "--max-mb", "0.3"])
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) > 20 and len({row["prompt"] for row in rows}) == len(rows)
    assert all(row["prompt"].endswith('"""') and row["completion"].endswith('"""') for row in rows)
