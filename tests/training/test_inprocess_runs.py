"""--inprocess-restart: what is lost when, and kinds of runs. Each is one process that nobody disturbed, within 1e-6."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.plain_reader import read_checkpoint
from tests.training import rl_lab
from tests.training.cut_lab import CutJob
from tests.training.elastic_lab import Job
from tests.training.preloaded import MODULES, preloaded
from tests.training.tiny_hf import write_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BOUND = 1e-6
LAST = 12
COMMON = (
    "--optimizer sgd --lr 0.02 --log-interval 1 --no-tensorboard --no-progress-bar --log-dir logs "
    f"--train-iters {LAST} --save ck"
)
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 17 --init-method-std 0.2 --hidden-dropout 0.1 --global-batch-size 4 --micro-batch-size 1"
)
INSIDE = "--inprocess-restart --peer-snapshot-interval 1 --distributed-timeout-minutes 2"
STRIKE = """
if "SMP_KEEPER" in os.environ:
    import signal
    from pathlib import Path
    import {module} as module
    of = {of}
    inner = of.{name}
    def outer(*args, **more):
        if os.environ["RANK"] == "{rank}" and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **more)
    of.{name} = outer
"""
"""Lines of a program: the first process of a rank that comes to a function is killed there."""


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


def entry_of(flags: str) -> str:
    return "finetune" if "--data-path" in flags else "pretrain_gpt"


def alone(folder: Path, flags: str, jobs: list[Job]) -> Job:
    """One process."""
    job = Job(folder, f"{COMMON} {flags}", 1, 1, entry=entry_of(flags), step=0)
    jobs.append(job)
    job.start()
    assert job.finish() == [0], job.said()
    return job


def validation(job: Job) -> dict[int, float]:
    """Losses on validation data by the iteration after which they were measured."""
    records = map(json.loads, (job.folder / "logs/metrics.jsonl").read_text().splitlines())
    return {record["iteration"]: record["validation loss"] for record in records if "validation loss" in record}


def require_equal(job: Job, want: Job) -> None:
    """All that is logged of each step, and the last state."""
    got, expected = job.records(), want.records()
    assert sorted(got) == sorted(expected) == list(range(1, LAST + 1)), job.said()
    for name in ("lm loss", "grad norm"):
        np.testing.assert_allclose([got[i][name] for i in got], [expected[i][name] for i in got], rtol=BOUND)
    assert validation(job) == pytest.approx(validation(want), rel=BOUND)
    state, whole = (read_checkpoint(each.folder / f"ck/iter_{LAST:07d}")[0] for each in (job, want))
    assert state.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(state[name], value, rtol=BOUND, atol=BOUND * np.abs(value).max(), err_msg=name)


MOMENTS = {
    "evaluation": (f"{MODEL} --eval-interval 4 --eval-iters 3", "smp.training.trainer", "Trainer.evaluate", 1),
    "first step": (MODEL, "smp.training.trainer", "Trainer.start_step", 1),
    "first copy": (MODEL, "smp.checkpoint.peers", "PeerCopies._write_part", 0),
    "last save": (MODEL, "smp.training.checkpoints.saving", "RunCheckpoints.finish", 1),
    "export": (f"{MODEL} --save-hf", "smp.training.launch", "export_hugging_face", 0),
}
"""Settings, where the process of a rank is killed for the first time that it comes there, and which rank."""


@pytest.mark.parametrize("name", MOMENTS)
def test_a_process_is_lost_in(name: str, tmp_path: Path, jobs: list[Job]) -> None:
    flags, module, function, rank = MOMENTS[name]
    of, _, last = f"module.{function}".rpartition(".")
    with preloaded(tmp_path):
        want = alone(tmp_path / "alone", flags, jobs)
        job = Job(tmp_path / "job", f"{COMMON} {INSIDE} {flags}", 1, 1, step=0.3, each=2)
        jobs.append(job)
        program = (job.folder / "program.py").read_text()
        strike = STRIKE.format(module=module, of=of, name=last, rank=rank)
        (job.folder / "program.py").write_text(
            program.replace("\nimport pretrain_gpt", f"{strike}\nimport pretrain_gpt")
        )
        job.start()
        assert job.finish() == [0], job.said()
    assert (job.folder / "struck").exists()
    assert "its process was ended by SIGKILL: a standby process replaces it" in job.said()
    assert "processes came within" not in job.said()
    require_equal(job, want)
    assert (job.folder / "ck/hf_model").exists() == ("--save-hf" in flags)
    for path in (want.folder / "ck").glob("hf_model/*.safetensors"):
        exported = load_file(job.folder / "ck/hf_model" / path.name)
        for key, value in load_file(path).items():
            np.testing.assert_allclose(exported[key], value, rtol=BOUND, atol=BOUND * np.abs(value).max(), err_msg=key)


KINDS = {
    "replicas of hybrid sharding": (f"{MODEL}", "--hybrid-shard-degree 2", 4),
    "compiled": (f"{MODEL} --compile", "", 2),
    "FP8": (f"{MODEL} --fp8-format hybrid --fp8-recipe delayed --fp8-emulate --fp8-amax-history-len 4", "", 2),
    "DPO, LoRA": ("{0} --data-path {1}/dpo.jsonl --objective dpo --lora-rank 4", "", 2),
    "GRPO": ("{0} --objective grpo --steps-per-generation 2 --num-iterations 2 --beta 0.05 {2}", "", 2),
}
"""Settings of one process, those of the layout, and processes."""


def write_inputs(folder: Path) -> tuple[str, str, str]:
    """A model with samples; returns words that a kind's settings need."""
    folder.mkdir()
    rl_lab.write_inputs(folder)
    write_samples(folder, count=30)
    tuning = f"--load {folder} --seq-length 48 --global-batch-size 4 --micro-batch-size 1"
    data = (
        f"--data-path {folder}/prompts.jsonl --reward-funcs {folder}/rewards.py:vowels {folder}/rewards.py:short "
        "--num-generations 4 --max-completion-length 9 --generation-batch-size 5 --micro-batch-size 2 "
        "--global-batch-size 8"
    )
    return tuning, str(folder), data


@pytest.mark.parametrize("name", KINDS)
def test_a_process_is_lost_of(name: str, tmp_path: Path, jobs: list[Job]) -> None:
    flags, layout, processes = KINDS[name]
    flags = flags.format(*write_inputs(tmp_path / "m"))
    modules = f"{MODULES} smp.training.tuning" if entry_of(flags) == "finetune" else MODULES
    with preloaded(tmp_path, modules):
        want = alone(tmp_path / "alone", flags, jobs)
        words = f"{COMMON} {INSIDE} {flags} {layout}"
        job = Job(tmp_path / "job", words, 1, 1, entry=entry_of(flags), step=0.5, each=processes)
        jobs.append(job)
        job.start()
        job.reach(4)
        os.kill(job.trainers(0)[1], 9)
        assert job.finish() == [0], job.said()
    assert "rank 0: restart 1 in process: after the loss" in job.said()
    assert "resumed from the memory of the nodes" in job.said()
    require_equal(job, want)


@pytest.mark.parametrize("which", ["with the store", "without it"])
def test_a_node_is_lost_and_no_other_comes(which: str, tmp_path: Path, jobs: list[Job]) -> None:
    with preloaded(tmp_path):
        want = alone(tmp_path / "alone", MODEL, jobs)
        job = Job(tmp_path / "job", f"{COMMON} {INSIDE} {MODEL} --max-nodes 2 --load auto", 1, 2, step=0.3)
        jobs.append(job)
        job.start(2)
        job.until(lambda: "2 nodes" in job.now() and job.iteration > 2)
        first = job.node_of("  2 nodes")
        lost = first if which == "with the store" else 1 - first
        job.kill(lost)
        job.nodes[1 - lost].wait(240)
    assert job.nodes[1 - lost].returncode == 0, job.said()
    assert "resumed from the memory of the nodes" in job.said()
    assert "processes came within" not in job.said()  # nobody waits for who cannot come
    require_equal(job, want)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_two_links_are_cut_one_after_the_other(tmp_path: Path, jobs: list[Job]) -> None:
    """First of the node with the store, of three; then of the one that keeps it next."""
    settings = "--max-nodes 3 --load auto --inprocess-heartbeat-timeout 8 --distributed-timeout-minutes 0.4"
    with preloaded(tmp_path):
        want = alone(tmp_path / "alone", MODEL, jobs)
        job = CutJob(tmp_path / "job", f"{COMMON} {INSIDE} {MODEL} {settings}", 1, 3)
        job.step = 0.6
        jobs.append(job)
        job.start(3)
        left = {0, 1, 2}
        for there in (3, 2):
            job.until(lambda n=there: f"{n} nodes" in job.now())
            job.reach(job.iteration + 2)
            lost = job.node_of(f"  {there} nodes")
            CutJob._ip("-n", job.switch, "link", "set", f"port{job.space[lost]}", "down")
            left.remove(lost)
        (last,) = left
        job.nodes[last].wait(400)
    assert job.nodes[last].returncode == 0, job.said()
    require_equal(job, want)
