"""A rank of a pipeline is killed in mid-step: the others end, each with a line, and the status file says so too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp.optim.optimizer import clip_gradients
from smp.pipeline.failure import PipelineError, naming
from smp.pipeline.recorder import Recorder
from smp.training import launch
from smp.training.process import ended, write_status
from tests.training.flag_runs import TINY
from tests.training.preloaded import python_path

DIES = """
import os, signal, sys
import pretrain_gpt
from smp.sharding import tied
from smp.training import pipelined, trainer

def dying(function):
    def call(*args, **options):
        left.pop() if left else os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    return call

places = {
    "backward_input": pipelined._Stages,
    "sum_gradients": tied.TiedMatrix,
    "clip_gradients": trainer,
}
name = os.environ["IN"]
owner = places[name]
left = [1, 2, 3]  # calls that it lives through
if os.environ["RANK"] == os.environ["VICTIM"]:
    setattr(owner, name, dying(getattr(owner, name)))
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
PIPE = "--num-layers 4 --global-batch-size 8 --train-iters 9 --pipeline-model-parallel-size"
# processes, who is killed, in what, flags
LOST = {
    "rank 0": (2, 0, "backward_input", f"{PIPE} 2"),
    "rank 0 of four": (4, 0, "backward_input", f"{PIPE} 4"),
    "in the middle": (4, 2, "backward_input", f"{PIPE} 4"),
    "two stages each": (3, 1, "backward_input", f"{PIPE} 3 --pipeline-schedule zb-v --num-layers 6"),
    "beside TP": (4, 3, "backward_input", f"{PIPE} 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "beside FSDP": (4, 1, "backward_input", f"{PIPE} 2 --hybrid-shard-degree 2 --global-batch-size 16"),
    "tied": (3, 2, "sum_gradients", f"{PIPE} 3 --no-untie-embeddings-and-output-weights"),
    "after the passes": (2, 1, "clip_gradients", f"{PIPE} 2"),
}
FAST = "rank 0"
LINE = re.compile(r"error: rank (\d): pipeline rank (\d)(?: \(stages? [\d, ]+\))?: (.*) failed: .*(rank|nothing)", re.M)


def lose(folder: Path, name: str) -> dict[int, str]:
    """What each rank wrote to stderr, from torchrun on."""
    processes, victim, where, flags = LOST[name]
    (folder / "dies.py").write_text(DIES)
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {processes} --redirects 3 --log-dir ranks"
    words = [sys.executable, *launcher.split(), "dies.py", *TINY.split(), *flags.split()]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "VICTIM": str(victim),
        "IN": where,
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and "Signal 9 (SIGKILL)" in done.stderr, done.stderr
    return {rank: next(folder.glob(f"ranks/*/attempt_0/{rank}/stderr.log")).read_text() for rank in range(processes)}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in LOST])
def test_all_but_the_lost_rank_say_where_they_stand(name: str, tmp_path: Path) -> None:
    _, victim, where, _ = LOST[name]
    errors = lose(tmp_path, name)
    said: dict[int, str] = {}
    for rank, text in errors.items():
        assert "Traceback" not in text, text
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == (rank != victim), (rank, text)
        if lines:
            said[rank] = lines[0]
    for rank, line in said.items():
        found = LINE.match(line)
        assert found is not None and int(found[1]) == rank and "stage" in line, line
    if where != "backward_input":  # outside of the schedule: who was to meet the lost rank there says in what
        # (a sum just before may have been over for the lost rank alone)
        assert any(re.search(f"({where}|sum_over_parts) failed", line) for line in said.values()), said
    status = json.loads((tmp_path / "logs" / "status.json").read_text())
    assert (status["status"], status["iteration"]) == ("failed", 0 if where == "backward_input" else 3)
    writers = [rank for rank, line in said.items() if line == f"error: rank {rank}: {status['reason']}"]
    assert writers and (writers == [0] or victim == 0)


def test_the_first_word_about_the_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert not ended(path)
    write_status(path, "running", "", 3)
    assert not ended(path)
    write_status(path, "failed", "pipeline rank 1: ...", 3)
    assert ended(path)


def lose_contact(*_: object, **__: object) -> None:
    raise RuntimeError(
        "[/build/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7. This is typical"
    )


def test_what_fails_between_schedules_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(dist, name, lose_contact)
    device = torch.device("cpu")
    expected = (
        r"pipeline rank 1 \(stage 1\): {} failed: .*Connection closed by peer .*; lost is the rank that says nothing"
    )
    with (
        pytest.raises(PipelineError, match=expected.format("clip_gradients")) as caught,
        naming("pipeline rank 1 (stage 1)"),
    ):
        clip_gradients([], 1.0, device=device)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(PipelineError, match=expected.format("Recorder.__init__")), naming("pipeline rank 1 (stage 1)"):
        Recorder(None, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("gloo/")])
def test_other_errors_between_schedules_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming("pipeline rank 1 (stage 1)"):
        raise error
    assert caught.value is error


def test_torchs_own_types_of_lost_contact_are_known() -> None:
    with pytest.raises(PipelineError, match=r"^here: .* failed: NCCL error; lost is the rank that"), naming("here"):
        torch_fails()


def torch_fails() -> None:
    raise dist.DistBackendError("NCCL error\nand more")


def test_a_rank_lost_at_the_last_barrier_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:1")

    monkeypatch.setattr(dist, "barrier", lost)
    said = launch._last_barrier("rank 0 on host")
    assert said.startswith("rank 0 on host: the last barrier failed: ") and "Connection closed by peer" in said
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert not launch._last_barrier("rank 0 on host")
