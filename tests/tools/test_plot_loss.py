import json
import subprocess
import sys
from pathlib import Path

import pytest

from smp.training.reporting.sinks import read_curve
from tools.plot_loss import draw, main

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Training records at 10, 20, ... and an evaluation at 20; the loss at 30 was not finite."""
    records: list[dict[str, float | None]] = [
        {"iteration": 10, "lm loss": 4.5, "learning rate": 1e-4},
        {"iteration": 20, "lm loss": 4.25},
        {"iteration": 20, "validation loss": 4.0, "validation perplexity": 54.6},
        {"iteration": 30, "lm loss": None},
        {"iteration": 40, "lm loss": 3.5},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_curves_hold_the_finite_values(metrics: Path) -> None:
    assert read_curve(metrics, "lm loss") == ([10, 20, 40], [4.5, 4.25, 3.5])
    assert read_curve(metrics, "validation loss") == ([20], [4.0])


def test_the_command_writes_a_png(metrics: Path, tmp_path: Path) -> None:
    output = tmp_path / "loss.png"
    command = [sys.executable, str(ROOT / "tools" / "plot_loss.py"), "--metrics", metrics, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 5000
    assert done.stdout == f"wrote {output}: 3 training and 1 validation records\n"


def test_the_legend_names_every_curve_and_the_baseline() -> None:
    training, validation = ([1, 2], [4.0, 3.0]), ([2], [3.5])
    axes = draw(training, validation, 3.2, "bigram").axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training 3.000", "validation 3.500", "bigram 3.200"]
    assert list(axes.lines[2].get_ydata()) == [3.2, 3.2]
    assert len(draw(training, ([], []), None, "bigram").axes[0].lines) == 1


def test_loads_of_experts_are_drawn_below() -> None:
    figure = draw(([1, 2], [4.0, 3.0]), ([], []), None, "bigram", ([1, 2], [2.5, 1.25]))
    losses, loads = figure.axes
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["training 3.000"]
    assert [list(line.get_ydata()) for line in loads.lines] == [[2.5, 1.25], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ('{"iteration": 1, "lm loss": 2.0}\n{"iteration": 2, "lm', ":2 is not a record"),
        ("[]\n", ":1 is not a record"),
        ('{"iteration": 1, "lm loss": "low"}\n', ":1 is not a record"),
        ('{"iteration": 1, "learning rate": 2.0}\n', "has no record"),
        ("", "has no record"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if text is not None:
        metrics.write_text(text)
    assert main(["--metrics", str(metrics), "--output", str(tmp_path / "loss.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["loss.unknown", "nowhere/loss.png"])
def test_an_output_that_cannot_be_written_is_an_error(
    name: str, metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--metrics", str(metrics), "--output", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
