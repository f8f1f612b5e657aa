"""The entry point as users start it: separate processes, real files."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
BASE = ["--mock-data", "--vocab-size", "97", "--seq-length", "17", "--micro-batch-size", "2", "--no-progress-bar"]
SMALL = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4"]
TWO = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def command(*flags: str, processes: int = 1) -> list[str]:
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    return [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, *flags: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    return run_program(ROOT / "pretrain_gpt.py", flags, folder, processes)


def losses(folder: Path, logs: str) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by iteration."""
    lines = (folder / logs / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["iteration"]: (r["lm loss"], r["grad norm"]) for r in records if "lm loss" in r}


ZB_V = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-v", "--global-batch-size", "8"]
TIED = ["--pipeline-model-parallel-size", "2", "--no-untie-embeddings-and-output-weights", "--global-batch-size", "8"]


@pytest.mark.parametrize(
    ("processes", "layout"), [(1, []), (2, TWO), (2, ["--hybrid-shard-degree", "1"]), (2, ZB_V), (2, TIED)]
)
def test_resume_continues_bit_for_bit(tmp_path: Path, processes: int, layout: list[str]) -> None:
    flags = [*BASE, *SMALL, *layout, "--log-interval", "1", "--hidden-dropout", "0.1", "--train-iters", "6"]
    straight = run(tmp_path, *flags, "--log-dir", "a", processes=processes)
    assert straight.returncode == 0, straight.stderr
    first = ["--save", "ck", "--exit-interval", "3", "--log-dir", "b"]
    stopped = run(tmp_path, *flags, *first, processes=processes)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads((tmp_path / "b/status.json").read_text())["status"] == "requeue"
    resumed = run(tmp_path, *flags, "--save", "ck", "--load", "auto", "--log-dir", "b", processes=processes)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path, "a") == losses(tmp_path, "b")
    assert sorted(losses(tmp_path, "b")) == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "b/status.json").read_text())["status"] == "done"


def test_checkpoint_of_one_layout_continues_in_another(tmp_path: Path) -> None:
    flags = [*BASE, *SMALL, "--log-interval", "1", "--global-batch-size", "4", "--train-iters", "4", "--save", "ck"]
    assert run(tmp_path, *flags, "--log-dir", "a").returncode == 0
    short = [*flags[:-4], "--train-iters", "4", "--exit-interval", "2", "--save", "ck2"]
    assert run(tmp_path, *short, *TWO, "--log-dir", "b", processes=2).returncode == 0
    resumed = run(tmp_path, *flags[:-2], "--load", "ck2", "--log-dir", "b")
    assert resumed.returncode == 0, resumed.stderr
    a, b = losses(tmp_path, "a"), losses(tmp_path, "b")
    for iteration in (1, 2, 3, 4):
        assert b[iteration] == pytest.approx(a[iteration], rel=1e-5)


QUICK_COMPILER = f"""
import functools, sys
import torch
sys.path.insert(0, {str(ROOT)!r})
import pretrain_gpt
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # all but the generation of code
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""


def test_a_compiled_run_evaluates_under_tensor_parallelism(tmp_path: Path) -> None:
    """Training, evaluation and training again, each pass through the same compiled blocks."""
    (tmp_path / "quick.py").write_text(QUICK_COMPILER)
    flags = [*BASE, *SMALL, *TWO, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1"]
    plain = run(tmp_path, *flags, "--log-interval", "1", "--log-dir", "a", processes=2)
    assert plain.returncode == 0, plain.stderr
    words = [*flags, "--log-interval", "1", "--log-dir", "b", "--compile"]
    compiled = run_program(tmp_path / "quick.py", words, tmp_path, 2)
    assert compiled.returncode == 0, compiled.stderr
    for name in ("lm loss", "validation loss"):
        a, b = (values(tmp_path, logs, name) for logs in "ab")
        assert len(a) == (4 if name == "lm loss" else 2) and b == pytest.approx(a, rel=1e-5)


def values(folder: Path, logs: str, name: str) -> list[float]:
    records = [json.loads(line) for line in (folder / logs / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def test_sigterm_saves_and_asks_to_be_requeued(tmp_path: Path) -> None:
    flags = [*BASE, *SMALL, "--train-iters", "100000", "--save", "ck", "--log-interval", "1"]
    with subprocess.Popen(command(*flags), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as process:
        metrics = tmp_path / "runs/pretrain/metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    status = json.loads((tmp_path / "runs/pretrain/status.json").read_text())
    assert status["status"] == "requeue" and "SIGTERM" in status["reason"]
    assert (tmp_path / "ck/latest").read_text().strip() == f"iter_{status['iteration']:07d}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hiden-size", "8"], "did you mean --hidden-size"),
        ([*BASE, "--train-iters", "1", "--tensor-model-parallel-size", "3"], "--nproc-per-node"),
        ([*BASE, "--train-iters", "1", "--num-attention-heads", "5"], "--num-attention-heads"),
        (["--data-path", "nowhere", "--vocab-size", "9", "--train-iters", "1"], "nowhere.bin"),
        ([*BASE, "--train-iters", "1", "--load", "nowhere"], "--load nowhere"),
        ([*BASE, "--train-iters", "1", "--optimizer", "apex-adam"], "apex"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, flags: list[str], message: str) -> None:
    result = run(tmp_path, *flags)
    assert result.returncode == 2
    ours = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(ours) == 1 and message in ours[0]
    assert not list(tmp_path.iterdir())


def test_bad_config_is_said_in_the_status_file_that_was_asked_for(tmp_path: Path) -> None:
    assert run(tmp_path, "--hiden-size", "8", "--status-file", "status.json").returncode == 2
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "bad_config"


def test_infinite_loss_skips_steps_and_ends_the_run(tmp_path: Path) -> None:
    flags = [*BASE, *SMALL, "--train-iters", "20", "--lr", "1e30", "--max-skipped-steps", "3", "--log-interval", "1"]
    result = run(tmp_path, *flags)
    assert result.returncode == 1
    assert "3 steps in a row" in result.stderr
    assert json.loads((tmp_path / "runs/pretrain/status.json").read_text())["status"] == "failed"


def test_profile_writes_a_trace_and_a_memory_table(tmp_path: Path) -> None:
    result = run(tmp_path, *BASE, *SMALL, "--train-iters", "4", "--profile", "--profile-step-start", "2")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "runs/pretrain/profile"
    assert "traceEvents" in json.loads((folder / "rank_00000.trace.json").read_text())
    assert "aten::" in (folder / "rank_00000.memory.txt").read_text()


def test_logs_of_another_run_end_all_ranks_for_one_reason(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs/metrics.jsonl").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        two = ["--pipeline-model-parallel-size", "2", "--train-iters", "1", "--log-dir", "logs"]
        result = run(tmp_path, *BASE, *SMALL, *two, processes=2)
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and said and all("logs is in use by another run" in line for line in said)


def test_dry_run_describes_and_writes_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, "--model", "llama3-8b", "--dry-run", "--bf16")
    assert result.returncode == 0, result.stderr
    for text in ("parameters: 8,030,261,248", "mesh: 1 process\n", "hidden_size: 4096", "GiB"):
        assert text in result.stdout
    assert not list(tmp_path.iterdir())


def test_what_a_dry_run_prints_is_a_recipe_that_trains(tmp_path: Path) -> None:
    flags = [*BASE, *SMALL, "--train-iters", "1", "--log-interval", "1"]
    (tmp_path / "recipe.yaml").write_text(run(tmp_path, *flags, "--dry-run").stdout)
    trained, same = run(tmp_path, "--config", "recipe.yaml", "--log-dir", "a"), run(tmp_path, *flags, "--log-dir", "b")
    assert trained.returncode == same.returncode == 0, trained.stderr
    assert losses(tmp_path, "a") == losses(tmp_path, "b") != {}
