"""One recipe on this machine: trained, killed, gone on with to the same bits; cancelled; refused."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smp.launch.backends.backend import said
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
RUN = ["recipes=laptop/debug", "recipes.train_iters=12", "recipes.save_interval=2", "recipes.trainer.devices=2"]


def launcher(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "main.py"), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def records(folder: Path) -> dict[int, Any]:
    """Loss and gradient norm by iteration; what a later try measured counts."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: (line["lm loss"], line["grad norm"]) for line in lines if "lm loss" in line}


def wait_for(what: Any, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def workers(folder: Path) -> list[int]:
    """Process ids of the training processes of a job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue
        if (
            str(folder / "settings.yaml") in words
            and "torch.distributed.run" not in words
            and "supervise.py" not in "".join(words)
        ):
            found.append(int(path.parent.name))
    return found


def tensors(folder: Path) -> dict[str, bytes]:
    """Every file of the last checkpoint that holds tensors."""
    return {
        path.name: path.read_bytes() for path in sorted((folder / "checkpoints/iter_0000012").rglob("*.safetensors"))
    }


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    launched = launcher(*RUN, f"base_results_dir={tmp_path}", "recipes.run.name=killed", "cluster.background=true")
    assert launched.returncode == 0, launched.stderr
    wait_for(lambda: (killed / "checkpoints/latest").exists())
    os.kill(workers(killed)[0], signal.SIGKILL)
    wait_for(lambda: (killed / "end.json").exists())
    log = (killed / "log.txt").read_text()
    assert len(re.findall("launcher: the run ended with", log)) == 2, log
    assert "done; the run says done at iteration 12" in launcher("status", killed).stdout
    whole.mkdir()
    words = ["--config", killed / "settings.yaml", "--save", whole / "checkpoints", "--log-dir", whole]
    done = run_program(ROOT / "pretrain_gpt.py", words, whole, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(killed) == records(whole)
    assert tensors(killed) and tensors(killed) == tensors(whole)


def test_a_killed_run_that_began_from_a_model_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Not from the model again; and it knows what model that is, which no flag says."""
    words = ["--mock-data --vocab-size 120 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"]
    words = [*words[0].split(), "--train-iters", "1", "--save", tmp_path / "model", "--log-dir", tmp_path / "logs"]
    assert run_program(ROOT / "pretrain_gpt.py", words, tmp_path).returncode == 0
    own = tmp_path / "own.yaml"
    recipe = {"load": f"{tmp_path}/model", "finetune": "true", "mock_data": "true", "vocab_size": 120, "seq_length": 32}
    recipe |= {"train_iters": 12, "save_interval": 2, "log_interval": 1}
    own.write_text("".join(f"{name}: {value}\n" for name, value in recipe.items()))
    job = tmp_path / "own"
    launched = launcher(
        f"recipes={own}", f"base_results_dir={tmp_path}", "recipes.trainer.devices=2", "cluster.background=true"
    )
    assert launched.returncode == 0, launched.stderr
    wait_for(lambda: (job / "checkpoints/latest").exists())
    os.kill(workers(job)[0], signal.SIGKILL)
    wait_for(lambda: (job / "end.json").exists())
    log = (job / "log.txt").read_text()
    assert len(re.findall("launcher: the run ended with", log)) == 2, log
    assert f"holds this run, which started from --load {tmp_path}/model: continuing" in log and "resumed from" in log
    assert "done; the run says done at iteration 12" in launcher("status", job).stdout
    whole = [
        "--config",
        job / "settings.yaml",
        "--save",
        tmp_path / "whole/checkpoints",
        "--log-dir",
        tmp_path / "whole",
    ]
    assert run_program(ROOT / "pretrain_gpt.py", whole, tmp_path, processes=2).returncode == 0
    assert records(job) == records(tmp_path / "whole") and len(records(job)) > 0
    assert tensors(job) and tensors(job) == tensors(tmp_path / "whole")


def test_a_job_that_is_not_in_the_background_shows_its_log_and_ends_well(tmp_path: Path) -> None:
    words = ["recipes=laptop/debug", "recipes.train_iters=2", "recipes.trainer.devices=1"]
    done = launcher(*words, f"base_results_dir={tmp_path}")
    assert done.returncode == 0 and "iteration 2/2 " in done.stdout, done.stdout + done.stderr
    assert "done; the run says done at iteration 2" in launcher("status", tmp_path / "debug").stdout


def test_cancel_saves_and_resume_goes_on(tmp_path: Path) -> None:
    job = tmp_path / "debug"
    words = [
        "recipes=laptop/debug",
        f"base_results_dir={tmp_path}",
        "recipes.train_iters=100000",
        "recipes.save_interval=50000",
        "recipes.trainer.devices=1",
    ]
    assert launcher(*words, "cluster.background=true").returncode == 0
    wait_for(lambda: (job / "log.txt").exists() and "iteration 3/" in (job / "log.txt").read_text())
    shown = re.search(r"the run says running at iteration (\d+)", launcher("status", job).stdout)
    assert shown is not None and int(shown[1]) >= 3
    twice = launcher("resume", job)
    assert twice.returncode == 2 and "its job is running" in twice.stderr
    said = launcher("cancel", job).stdout
    assert said == f"debug: asked to save and end; python main.py status {job} says when it has ended\n"
    wait_for(lambda: (job / "end.json").exists())
    saved = int((job / "checkpoints/latest").read_text().strip().removeprefix("iter_"))
    ended = f"debug: cancelled; the run says it saved at iteration {saved} and ended: stopped by SIGTERM\n"
    assert saved >= 3 and launcher("status", job).stdout == ended
    assert "launcher: asked to stop: every training process gets SIGTERM" in (job / "log.txt").read_text()
    settings = (job / "settings.yaml").read_text().replace("100000", str(saved + 2))
    (job / "settings.yaml").write_text(settings)
    assert launcher("resume", job).returncode == 0
    wait_for(lambda: (job / "end.json").exists())
    logs = launcher("logs", job)
    assert f"iteration {saved + 2}/{saved + 2} " in logs.stdout, logs.stdout
    assert f"iteration {saved}/" not in logs.stdout


def test_a_crash_loop_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "script.py").write_text(
        "import os; print('threads', os.environ['OMP_NUM_THREADS']); os.kill(os.getpid(), 9)"
    )
    run = "  run: {ntasks_per_node: 2}\n"
    (tmp_path / "own.yaml").write_text(f"training_cfg:\n  entry_script: {tmp_path / 'script.py'}\n{run}")
    done = launcher(f"recipes={tmp_path / 'own.yaml'}", f"base_results_dir={tmp_path}", "max_tries=2")
    assert done.returncode == 1 and done.stdout.count("launcher: the run ended with") == 2, done.stdout
    assert "giving up: 2 tries in a row left no newer checkpoint than none" in done.stdout
    assert "gave up" in launcher("status", tmp_path / "own").stdout
    # torchrun's banner about threads would come before the run's own lines
    assert "environment, where a node does not have it: OMP_NUM_THREADS=1" in done.stdout and "threads 1" in done.stdout
    assert "Setting OMP_NUM_THREADS" not in done.stdout + done.stderr


def test_what_this_machine_cannot_do_is_one_line(tmp_path: Path) -> None:
    cases = {
        "recipes.trainer.num_nodes=2 cluster=local": "trainer.num_nodes: 2 with cluster=local",
        "env_vars={A-B: 1}": "env_vars: 'A-B' cannot be the name of a variable",
        "container=image cluster=local": "container: image with cluster=local",
        "+cluster.partition=gpu": "cluster.partition: there is no such key",
        "recipes.lrr=1": "lrr: there is no such key: did you mean lr?",
        "recipes.tensor_model_parallel_size=4": "--tensor-model-parallel-size 4",
    }
    for words, message in cases.items():
        # One of them has spaces of its own.
        typed = words.split() if "cluster=local" in words else [words]
        done = launcher("recipes=laptop/debug", f"base_results_dir={tmp_path}", *typed)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr, done.stderr
    assert not (tmp_path / "debug").exists()


def test_status_after_a_dry_run_says_what_submits_the_job(tmp_path: Path) -> None:
    assert launcher(*RUN, f"base_results_dir={tmp_path}", "dry_run=true").returncode == 0
    done = launcher("status", tmp_path / "debug")
    hint = f"debug: not submitted; python main.py resume {tmp_path}/debug submits it\n"
    assert (done.returncode, done.stdout) == (0, hint), done.stderr
    for words in (["cluster=local"], ["cluster=slurm"]):
        assert launcher(*RUN, f"base_results_dir={tmp_path}", "dry_run=true", *words).returncode == 0
        done = launcher("logs", tmp_path / "debug")
        assert (done.returncode, done.stdout) == (2, "") and "it was never submitted" in done.stderr


def test_files_of_a_job_that_ran_are_not_replaced_by_a_dry_run(tmp_path: Path) -> None:
    folder = tmp_path / "debug"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"backend": "local", "name": "debug"}))
    (folder / "status.json").write_text(json.dumps({"status": "done", "reason": "", "iteration": 12}))
    before = {path.name: path.read_text() for path in folder.iterdir()}
    for words in (["dry_run=true"], ["cluster=slurm", "dry_run=true"]):
        done = launcher(*RUN, f"base_results_dir={tmp_path}", *words)
        assert done.returncode == 2 and "is the folder of a job that ran with cluster=local" in done.stderr
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_the_job_has_its_folder_while_a_stage_runs_and_a_cancelled_stage_ends_it(tmp_path: Path) -> None:
    job = tmp_path / "debug"
    stages = ["stages=[prepare,training]", f"+prepare.command='touch {job}/begun; sleep 60'", "cluster.background=true"]
    words = [*RUN, *stages, f"base_results_dir={tmp_path}"]
    assert launcher(*words).returncode == 0
    wait_for(lambda: (job / "begun").exists())
    again = launcher(*words)
    assert again.returncode == 2 and "its job is running" in again.stderr
    assert "asked to save and end" in launcher("cancel", job).stdout
    wait_for(lambda: (job / "end.json").exists())
    assert "cancelled" in launcher("status", job).stdout
    assert not (job / "metrics.jsonl").exists()


def test_one_launcher_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    job, words = tmp_path / "debug", [*RUN, f"base_results_dir={tmp_path}", "dry_run=true"]
    job.mkdir()
    handle = os.open(job, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused = launcher(*words)
    os.close(handle)
    assert refused.returncode == 2 and "another launcher works in it" in refused.stderr
    assert not list(job.iterdir()) and launcher(*words).returncode == 0


@pytest.mark.parametrize("text", ["", "[]", '{"backend": "lo', '{"backend": "local"}', '{"backend": "x", "name": "a"}'])
def test_a_damaged_job_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    done = launcher("status", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "job.json is damaged" in done.stderr, done.stderr


@pytest.mark.parametrize("text", ["[]", "{}", '{"status": "running"}'])
def test_a_status_file_that_lacks_keys_is_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert said(tmp_path) == ("running at iteration 0" if "running" in text else "nothing yet")
