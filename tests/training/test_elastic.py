"""Nodes leave, are lost and join while a run trains: its losses are those of one process. A node is a torchrun."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.elastic_lab import Job
from tests.training.preloaded import MODULES, preloaded
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer

pytestmark = pytest.mark.timeout(900)  # many starts of many processes
BOUND, MANY = 1e-6, 60
COMMON = (
    "--train-iters 30 --global-batch-size 8 --micro-batch-size 1 --log-interval 1 --optimizer sgd --lr 0.02 "
    "--no-tensorboard --no-progress-bar --log-dir logs"
)
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 17 --init-method-std 0.2 --hidden-dropout 0.1"
)
ELASTIC = "--max-nodes {most} --min-nodes {least} --peer-snapshot-interval 4 --distributed-timeout-minutes 1"
EXPERTS = "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
PRETRAINING = {
    "dense": (1, MODEL),
    "hybrid sharding": (2, f"{MODEL} --hybrid-shard-degree 2"),
    "experts, EP 2": (2, f"{MODEL} {EXPERTS} --expert-model-parallel-size 2"),
    "PP 2": (2, f"{MODEL} --pipeline-model-parallel-size 2"),
}
STAGE_A_NODE = "PP 2, nodes of one process"
"""Of an odd number of them one is spare."""
TUNING = {
    "packed SFT": "--load {0} --seq-length 48 --data-path {0}/sft.jsonl",
    "DPO": "--load {0} --seq-length 48 --data-path {0}/dpo.jsonl --objective dpo --lora-rank 4",
}


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


def prepared(kind: str, folder: Path) -> tuple[str, int, str, str]:
    """Entry point, processes of a node, settings, and those of one process."""
    if kind in TUNING:
        write_tokenizer(folder / "hf")
        write_model(folder / "hf", layers=2)
        write_samples(folder / "hf")
        entry, each, own = "finetune", 1, TUNING[kind].format(folder / "hf")
    elif kind == STAGE_A_NODE:
        entry, each, own = "pretrain_gpt", 1, PRETRAINING["PP 2"][1]
    else:
        entry, (each, own) = "pretrain_gpt", PRETRAINING[kind]
    whole = own
    for layout in ("--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--hybrid-shard-degree 2"):
        whole = whole.replace(layout, "")
    return entry, each, own, whole


def alone(folder: Path, flags: str, jobs: list[Job], entry: str) -> dict[int, float]:
    """Losses of one process."""
    job = Job(folder, flags, 1, 1, entry=entry, step=0)
    jobs.append(job)
    job.start()
    assert job.finish() == [0], job.said()
    return job.losses()


def require_equal(job: Job, want: dict[int, float], steps: int = 30) -> None:
    got = job.losses()
    assert sorted(got) == sorted(want) == list(range(1, steps + 1)), job.said()
    worst = max(abs(got[i] - want[i]) / abs(want[i]) for i in want)
    print(f"worst relative difference of {steps} losses: {worst:.1e}")
    assert worst <= BOUND


def through_the_members(job: Job, of_three: int = 3) -> int:
    """4 -> 3 -> 2 -> 4 -> 6 nodes: one is asked to leave, one that trains is killed, two come, and two more; of three
    nodes ``of_three`` train. Returns the number of the one that is killed."""
    killed = list[int]()

    def kill() -> None:
        killed.append(2 if of_three == 3 else job.node_of(f"  {of_three} nodes"))
        job.kill(killed[0])

    changes = [
        (lambda: job.start(4), 4, 6),
        # Those that stay are in the run, and so are those that come.
        (lambda: job.leave(3), of_three, 6),
        (kill, 2, 4),
        (lambda: job.start(2), 4, 4),
        (lambda: job.start(2), 6, 4),
    ]
    for change, nodes, steps in changes:
        starts = job.said().count("(now)")
        change()
        job.until(lambda n=nodes, s=starts: job.said().count("(now)") > s and f"{n} nodes" in job.now())
        job.reach(job.iteration + steps)
    return killed[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PRETRAINING, STAGE_A_NODE, *TUNING])
def test_four_three_two_four_six_nodes(kind: str, tmp_path: Path, jobs: list[Job]) -> None:
    entry, each, own, whole = prepared(kind, tmp_path)
    common = COMMON.replace("--train-iters 30", f"--train-iters {MANY}")
    with preloaded(tmp_path, MODULES + " smp.training.tuning" if entry == "finetune" else MODULES):
        want = alone(tmp_path / "alone", f"{common} {whole}", jobs, entry)
        flags = f"{common} {own} {ELASTIC.format(least=2, most=6)}"
        job = Job(tmp_path / "elastic", flags, 2, 6, entry=entry, each=each, step=0.8)
        jobs.append(job)
        killed = through_the_members(job, 2 if kind == STAGE_A_NODE else 3)
        codes = job.finish()
    assert [code for node, code in enumerate(codes) if node not in (3, killed)] == [0] * 6, job.said()
    require_equal(job, want, MANY)
    said = job.said()
    # What was asked to leave loses no step; of a node that is lost the steps since its last copy are trained again.
    assert said.count("resumed from the memory of the nodes at iteration") >= 4, said
    if kind == STAGE_A_NODE:
        assert (
            "  3 nodes: no layout: the next smaller number of nodes is used" in said
            and "spare, behind 2 processes" in said
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*list(PRETRAINING)[1:], *TUNING])
def test_other_kinds_of_runs(kind: str, tmp_path: Path, jobs: list[Job]) -> None:
    """Two nodes, one, two again; the first one is killed."""
    entry, each, own, whole = prepared(kind, tmp_path)
    want = alone(tmp_path / "alone", f"{COMMON} {whole}", jobs, entry)
    flags = f"{COMMON} {own} {ELASTIC.format(least=1, most=2)}"
    job = Job(tmp_path / "elastic", flags, 1, 2, entry=entry, each=each, step=0.8)
    jobs.append(job)
    job.start(1)
    job.until(lambda: job.iteration >= 1)
    job.start(1)
    job.until(lambda: "2 nodes" in job.now())
    job.reach(job.iteration + 4)  # the second node has a copy by now
    job.kill(0)
    job.until(lambda: "1 nodes" in job.now())
    job.reach(job.iteration + 2)
    job.start(1)
    job.reach(30)
    codes = job.finish()
    assert codes[1:] == [0, 0], job.said()
    require_equal(job, want)
    assert job.said().count("resumed from the memory of the nodes") == 3, job.said()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_from_memory(tmp_path: Path, jobs: list[Job]) -> None:
    """Without --save, and without an elastic run: torchrun starts the workers again on the same nodes."""
    flags = f"{COMMON} {MODEL} --peer-snapshot-interval 3"
    want = alone(tmp_path / "alone", f"{COMMON} {MODEL}", jobs, "pretrain_gpt")
    job = Job(tmp_path / "two", flags, 2, 2)
    jobs.append(job)
    job.start(2)
    for iteration, node in ((5, 0), (14, 1)):
        job.reach(iteration)
        job.kill_worker(node)
    assert job.finish() == [0, 0], job.said()
    require_equal(job, want)
    assert job.said().count("resumed from the memory of the nodes") >= 2
    assert not list(tmp_path.rglob("iter_*"))


@pytest.mark.slow
def test_a_node_that_becomes_spare_gives_what_it_has(tmp_path: Path, jobs: list[Job]) -> None:
    """Three nodes or one: of three that train one is killed, one trains on, and the other has a part of the state."""
    flags = f"{COMMON} {MODEL} {ELASTIC.format(least=1, most=3)} --replica-increment-step 2"
    want = alone(tmp_path / "alone", f"{COMMON} {MODEL}", jobs, "pretrain_gpt")
    job = Job(tmp_path / "spare", flags, 1, 3, step=0.8)
    jobs.append(job)
    job.start(3)
    job.until(lambda: "3 nodes" in job.now())
    job.reach(6)
    job.kill(2)
    job.until(lambda: "1 nodes" in job.now())
    job.reach(job.iteration + 2)
    job.start(1)
    job.reach(30)
    codes = job.finish()
    assert sorted(codes) == [-9, 0, 0, 0], job.said()
    require_equal(job, want)
    assert "spare, behind 1 processes" in job.said()
    assert job.said().count("resumed from the memory of the nodes") == 2, job.said()


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["", "--inprocess-restart"])
def test_spare_nodes_wait_and_take_over(inside: str, tmp_path: Path, jobs: list[Job]) -> None:
    flags = f"{COMMON} {MODEL} {ELASTIC.format(least=2, most=2)} {inside}"
    want = alone(tmp_path / "alone", f"{COMMON} {MODEL}", jobs, "pretrain_gpt")
    job = Job(tmp_path / "spare", flags, 2, 3, step=0.4)
    jobs.append(job)
    job.start(3)
    job.until(lambda: "spare, behind 2 processes" in job.said())
    job.reach(6)
    first = job.node_of("  2 nodes")
    if inside:  # a process alone is replaced on its node: the spare one goes on waiting
        os.kill(job.trainers(first)[0], signal.SIGKILL)
        job.until(lambda: "rank 0: restart 1 in process" in job.said())
        job.reach(job.iteration + 4)  # there is a copy
        assert job.said().count("spare, behind 2 processes") == 1
    job.kill(first)
    job.reach(30)
    codes = job.finish()
    assert sorted(codes) == [-9, 0, 0], job.said()
    require_equal(job, want)
    assert job.said().count("resumed from the memory of the nodes") == (2 if inside else 1), job.said()
