"""A worker is killed, and torchrun starts all again: the first such start goes on, by the same collectives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.flag_runs import TINY

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys
import pretrain_gpt

def kill(result, model):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], result.iteration) == ("0", "0", 3):
        os.kill(os.getpid(), signal.SIGKILL)

sys.exit(pretrain_gpt.main(sys.argv[1:], callbacks=[kill]))
"""


@pytest.mark.parametrize("rendezvous", ["static", "standalone"])
def test_the_first_start_after_a_loss_goes_on(rendezvous: str, tmp_path: Path) -> None:
    """All starts of one torchrun have one store, in which the addresses of the lost processes are: the next ones waited
    for them, and ended (with two starts left of three), or took gloo in place of memory."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = ["--master-port", str(free.getsockname()[1])] if rendezvous == "static" else ["--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", "2", "--max-restarts", "1"]
    command += [
        "program.py",
        *TINY.split(),
        "--train-iters",
        "6",
        "--save",
        "kept",
        "--save-interval",
        "1",
        "--load",
        "auto",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, start_new_session=True, **streams)  # type: ignore[call-overload]
    try:
        out, err = run.communicate(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # workers, too, where the time is over
    assert run.returncode == 0, err[-3000:]
    assert out.count("collectives: shared memory") == 2 and "gloo" not in out
    assert "resumed from kept/iter_000000" in out and "done: 6 iterations trained" in out
