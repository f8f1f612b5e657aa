import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plot_pipeline import main

ROOT = Path(__file__).parents[2]
SIZES = ["--pipeline-model-parallel-size", "4", "--micro-batches", "8"]


def test_text_goes_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--schedule", "1f1b", "zb-v", *SIZES])
    output = capsys.readouterr().out
    assert "1f1b, predicted: step 33, bubble 27.3%" in output
    assert "zb-v, predicted: step 25.5, bubble 5.9%" in output
    assert output.count("rank 3  ") == 2


def test_times_and_chunks_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--schedule", "gpipe", *SIZES, "--forward", "2", "--backward-input", "3", "--backward-weight", "0"])
    assert "step 55" in capsys.readouterr().out
    main(["--schedule", "interleaved", *SIZES, "--chunks", "3"])
    assert "step 27," in capsys.readouterr().out
    main(["--schedule", "gpipe", *SIZES, "--link", "0.5", "--prefetch", "0"])
    assert "step 43," in capsys.readouterr().out


def test_a_trace_is_written_and_drawn_beside_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "both.svg"
    main(["--schedule", "1f1b", *SIZES, "--output", str(trace)])
    content = json.loads(trace.read_text())
    content["otherData"]["title"] = "measured"
    trace.write_text(json.dumps(content))
    main(["--schedule", "zb-h1", *SIZES, "--trace", str(trace), "--output", str(picture)])
    assert "zb-h1, predicted: step 27" in picture.read_text() and "measured: step 33" in picture.read_text()
    assert capsys.readouterr().out.endswith(f"wrote {picture}\n")


def test_the_command_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "timeline.png"
    script = str(ROOT / "tools" / "plot_pipeline.py")
    command = [sys.executable, script, "--schedule", "zb-h1", *SIZES, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 5000


def test_json_that_is_not_a_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("", "[]", "{}", '{"traceEvents": 3}'):
        (tmp_path / "trace.json").write_text(content)
        assert main(["--trace", str(tmp_path / "trace.json")]) == 2
        assert "is not a trace of a pipeline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to draw"),
        (["--schedule", "1f1b"], "--schedule needs --pipeline-model-parallel-size and --micro-batches"),
        (["--schedule", "zb-v", *SIZES, "--chunks", "3"], "--num-virtual-stages-per-pipeline-rank 2, not 3"),
        (["--schedule", "1f1b", *SIZES, "--forward", "0"], "--forward has to be above 0"),
        (["--schedule", "1f1b", *SIZES, "--link", "-1"], "at least 0"),
        (["--schedule", "1f1b", *SIZES, "--forward", "nan"], "--forward has to be above 0"),
        (["--schedule", "1f1b", *SIZES, "--backward-weight", "nan"], "at least 0"),
        (["--schedule", "1f1b", *SIZES, "--link", "inf"], "none endless"),
        (["--schedule", "1f1b", "gpipe", *SIZES, "--output", "x.json"], "a trace holds one timeline, not 2"),
        (["--trace", "nowhere.json"], "No such file"),
        (["--trace"], "--trace: expected at least one argument"),
        (["--schedule", "2f2b"], "--schedule: invalid choice: '2f2b'"),
        (["--trace", str(ROOT / "setup.py")], "is not a trace of a pipeline"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
