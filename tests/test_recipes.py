"""The files of recipes/: settings that load, and what the Slurm script does with the end of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smp.config import ModelConfig, load_config, resolve
from smp.config.cli import build_tree, read_values
from smp.config.entry_points import FINETUNE
from smp.config.finetune import fill_in
from smp.models.presets import PRESETS

RECIPES = Path(__file__).parents[1] / "recipes"
SCRIPT = RECIPES / "slurm_pretrain.sbatch"

FAKES = {
    # What Slurm does for the first node. Like the real one, it kills its task when it gets SIGTERM.
    "srun": """
        export SLURM_NODEID=0
        "$@" & task=$!
        trap 'kill -KILL $task' TERM
        wait $task""",
    "scontrol": """
        case $1 in
            show) printf 'node7\\nnode8\\n' ;;
            requeue) echo "$2" > requeued ;;
        esac""",
    # Starts a training process that ends as FAKE_STATUS says, or when it is asked to stop.
    "torchrun": """
        printf '%s\\n' "$@" > arguments
        trap 'echo torchrun was signalled > trouble' TERM
        setsid trainer & wait $!""",
    "trainer": """
        say() { echo "{\\"status\\": \\"$1\\", \\"reason\\": \\"test\\", \\"iteration\\": 3}" > runs/test/status.json; }
        case $FAKE_STATUS in
            silent) exit 1 ;;
            until-signalled) trap 'say requeue; exit 0' TERM; touch training; for i in $(seq 600); do sleep 0.1; done ;;
            *) say "$FAKE_STATUS" ;;
        esac""",
}


def recipes(*, finetune: bool) -> list[Path]:
    return sorted(path for path in RECIPES.glob("*.yaml") if path.stem.startswith("finetune") == finetune)


@pytest.mark.parametrize("path", recipes(finetune=True), ids=lambda path: path.stem)
def test_recipes_of_fine_tuning_fit_together(path: Path) -> None:
    values = read_values(["--config", str(path), "--load", "model", "--data-path", "samples.jsonl"], FINETUNE, "")
    config = fill_in(build_tree(FINETUNE, values))
    assert resolve(replace(config, model=ModelConfig(vocab_size=4096)), world_size=2).training.train_iters


@pytest.mark.parametrize("path", recipes(finetune=False), ids=lambda path: path.stem)
def test_recipes_resolve(path: Path) -> None:
    flags = ["--config", str(path), "--mock-data", "--vocab-size", "4096", "--tensor-model-parallel-size", "2"]
    config = resolve(load_config(flags, PRESETS), world_size=2)
    assert config.training.train_iters is not None


def start(folder: Path, status: str) -> subprocess.Popen[str]:
    """Start the batch script in ``folder``, with Slurm and torchrun replaced."""
    tools = folder / "bin"
    tools.mkdir()
    for name, body in FAKES.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NAME": "test", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    environment = {**os.environ, **job, "FAKE_STATUS": status, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), "--config", "my run.yaml"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("status", "code", "requeued"),
    [("done", 0, False), ("requeue", 0, True), ("failed", 1, False), ("bad_config", 1, False), ("silent", 1, False)],
)
def test_only_a_run_that_asks_for_it_is_queued_again(tmp_path: Path, status: str, code: int, requeued: bool) -> None:
    (tmp_path / "runs/test").mkdir(parents=True)
    (tmp_path / "runs/test/status.json").write_text('{"status": "requeue"}')  # of an earlier job
    job = start(tmp_path, status)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == code, output
    assert (tmp_path / "requeued").exists() == requeued


def test_the_time_limit_reaches_the_training_processes_alone(tmp_path: Path) -> None:
    job = start(tmp_path, "until-signalled")
    deadline = time.monotonic() + 60
    while not (tmp_path / "training").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert (tmp_path / "requeued").read_text() == "41234\n"
    assert json.loads((tmp_path / "runs/test/status.json").read_text())["iteration"] == 3
    assert not (tmp_path / "trouble").exists()


def test_nodes_meet_at_the_first_and_the_run_resumes_by_itself(tmp_path: Path) -> None:
    start(tmp_path, "done").communicate(timeout=60)
    words = (tmp_path / "arguments").read_text().splitlines()
    launcher, training = words[: words.index("pretrain_gpt.py")], words[words.index("pretrain_gpt.py") :]
    flags = dict(zip(launcher[::2], launcher[1::2], strict=True))
    assert flags["--nnodes"] == "2" and flags["--rdzv-id"] == "41234"
    assert flags["--rdzv-endpoint"] == f"node7:{20000 + 41234 % 20000}"
    assert training[1:3] == ["--config", "my run.yaml"]
    given = dict(zip(training[3:-1:2], training[4:-1:2], strict=True))
    assert given["--load"] == "auto" and given["--save"] == "runs/test/checkpoints"
    assert given["--status-file"] == "runs/test/status.json"


def test_flags_of_the_script_exist(tmp_path: Path) -> None:
    start(tmp_path, "done").communicate(timeout=60)
    words = (tmp_path / "arguments").read_text().splitlines()
    flags = words[words.index("my run.yaml") + 1 :]
    assert load_config(flags, PRESETS).checkpoint.load == "auto"
