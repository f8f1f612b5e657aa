"""Signs of life: who is stopped is killed, and nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.elastic_lab import Job, listener_of
from tests.training.preloaded import forked_of, preloaded

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
from smp.training.faults.silence import SignsOfLife

life = SignsOfLife("rank 3", float(sys.argv[1]))
print("lives", flush=True)
{rest}
life.close()
"""


@pytest.fixture
def started(request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    limit, rest = request.param
    words = [sys.executable, "-c", PROGRAM.format(rest=rest), str(limit)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    request.addfinalizer(program.kill)
    assert program.stdout is not None and program.stdout.readline() == "lives\n"
    return program


@pytest.mark.parametrize("started", [(3, "time.sleep(100)")], indirect=True)
def test_who_is_stopped_is_killed_also_where_all_are(started: subprocess.Popen[str]) -> None:
    os.kill(started.pid, signal.SIGSTOP)
    _, said = started.communicate(timeout=60)
    assert started.returncode == -signal.SIGKILL
    assert "rank 3: no sign of life for " in said


@pytest.mark.parametrize("started", [(3, "time.sleep(8)")], indirect=True)
def test_who_lives_is_left_alone_and_signals_are_its_own(started: subprocess.Popen[str]) -> None:
    listener = listener_of(started.pid)
    os.kill(listener, signal.SIGTERM)
    _, said = started.communicate(timeout=60)
    assert (started.returncode, said) == (0, "")
    assert not Path(f"/proc/{listener}").exists()


@pytest.mark.parametrize("started", [(8, "time.sleep(100)")], indirect=True)
def test_a_pause_of_all_processes_does_not_count(started: subprocess.Popen[str]) -> None:
    listener = listener_of(started.pid)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(started.pid, number)
        os.kill(listener, number)
        time.sleep(10 if number == signal.SIGSTOP else 0)
    time.sleep(3)  # it would have been killed
    assert started.poll() is None
    started.kill()
    started.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{listener}").exists():  # nobody is left whom it could kill
        assert time.monotonic() < deadline
        time.sleep(0.1)


MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 17 --init-method-std 0.2 --hidden-dropout 0.1 --global-batch-size 4 --micro-batch-size 1 "
    "--train-iters 16 --log-interval 1 --no-tensorboard --no-progress-bar --log-dir logs"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victims", [(0,), (0, 1)], ids=["one of two nodes", "all"])
def test_a_run_whose_processes_are_stopped_goes_on_by_a_restart(victims: tuple[int, ...], tmp_path: Path) -> None:
    copies = "--max-nodes 2 --peer-snapshot-interval 1 --distributed-timeout-minutes 0.4"
    job = Job(tmp_path / "job", f"{MODEL} {copies}", 1, 2, step=0.3)
    quiet = Job(tmp_path / "quiet", MODEL, 1, 1, step=0, each=2)
    with contextlib.closing(job), contextlib.closing(quiet), preloaded(tmp_path):
        quiet.start()
        job.start(2)
        job.until(lambda: "2 nodes" in job.now() and job.iteration > 2)
        for node in victims:
            os.kill(forked_of(job.workers(node)[0]), signal.SIGSTOP)
        assert job.finish(600) == [0, 0], job.said()
        assert quiet.finish(600) == [0], quiet.said()
    assert "no sign of life for 24 s, and so killed" in job.said()
    assert "Unable to shutdown process" not in job.said()  # torchrun had nobody to wait for
    assert "resumed from the memory of the nodes" in job.said()
    assert job.losses() == quiet.losses() and len(job.losses()) == 16
