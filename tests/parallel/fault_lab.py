"""Runs of pretrain_gpt.py on 2 nodes of 2 ranks in which rank 3 is killed, or its node's uplink is cut, at one moment.

``FAULT`` (kill or cut), ``MOMENT`` (empty: nothing happens) and ``VICTIM`` in the environment say which.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from smp.pipeline.failure import LOST
from tests.parallel.netlab import run_on_nodes
from tests.programs import run_program

PROGRAM = """
import os, signal, subprocess, sys, time
import pretrain_gpt
from torch.distributed import distributed_c10d
from smp.checkpoint import storage
from smp.parallel.network import select_collectives as choose, measure
from smp.parallel.network.group import NetworkGroup
from smp.training import launch, run, trainer

seen = {"steps": 0, "evaluations": 0, "measured": 0}

def counting(owner, name, what):
    function = getattr(owner, name)
    def call(*args, **options):
        seen[what] += 1
        return function(*args, **options)
    setattr(owner, name, call)

def lose():
    if os.environ["FAULT"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.readlink("/proc/self/ns/net") != os.environ["OUTSIDE"], "that is the machine's own network"
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    print("cut", flush=True)

def losing(owner, name, **when):
    function, left = getattr(owner, name), [lose]
    def call(*args, **options):
        if left and when.items() <= seen.items():
            left.pop()()
        return function(*args, **options)
    setattr(owner, name, call)

counting(trainer.Trainer, "start_step", "steps")
counting(trainer.Trainer, "evaluate", "evaluations")
counting(measure, "_shift", "measured")
if os.environ["RANK"] == os.environ["VICTIM"] and (moment := os.environ["MOMENT"]):
    owner, name, when = {
        "rendezvous": (launch, "start_process_group", {}),
        "meeting": (distributed_c10d, "_new_process_group_helper", {}),  # the store is there
        "groups": (run, "build_context", {}),
        "choice": (run, "choose_collectives", {}),
        "measurement": (measure, "_shift", {"measured": 14}),  # of bytes; the first twelve are of latency
        "gather": (NetworkGroup, "all_gather", {"steps": 2, "evaluations": 1}),
        "reduction": (NetworkGroup, "reduce_scatter", {"steps": 2}),
        "replicas' sum": (NetworkGroup, "all_reduce", {"steps": 2}),
        "evaluation": (NetworkGroup, "all_gather", {"steps": 2, "evaluations": 2}),
        "save": (storage, "write_file", {"steps": 2}),
    }[moment]
    losing(owner, name, **when)

def say_end(code):
    sys.stdout.flush()
    # whole, whatever others print
    os.write(1, f"ended with {code} after {time.monotonic() - started:.1f} s\\n".encode())

def leave(code, leaving=os._exit):
    os._exit = leaving  # which ends a forked process, too
    say_end(code)
    leaving(code)

started, code, os._exit = time.monotonic(), 1, leave
try:
    code = pretrain_gpt.main(sys.argv[1:])
finally:
    os._exit = leave.__defaults__[0]
    say_end(code)
    sys.exit(code)
"""
"""Moments after the start are in its second step, or after it."""

ROOT = Path(__file__).resolve().parents[2]
NODES = '{"nodes": [[0, 1], [2, 3]]}'
ITERATIONS = 5
LIMIT = 12.0
"""Seconds of --distributed-timeout-minutes on two nodes."""
FLAGS = (
    "--num-layers 1 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 16 --vocab-size 1000 "
    f"--mock-data --micro-batch-size 1 --train-iters {ITERATIONS} --no-tensorboard --no-progress-bar --log-dir logs "
    "--log-interval 1 --eval-interval 1 --eval-iters 1 --save saved --save-interval 1 --load auto "
    "--data-parallel-collectives hierarchical"
)
MEASURED = "--data-parallel-collectives auto"
REPLICAS = "--hybrid-shard-degree 1"
"""All four ranks hold the whole model, so that their sum crosses nodes that have several of them."""
IN_A_SCHEDULE = (
    r"{0} of [\d,]+ bytes over 2 nodes of 2 ranks failed after [\d.]+ s on rank {1} \(node\d\): "
    r"rank \d on node\d has not"
)
IN_A_FLAT_ONE = rf"rank {{1}} on \S+: {{0}} failed: .*; {LOST}"
IN_EITHER = f"(?:{IN_A_SCHEDULE}|{IN_A_FLAT_ONE.replace('{0}', 'sum_over_ranks')})"
"""A rank whose gathers were through, or had not begun, waits in the sum of its losses."""
MOMENTS = {
    "rendezvous": (IN_A_FLAT_ONE, "start_process_group", ""),
    "meeting": (IN_A_FLAT_ONE, "start_process_group", ""),
    "groups": (IN_A_FLAT_ONE, r"\w+", ""),
    "choice": (IN_A_FLAT_ONE, r"\w+", ""),
    "measurement": (IN_A_FLAT_ONE, "_shift", MEASURED),
    "gather": (IN_EITHER, "all-gather", ""),
    "reduction": (IN_A_SCHEDULE, "reduce-scatter", ""),
    "replicas' sum": (IN_A_SCHEDULE, "all-reduce", REPLICAS),
    "evaluation": (IN_EITHER, "all-gather", ""),
    "save": (IN_A_FLAT_ONE, r"\w+", ""),
}
"""What the others say, of what, and which flags come to FLAGS."""


def on_one_machine(folder: Path, flags: str, moment: str = "", victim: int = 3) -> subprocess.CompletedProcess[str]:
    """Ranks whose nodes are those of a file; a rank may be killed."""
    (folder / "nodes.json").write_text(NODES)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FAULT": "kill", "MOMENT": moment, "VICTIM": str(victim)}.items():
            patch.setenv(name, value)
        words = [*words_of(folder, flags, 0.3)[1:], "--network-topology", "nodes.json"]
        return run_program(folder / "run.py", words, folder, processes=4, grace=60.0)


def on_two_nodes(
    folder: Path, flags: str, moment: str = "", victim: int = 3, fault: str = "cut"
) -> subprocess.CompletedProcess[str]:
    """Ranks in two namespaces with a shaped uplink each; that of a rank's node may be cut, or the rank killed."""
    told = {"OUTSIDE": os.readlink("/proc/self/ns/net"), "FAULT": fault, "MOMENT": moment, "VICTIM": str(victim)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        return run_on_nodes("--grace 40", words_of(folder, flags, LIMIT / 60), folder, 150.0)


def by_torchrun(folder: Path, moment: str = "") -> subprocess.CompletedProcess[str]:
    """As :func:`on_one_machine`, by what users start ranks with; their output goes to files in ``ranks``."""
    (folder / "nodes.json").write_text(NODES)
    words = [*words_of(folder, "", 0.3), "--network-topology", "nodes.json"]
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 4 --redirects 3 --log-dir ranks"
    told = {"FAULT": "kill", "MOMENT": moment, "VICTIM": "3"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **told}
    command = [sys.executable, *launcher.split(), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=140)


def words_of(folder: Path, flags: str, minutes: float) -> Sequence[str]:
    """The program, written into ``folder``, and its command line."""
    (folder / "run.py").write_text(PROGRAM)
    return ["run.py", *FLAGS.split(), *flags.split(), "--distributed-timeout-minutes", str(minutes)]


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    """Its data files."""
    path = folder / "saved" / f"iter_{ITERATIONS:07}"
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
