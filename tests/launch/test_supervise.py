"""What runs a job again: with commands of a few milliseconds in place of torchrun."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smp.launch.library import SUPERVISE


def job(folder: Path, command: str, *options: str, tries: int = 3) -> list[str]:
    words = ["job", str(folder), str(folder / "checkpoints"), str(tries), *options, "--", "bash", "-c", command]
    return [sys.executable, str(SUPERVISE), *words]


def says(status: str, iteration: int = 1) -> str:
    return f"""echo '{{"status": "{status}", "reason": "", "iteration": {iteration}}}' > "$RUN/status.json"; """


def run(folder: Path, command: str, *options: str, tries: int = 3) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RUN": str(folder), "SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}
    words = job(folder, f"echo x >> $RUN/starts; {command}", *options, tries=tries)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().split())


def end(folder: Path) -> str:
    return str(json.loads((folder / "end.json").read_text())["end"])


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("bad_config", 2)])
def test_what_would_end_alike_is_not_tried_again(tmp_path: Path, status: str, code: int) -> None:
    done = run(tmp_path, says(status) + f"exit {code}")
    assert (done.returncode, starts(tmp_path), end(tmp_path)) == (code, 1, status), done.stdout


@pytest.mark.parametrize("status", ["failed", "running"])
def test_a_crash_loop_ends_and_says_so(tmp_path: Path, status: str) -> None:
    done = run(tmp_path, says(status) + "exit 1")
    assert (done.returncode, starts(tmp_path), end(tmp_path)) == (1, 3, "gave up")
    assert "giving up: 3 tries in a row left no newer checkpoint than" in done.stdout


def test_progress_starts_the_count_anew(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    step = 'n=$(wc -l < $RUN/starts); [ $n -gt 4 ] || echo iter_$n > "$RUN/checkpoints/latest"; '
    done = run(tmp_path, step + says("failed") + "exit 1", tries=2)
    # 1 finds nothing, 2 to 5 a newer checkpoint each time, 6 the same as 5 did
    assert (done.returncode, starts(tmp_path)) == (1, 6), done.stdout


def test_tries_are_counted_over_jobs(tmp_path: Path) -> None:
    """A node that is lost takes this process with it."""
    (tmp_path / "tries.json").write_text('{"tries": 2, "progress": "none"}')
    assert run(tmp_path, "exit 1").returncode == 1
    assert starts(tmp_path) == 1


def test_the_end_of_a_job_that_is_started_again_is_forgotten(tmp_path: Path) -> None:
    """A node is lost: Slurm sends SIGTERM, this process notes "requeue", and Slurm starts the job again."""
    (tmp_path / "end.json").write_text('{"end": "requeue"}')
    done = run(tmp_path, "cat $RUN/end.json; " + says("done"))
    assert "requeue" not in done.stdout and end(tmp_path) == "done"


@pytest.mark.parametrize(("state", "tried"), [("RUNNING", 3), ("PENDING", 1), ("COMPLETING", 1)])
def test_no_try_is_lost_on_a_job_that_slurm_has_taken_back(tmp_path: Path, state: str, tried: int) -> None:
    """After the loss of a node srun ends before the batch script is told, and would be refused at once three times."""
    (tmp_path / "squeue").write_text(f"#!/bin/bash\necho 6 PENDING; echo 7 {state}\n")
    (tmp_path / "squeue").chmod(0o755)
    done = run(tmp_path, says("failed") + "exit 1", "--requeue")
    assert starts(tmp_path) == tried, done.stdout
    assert (done.returncode, end(tmp_path)) == ((1, "gave up") if tried == 3 else (75, "requeue"))


def test_a_script_that_says_nothing_ends_by_its_code(tmp_path: Path) -> None:
    assert run(tmp_path, "exit 0").returncode == 0
    assert end(tmp_path) == "done"


def test_a_run_whose_clock_ended_it_goes_on(tmp_path: Path) -> None:
    first = says("requeue") + "[ $(wc -l < $RUN/starts) = 1 ] || " + says("done")
    assert run(tmp_path, first).returncode == 0
    assert starts(tmp_path) == 2


def test_slurm_is_asked_to_queue_it_again(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" > "$RUN/scontrol.said"\n')
    (tmp_path / "scontrol").chmod(0o755)
    assert run(tmp_path, says("requeue"), "--requeue").returncode == 0
    assert (tmp_path / "scontrol.said").read_text() == "requeue 7\n"
    assert starts(tmp_path) == 1


def descendants(pid: int) -> list[int]:
    below = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return below + [lower for child in below for lower in descendants(child)]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_signal_reaches_the_workers_and_not_torchrun(tmp_path: Path, cancelled: bool) -> None:
    """The chain of a real job: job -> node -> torchrun -> workers. torchrun and bash would die of the signal."""
    worker = (
        "trap 'echo saved > $RUN/saved; " + says("requeue").replace("'", "'\"'\"'") + "exit 0' TERM; touch $RUN/up; "
    )
    worker += "for i in $(seq 300); do sleep 0.1; done"
    (tmp_path / "worker.sh").write_text(worker)
    (tmp_path / "torchrun.sh").write_text(
        "trap 'touch $RUN/torchrun-was-signalled' TERM\nbash $RUN/worker.sh & wait $!\n"
    )
    chain = f'exec {sys.executable} {SUPERVISE} node "$RUN/status.json" -- bash $RUN/torchrun.sh'
    environment = {**os.environ, "RUN": str(tmp_path)}
    process = subprocess.Popen(job(tmp_path, chain), env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if cancelled:
        (tmp_path / "cancelled").touch()
    below = descendants(process.pid)
    process.send_signal(signal.SIGUSR1)
    for pid in below:  # as Slurm does with the processes of a step
        os.kill(pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert (tmp_path / "saved").exists() and not (tmp_path / "torchrun-was-signalled").exists(), output
    assert (process.returncode, end(tmp_path)) == ((0, "cancelled") if cancelled else (75, "requeue")), output


def test_a_torchrun_of_a_range_of_nodes_is_asked_itself(tmp_path: Path) -> None:
    """It would start workers again that end while it was not asked."""
    (tmp_path / "torchrun.sh").write_text(
        "stop() { touch $RUN/torchrun-was-signalled; " + says("requeue") + "exit 143; }; trap stop TERM\n"
        "touch $RUN/up; for i in $(seq 300); do sleep 0.1; done"
    )
    words = ["node", str(tmp_path / "status.json"), "--", "bash", str(tmp_path / "torchrun.sh"), "--nnodes", "2:4"]
    environment = {**os.environ, "RUN": str(tmp_path)}
    process = subprocess.Popen([sys.executable, str(SUPERVISE), *words], env=environment)
    deadline = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 75 and (tmp_path / "torchrun-was-signalled").exists()


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("requeue", 75), ("bad_config", 2), ("failed", 1)])
def test_a_node_ends_as_its_run_says(tmp_path: Path, status: str, code: int) -> None:
    """torchrun's own exit code is 1 for all that is not done, and 0 for a run that wants to be queued again."""
    command = says(status) + f"exit {0 if status in ('done', 'requeue') else 1}"
    words = ["node", str(tmp_path / "status.json"), "--", "bash", "-c", command]
    environment = {**os.environ, "RUN": str(tmp_path)}
    assert subprocess.run([sys.executable, str(SUPERVISE), *words], env=environment).returncode == code


def test_one_job_at_a_time_has_a_folder(tmp_path: Path) -> None:
    first = subprocess.Popen([*job(tmp_path, "touch $0; sleep 30", "--requeue"), str(tmp_path / "up")])
    deadline = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    second = run(tmp_path, "true")
    first.kill()
    first.wait()
    assert second.returncode == 2 and "another job is running" in second.stdout


def test_it_runs_on_old_pythons_alone() -> None:
    tree = ast.parse(SUPERVISE.read_text(), feature_version=(3, 8))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def stage(folder: Path, name: str, command: str) -> str:
    path = folder / f"{name}.sh"
    path.write_text(f"echo {name} >> $RUN/order; {command}\n")
    return str(path)


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().split()


def test_stages_run_in_order_around_the_training(tmp_path: Path) -> None:
    before, after = stage(tmp_path, "prepare", "true"), stage(tmp_path, "export", "true")
    done = run(tmp_path, "echo training >> $RUN/order; " + says("done"), "--before", before, "--after", after)
    assert (done.returncode, end(tmp_path)) == (0, "done")
    assert order(tmp_path) == ["prepare", "training", "export"]


@pytest.mark.parametrize(("when", "left"), [("--before", ["broken"]), ("--after", ["training", "broken"])])
def test_nothing_follows_a_stage_that_failed(tmp_path: Path, when: str, left: list[str]) -> None:
    broken, export = stage(tmp_path, "broken", "exit 7"), stage(tmp_path, "export", "true")
    training = "echo training >> $RUN/order; " + says("done")
    done = run(tmp_path, training, when, broken, "--after", export)
    assert (done.returncode, end(tmp_path)) == (7, "stage broken failed with 7")
    assert order(tmp_path) == left


def test_no_stage_follows_a_cancelled_training(tmp_path: Path) -> None:
    export = stage(tmp_path, "export", "true")
    done = run(tmp_path, "touch $RUN/cancelled; " + says("requeue") + "exit 75", "--after", export)
    assert (done.returncode, end(tmp_path)) == (0, "cancelled")
    assert not (tmp_path / "order").exists()


def test_a_cancel_between_two_tries_ends_the_job(tmp_path: Path) -> None:
    """The signal comes when no training runs that it could be passed on to."""
    late = "(sleep 0.3; touch $RUN/cancelled; kill -USR1 $PPID) > /dev/null 2>&1 & "
    done = run(tmp_path, late + says("failed") + "exit 1")
    assert (done.returncode, end(tmp_path), starts(tmp_path)) == (0, "cancelled", 1), done.stdout
