"""Jobs on a real Slurm of three nodes on this machine.

Runs where slurmlab (a throwaway cluster: SMP_SLURMLAB, or on the PATH) and Slurm's packages are installed, else it is
skipped and says so. ``make test-slurm`` prints what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
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
    started = subprocess.run([LAB, "start", str(folder), "--nodes", "3"], capture_output=True, text=True, timeout=120)
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
    done = subprocess.run(words, env=cluster, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def lose(cluster: dict[str, str], node: str) -> None:
    """SIGKILL for a node's slurmd and, where nodes have a network of their own, for all that runs on it. Other clusters
    may be on this machine: the daemon is known by its configuration."""
    daemon = next(pid for pid in processes() if is_daemon(pid, cluster["SLURM_CONF"], node))
    network = namespace(daemon)
    alone = network != namespace(os.getpid())
    for pid in [pid for pid in processes() if alone and namespace(pid) == network] or [daemon]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


def is_daemon(pid: int, configuration: str, node: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0] == b"slurmd" and node.encode() in words and f"SLURM_CONF={configuration}".encode() in environment


def field(cluster: dict[str, str], job: Path, name: str) -> str:
    return re.findall(rf"\b{name}=(\S+)", slurm(cluster, "scontrol", "show", "job", number(job)))[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_train_are_queued_again_and_lose_a_node(
    cluster: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    two = [*COMMON, f"base_results_dir={tmp_path}", "recipes.trainer.num_nodes=2", "recipes.train_iters=12"]
    two.append("recipes.context_parallel_size=2")
    launch(*two, "recipes.run.name=whole")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert end_of(whole) == "done", log(whole)

    # What the time limit does: USR1 to the batch script. The run saves, and the same job starts again.
    launch(*two, "recipes.run.name=broken")
    wait_for(lambda: "iteration 3/" in log(broken), 280)
    slurm(cluster, "scancel", "--batch", "--signal=USR1", number(broken))
    wait_for(lambda: "queueing the job again" in log(broken), 100)
    saved = int((broken / "checkpoints/latest").read_text().strip().removeprefix("iter_"))
    assert "says requeue" in log(broken) and saved >= 3, log(broken)
    # The second node is lost in the second start: Slurm queues the job again, and takes the third node.
    wait_for(lambda: re.search(r"iteration +(7|8|9)/", log(broken)), 280)
    nodes = slurm(cluster, "scontrol", "show", "hostnames", field(cluster, broken, "NodeList")).split()
    lose(cluster, nodes[1])
    wait_for(lambda: int(field(cluster, broken, "Restarts")) >= 2, 280)
    wait_for(lambda: "launcher: done" in log(broken), 280)
    assert nodes[1] not in slurm(cluster, "scontrol", "show", "hostnames", field(cluster, broken, "NodeList")).split()
    # Slurm itself may call the job COMPLETING for as long as it waits for the lost node.
    assert "the run says done at iteration 12" in launch("status", broken)
    assert records(broken) == records(whole)
    assert tensors(broken) and tensors(broken) == tensors(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cancel_saves_and_resume_goes_on(cluster: dict[str, str], launch: Launch, tmp_path: Path) -> None:
    job = tmp_path / "debug"
    launch(*COMMON, f"base_results_dir={tmp_path}", "recipes.train_iters=100000", "recipes.save_interval=50000")
    wait_for(lambda: "iteration 3/" in log(job), 280)
    assert "RUNNING" in launch("status", job)
    launch("resume", job, code=2)
    asked = f"debug: asked to save and end; python main.py status {job} says when it has ended\n"
    assert launch("cancel", job) == asked
    assert end_of(job) == "cancelled", log(job)
    saved = int((job / "checkpoints/latest").read_text().strip().removeprefix("iter_"))
    assert saved >= 3
    wait_for(lambda: "cancelled (job" in launch("status", job), 60)
    assert f"the run says it saved at iteration {saved} and ended: stopped by SIGTERM" in launch("status", job)

    launch("resume", job)
    wait_for(lambda: f"iteration {saved + 2}/" in log(job), 280)
    slurm(cluster, "scancel", "--batch", "--signal=TERM", number(job))  # it is the user's, so nothing is queued again
    assert end_of(job) == "requeue", log(job)
    again = int((job / "checkpoints/latest").read_text().strip().removeprefix("iter_"))
    assert again >= saved + 2

    settings = job / "settings.yaml"  # so that an end is near
    settings.write_text(settings.read_text().replace("100000", str(again + 3)))
    wait_for(lambda: "requeue (job" in launch("status", job), 60)
    launch("resume", job)
    assert end_of(job) == "done", log(job)
    shown = launch("logs", job)
    for iteration in (saved, again):
        assert f"iter_{iteration:07} at iteration {iteration}\n" in shown
    assert [len(re.findall(rf"iteration +{step}/", shown)) for step in (3, saved + 1, again, again + 3)] == [1] * 4


def test_cancel_takes_away_all_that_waits(cluster: dict[str, str], launch: Launch, tmp_path: Path) -> None:
    """Tasks of an array that have not started, and stages before and after the training."""
    words = own_recipe(tmp_path, "import os, time; open(os.environ['SMP_RUN_DIR'] + '/up', 'w'); time.sleep(300)")
    job = tmp_path / "own"
    launch(*words, "+cluster.array=0-1%1", "stages=[training,export]", "+export.command=touch $run_dir/exported")
    wait_for(lambda: (job / "array-0/up").exists(), 100)
    assert "asked to save and end" in launch("cancel", job)
    wait_for(lambda: not slurm(cluster, "squeue", "--noheader").strip(), 100)
    assert json.loads((job / "array-0/end.json").read_text())["end"] == "cancelled"
    assert not (job / "array-1").exists() and not (job / "exported").exists()

    launch(*words, "recipes.training_cfg.run={name: staged}", "stages=[prepare,training]", "+prepare.command=sleep 300")
    assert "its job is " in launch("resume", tmp_path / "staged", code=2)
    assert "taken out of the queue" in launch("cancel", tmp_path / "staged")
    wait_for(lambda: not slurm(cluster, "squeue", "--noheader").strip(), 100)
    assert "cancelled (job" in launch("status", tmp_path / "staged")


def own_recipe(folder: Path, script: str) -> list[str]:
    (folder / "script.py").write_text(script)
    recipe = folder / "own.yaml"
    recipe.write_text(f"training_cfg:\n  entry_script: {folder / 'script.py'}\n  script_args: [{{--word: hello}}]\n")
    return [f"recipes={recipe}", *COMMON[1:5], f"base_results_dir={folder}"]


def test_stages_follow_each_other_and_an_array_has_a_folder_each(
    cluster: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    words = own_recipe(tmp_path, "import os, sys; open(os.environ['SMP_RUN_DIR'] + '/ran', 'w').write(sys.argv[1])")
    stages = ["stages=[prepare,training,export]", "+prepare.command=touch $run_dir/prepared", "+cluster.array=0-1"]
    launch(*words, *stages, "+export.command=cp $run_dir/array-1/ran $run_dir/exported")
    wait_for(lambda: (tmp_path / "own/exported").exists(), 200)
    assert (tmp_path / "own/prepared").exists() and (tmp_path / "own/array-0/ran").read_text() == "--word"


def test_a_crash_loop_ends_and_so_do_the_stages_after_it(
    cluster: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    words = own_recipe(tmp_path, "import os; os.kill(os.getpid(), 9)")
    launch(*words, "max_tries=2", "stages=[training,export]", "+export.command=touch $run_dir/exported")
    job = tmp_path / "own"
    assert end_of(job) == "gave up", log(job)
    assert "giving up: 2 tries in a row left no newer checkpoint than none" in log(job)
    wait_for(lambda: "gave up (job" in launch("status", job), 60)
    wait_for(lambda: not slurm(cluster, "squeue", "--noheader").strip(), 60)
    assert not (job / "exported").exists()


def test_sbatch_takes_every_script(cluster: dict[str, str], launch: Launch, tmp_path: Path) -> None:
    recipe = "training/llama/hf_llama3_8b_seq8k_gpu_p5x16_pretrain"
    for name, words in {"bare": [], "pyxis": ["container=image.sqsh"], "docker": ["container=image:1"]}.items():
        place = [
            f"base_results_dir={tmp_path}",
            f"recipes.run.name={name}",
            "recipes.trainer.num_nodes=2",
            "dry_run=true",
        ]
        launch(
            f"recipes={recipe}", "cluster=slurm", *place, *words, "cluster.mem=null", "+cluster.comment=it's a test #1"
        )
        slurm(cluster, "sbatch", "--test-only", str(tmp_path / name / "submit.sbatch"))
        for script in (tmp_path / name).glob("*.s*"):
            subprocess.run(["bash", "-n", str(script)], check=True)
