"""A rank is killed at each moment of a run with hierarchical collectives: the others end, each with one line that says
which rank it is and on which node, and the same command goes on to the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_program

PROGRAM = """
import os, signal, sys
import pretrain_gpt
from smp.checkpoint import storage
from smp.parallel.network.group import NetworkGroup
from smp.training import launch, run, trainer

steps, start_step = [], trainer.Trainer.start_step

def counting(*args, **options):
    steps.append(1)
    return start_step(*args, **options)

def dying(owner, name, after):
    function = getattr(owner, name)
    def call(*args, **options):
        if len(steps) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)
    setattr(owner, name, call)

places = {
    "rendezvous": (launch, "start_process_group", 0),
    "choice": (run, "choose_collectives", 0),
    "gather": (NetworkGroup, "all_gather", 2),
    "reduce": (NetworkGroup, "reduce_scatter", 2),
    "save": (storage, "write_file", 2),
}
trainer.Trainer.start_step = counting
if os.environ["RANK"] == "3" and (moment := os.environ["MOMENT"]):
    dying(*places[moment])
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
FLAGS = (
    "--num-layers 1 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 16 --vocab-size 1000 "
    "--mock-data --micro-batch-size 1 --train-iters 4 --no-tensorboard --no-progress-bar --log-dir logs "
    "--data-parallel-collectives hierarchical --network-topology nodes.json --distributed-timeout-minutes 0.3 "
    "--save saved --save-interval 1 --load auto"
)
IN_A_SCHEDULE = (
    r"{} of [\d,]+ bytes over 2 nodes of 2 ranks failed after [\d.]+ s on rank {} \(node\d\): rank \d on node\d has not"
)
IN_A_FLAT_ONE = r"rank {1} on \S+: {0} failed: .*; lost is the rank that says nothing"
SAID = {
    "choice": (IN_A_FLAT_ONE, r"\w+"),
    "gather": (IN_A_SCHEDULE, "all-gather"),
    "reduce": (IN_A_SCHEDULE, "reduce-scatter"),
    "save": (IN_A_FLAT_ONE, r"\w+"),
}
"""Each but the first is in the second step since the start."""


def train(folder: Path, moment: str | None) -> tuple[int, str, str]:
    """Start, and load what is there; the exit code and what the ranks printed."""
    (folder / "run.py").write_text(PROGRAM)
    (folder / "nodes.json").write_text('{"nodes": [[0, 1], [2, 3]]}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOMENT", moment or "")
        done = run_program(folder / "run.py", FLAGS.split(), folder, processes=4, grace=60.0)
    return done.returncode, done.stdout, done.stderr


def lose(folder: Path, moment: str, text: str, what: str) -> str:
    """A start in which rank 3 is killed; what rank 0 printed, once the others have said what they had to."""
    code, out, err = train(folder, moment)
    lines = sorted(line for line in err.splitlines() if line.startswith("error: "))
    assert code == -9 and len(lines) == 3 and "Traceback" not in err, err
    for rank, line in enumerate(lines):
        assert re.match(f"error: rank {rank}: {text.format(what, rank)}", line), line
    return out


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    """Its data files."""
    return {path.name: path.read_bytes() for path in (folder / "saved" / "iter_0000004").glob("*.safetensors")}


def test_the_others_say_where_they_stand_and_new_starts_end_in_the_same_bits(tmp_path: Path) -> None:
    """Four starts, each ended at another moment, and a fifth."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    whole.mkdir()
    ended.mkdir()
    for iteration, (moment, said) in enumerate(SAID.items()):
        out = lose(ended, moment, *said)
        assert (f"saved saved/iter_000000{iteration}" in out) == (iteration > 0), out
        assert (f"at iteration {iteration - 1}" in out) == (iteration > 1), out
    for folder in (ended, whole):
        code, out, err = train(folder, None)
        assert code == 0 and ("at iteration 3" in out) == (folder is ended), out + err
    assert last_checkpoint(ended) == last_checkpoint(whole) != {}


@pytest.mark.slow
def test_ranks_that_never_meet_say_so(tmp_path: Path) -> None:
    """The others wait for it until their time is over."""
    lose(tmp_path, "rendezvous", IN_A_FLAT_ONE, "start_process_group")
