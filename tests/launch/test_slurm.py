"""Jobs on a real Slurm of two nodes on this machine.

Runs where slurmlab (a throwaway cluster: SMP_SLURMLAB, or on the PATH) and Slurm's packages are installed, else it is
skipped and says so. ``make test-slurm`` prints what is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_local import ROOT, records, tensors, wait_for

LAB = os.environ.get("SMP_SLURMLAB") or shutil.which("slurmlab")
pytestmark = pytest.mark.skipif(
    LAB is None or shutil.which("sbatch") is None,
    reason="needs slurmlab and Slurm (apt-get install slurmctld slurmd slurm-client munge)",
)
COMMON = [
    "recipes=laptop/debug",
    "cluster=slurm",
    f"python={sys.executable}",
    "cluster.exclusive=false",
    "cluster.mem=null",
    "recipes.save_interval=2",
    "recipes.run.time_limit=1:00:00",
    "env_vars={OMP_NUM_THREADS: 1}",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    assert LAB is not None
    folder = tmp_path_factory.mktemp("slurm") / "lab"
    started = subprocess.run([LAB, "start", str(folder), "--nodes", "2"], capture_output=True, text=True, timeout=120)
    assert started.returncode == 0, started.stdout + started.stderr
    exported = dict(re.findall(r"export (\w+)=['\"]?([^'\"\n;]+)", started.stdout))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    yield {**os.environ, **exported, "PYTHONPATH": path}
    subprocess.run([LAB, "stop", str(folder)], check=False, capture_output=True)


Launch = Callable[..., str]


@pytest.fixture
def launch(cluster: dict[str, str]) -> Launch:
    def call(*words: object, code: int = 0) -> str:
        command = [sys.executable, str(ROOT / "main.py"), *map(str, words)]
        done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def slurm(cluster: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=cluster, capture_output=True, text=True, check=True, timeout=60).stdout


def log(job: Path) -> str:
    return "".join(path.read_text() for path in sorted(job.glob("log-*.out")))


def number(job: Path) -> str:
    return str(json.loads((job / "job.json").read_text())["id"])


def end_of(job: Path, seconds: float = 280) -> Any:
    try:
        wait_for(lambda: (job / "end.json").exists(), seconds)
    except AssertionError:
        raise AssertionError(log(job)) from None
    return json.loads((job / "end.json").read_text())["end"]


def _is_back(cluster: dict[str, str]) -> bool:
    """Whether the node can be used again. It may have come back by itself, and then Slurm refuses to resume it."""
    words = ["scontrol", "update", "nodename=node2", "state=resume"]
    subprocess.run(words, env=cluster, capture_output=True, check=False)
    time.sleep(1)
    return "down" not in slurm(cluster, "sinfo", "--noheader", "--nodes=node2", "--format=%T")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_train_are_queued_again_and_lose_a_node(
    cluster: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    two = [*COMMON, f"base_results_dir={tmp_path}", "recipes.trainer.num_nodes=2", "recipes.train_iters=12"]
    launch(*two, "recipes.run.name=whole")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert end_of(whole) == "done", log(whole)

    # What the time limit does: USR1 to the batch script. The run saves, and the same job starts again.
    launch(*two, "recipes.run.name=broken")
    wait_for(lambda: "iteration 3/" in log(broken), 280)
    slurm(cluster, "scancel", "--batch", "--signal=USR1", number(broken))
    wait_for(lambda: "queueing the job again" in log(broken), 100)
    # A node is lost in the second start: Slurm itself queues the job again.
    wait_for(lambda: re.search(r"iteration +(7|8|9)/", log(broken)), 280)
    slurm(cluster, "scontrol", "update", "nodename=node2", "state=down", "reason=test")
    wait_for(lambda: _is_back(cluster), 60)
    wait_for(lambda: "done; the run says done" in launch("status", broken), 280)
    assert int(re.findall(r"Restarts=(\d+)", slurm(cluster, "scontrol", "show", "job", number(broken)))[0]) >= 2
    assert records(broken) == records(whole)
    assert tensors(broken) and tensors(broken) == tensors(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cancel_saves_and_does_not_start_again(cluster: dict[str, str], launch: Launch, tmp_path: Path) -> None:
    job = tmp_path / "debug"
    launch(*COMMON, f"base_results_dir={tmp_path}", "recipes.train_iters=100000", "recipes.save_interval=50000")
    wait_for(lambda: "iteration 3/" in log(job), 280)
    assert "RUNNING" in launch("status", job)
    launch("resume", job, code=2)
    launch("cancel", job)
    assert end_of(job) == "cancelled", log(job)
    assert int((job / "checkpoints/latest").read_text().strip().removeprefix("iter_")) >= 3
    wait_for(lambda: "cancelled (job" in launch("status", job), 60)


@pytest.mark.slow
def test_stages_follow_each_other_and_an_array_has_a_folder_each(
    cluster: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; open(os.environ['SMP_RUN_DIR'] + '/ran', 'w').write(sys.argv[1])")
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"training_cfg:\n  entry_script: {script}\n  script_args: [{{--word: hello}}]\n")
    words = [f"recipes={recipe}", *COMMON[1:5], f"base_results_dir={tmp_path}", "+cluster.array=0-1"]
    stages = ["stages=[prepare,training,export]", "+prepare.command=touch $run_dir/prepared"]
    launch(*words, *stages, "+export.command=cp $run_dir/array-1/ran $run_dir/exported")
    wait_for(lambda: (tmp_path / "own/exported").exists(), 200)
    assert (tmp_path / "own/prepared").exists() and (tmp_path / "own/array-0/ran").read_text() == "--word"


def test_sbatch_takes_every_script(cluster: dict[str, str], launch: Launch, tmp_path: Path) -> None:
    recipe = "training/llama/hf_llama3_8b_seq8k_gpu_p5x16_pretrain"
    for name, words in {"bare": [], "pyxis": ["container=image.sqsh"], "docker": ["container=image:1"]}.items():
        place = [
            f"base_results_dir={tmp_path}",
            f"recipes.run.name={name}",
            "recipes.trainer.num_nodes=2",
            "dry_run=true",
        ]
        launch(f"recipes={recipe}", "cluster=slurm", *place, *words, "cluster.mem=null", "+cluster.comment=a test")
        slurm(cluster, "sbatch", "--test-only", str(tmp_path / name / "submit.sbatch"))
        for script in (tmp_path / name).glob("*.s*"):
            subprocess.run(["bash", "-n", str(script)], check=True)
