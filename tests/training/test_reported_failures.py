"""What users of torchelastic, torchft, Megatron, Megatron-Bridge, TorchTitan, verl and others have reported of runs
that are to survive failures, rebuilt here. Each ends with the losses and weights of one process that nobody disturbed,
within 1e-6. Names of reports: repository#number on GitHub."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.elastic_lab import Job, children_of
from tests.training.preloaded import MODULES, forked_of, preloaded
from tests.training.test_inprocess_runs import COMMON, INSIDE, MODEL, alone, entry_of, require_equal, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ELASTIC = "--load auto --peer-snapshot-interval 1 --distributed-timeout-minutes 1"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    made: list[Job] = []
    with preloaded(tmp_path, f"{MODULES} smp.training.tuning"):
        yield made
        for job in made:
            job.close()


def started(folder: Path, flags: str, nodes: int, jobs: list[Job], *, least: int = 1, each: int = 1) -> Job:
    """A job that trains on its nodes."""
    job = Job(folder, f"{COMMON} {flags}", least, nodes, entry=entry_of(flags), step=0.5, each=each)
    jobs.append(job)
    job.start(nodes)
    job.until(lambda: job.iteration >= 2)
    return job


def patched(job: Job, lines: str) -> None:
    """Lines that the processes which train run first."""
    path = job.folder / "program.py"
    begin, entry, end = path.read_text().partition("import pretrain_gpt")
    path.write_text(f"{begin}{lines}{entry}{end}")


@pytest.mark.parametrize("spare", [False, True])
def test_a_node_is_ended_by_ctrl_c(spare: bool, tmp_path: Path, jobs: list[Job]) -> None:
    """pytorch#67742, #91943: the others ended as well; #114097: and did not take a redundant host in its place."""
    want = alone(tmp_path / "alone", MODEL, jobs)
    most = 2 if spare else 3
    job = started(tmp_path / "job", f"{MODEL} {ELASTIC} --min-nodes 2 --max-nodes {most}", 3, jobs, least=2)
    job.until(lambda: f"{most} nodes" in job.now())
    gone = job.node_of(f"  {most} nodes")
    job.nodes[gone].send_signal(signal.SIGINT)
    codes = [node.wait(240) for node in job.nodes]
    assert [code for node, code in enumerate(codes) if node != gone] == [0, 0], job.said()
    assert "resumed from the memory of the nodes" in job.said()
    require_equal(job, want)


def test_a_node_comes_back_before_anybody_has_missed_it(tmp_path: Path, jobs: list[Job]) -> None:
    """pytorch#147064, #111646: the one that stays hangs, or restarts without an end."""
    want = alone(tmp_path / "alone", MODEL, jobs)
    job = started(tmp_path / "job", f"{MODEL} {ELASTIC} --max-nodes 2", 2, jobs)
    job.until(lambda: "2 nodes" in job.now())
    job.kill(1)
    job.start(1)
    codes = job.finish()
    assert [codes[0], codes[2]] == [0, 0], job.said()
    require_equal(job, want)


def test_a_node_is_asked_to_leave_while_it_starts(tmp_path: Path, jobs: list[Job]) -> None:
    """goodfire-ai/spd#677: a signal during warm-up is missed. Here the others train on."""
    want = alone(tmp_path / "alone", MODEL, jobs)
    job = started(tmp_path / "job", f"{MODEL} {ELASTIC} --max-nodes 3", 2, jobs)
    job.range = "1:3"
    job.start(1)
    time.sleep(1)
    job.leave(2)
    codes = job.finish()
    assert codes[:2] == [0, 0], job.said()
    require_equal(job, want)


def test_a_signal_at_the_end_of_an_epoch_skips_none(tmp_path: Path, jobs: list[Job]) -> None:
    """verl#7401: the run that goes on skips the next epoch, and ends with 0."""
    tuning, folder, _ = write_inputs(tmp_path / "m")
    flags = f"{tuning} --data-path {folder}/dpo.jsonl --objective dpo --lora-rank 4 --train-iters none --train-epochs 2"
    want = alone(tmp_path / "alone", flags, jobs)
    steps = len(want.losses())
    job = Job(
        tmp_path / "job", f"{COMMON} {flags} --max-nodes 1 --peer-snapshot-interval 1", 1, 1, entry="finetune", each=2
    )
    jobs.append(job)
    path = job.folder / "program.py"
    begin, entry, end = path.read_text().partition("import finetune")
    signalled = f"""
import signal
from smp.training.trainer import Trainer
inner = Trainer.start_step
def outer(self, *args):
    if self.progress.iteration == {steps // 2 - 1}:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(self, *args)
Trainer.start_step = outer
"""
    path.write_text(f"{begin}{signalled}{entry}{end}")
    job.start()
    assert job.finish() == [0], job.said()
    assert f"resumed from the memory of the nodes at iteration {steps // 2}" in job.said()
    assert job.losses() == pytest.approx(want.losses(), rel=1e-6)


def test_the_loader_is_where_the_others_are(tmp_path: Path, jobs: list[Job]) -> None:
    """torchft#309, torchtitan#4686: the loader of the one that comes back is a batch behind, or ahead."""
    tuning, folder, _ = write_inputs(tmp_path / "m")
    flags = f"{tuning} --data-path {folder}/sft.jsonl --train-iters none --train-epochs 4"
    want = alone(tmp_path / "alone", flags, jobs)
    job = started(tmp_path / "job", f"{flags} {INSIDE}", 1, jobs, each=2)
    for rank in (1, 0):
        before = job.iteration
        os.kill(job.trainers(0)[rank], signal.SIGKILL)
        job.until(lambda before=before: job.iteration > before + 1)  # type: ignore[misc]
    assert job.finish() == [0], job.said()
    assert job.losses() == pytest.approx(want.losses(), rel=1e-6)


def test_a_save_in_the_background_is_cut_off(tmp_path: Path, jobs: list[Job]) -> None:
    """Megatron-Bridge#4839, #5117: the first save behind a restart in process broke, or counted too soon."""
    want = alone(tmp_path / "alone", f"{MODEL} --save-interval 3", jobs)
    job = Job(tmp_path / "job", f"{COMMON} {INSIDE} {MODEL} --save-interval 3 --async-save", 1, 1, step=0.5, each=2)
    jobs.append(job)
    patched(
        job,
        """
if "SMP_KEEPER" in os.environ and os.environ["RANK"] == "1":
    import signal
    from pathlib import Path
    from smp.training.checkpoints.saving import RunCheckpoints
    inner = RunCheckpoints.save
    def outer(self, *args, **more):
        inner(self, *args, **more)
        if not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    RunCheckpoints.save = outer
""",
    )
    job.start()
    assert job.finish() == [0], job.said()
    assert "restart 1 in process" in job.said()
    assert sorted(path.name for path in (job.folder / "ck").glob("iter_*")) == [f"iter_{i:07d}" for i in (3, 6, 9, 12)]
    require_equal(job, want)


def test_a_save_takes_longer_than_the_heartbeat_may(tmp_path: Path, jobs: list[Job]) -> None:
    """FlagScale#1267: who writes a checkpoint for long is taken for dead."""
    want = alone(tmp_path / "alone", MODEL, jobs)
    flags = f"{COMMON} {INSIDE} {MODEL} --save-interval 6 --inprocess-heartbeat-timeout 3"
    job = Job(tmp_path / "job", flags, 1, 1, step=0.1, each=2)
    jobs.append(job)
    patched(
        job,
        """
if "SMP_KEEPER" in os.environ and os.environ["RANK"] == "1":
    from smp.training.checkpoints.saving import RunCheckpoints
    inner = RunCheckpoints._write
    def outer(self, *args, **more):
        time.sleep(9)
        return inner(self, *args, **more)
    RunCheckpoints._write = outer
""",
    )
    job.start()
    assert job.finish() == [0], job.said()
    assert "no sign of life" not in job.said() and "in process" not in job.said()
    require_equal(job, want)


def test_memory_of_lost_runs_is_given_back(tmp_path: Path, jobs: list[Job]) -> None:
    """Megatron-LM#2774: each restart in process keeps the memory of the run before."""
    job = Job(tmp_path / "job", f"{COMMON} {INSIDE} {MODEL} --train-iters 100000", 1, 1, step=0.05, each=2)
    jobs.append(job)
    job.start()
    job.until(lambda: job.iteration >= 2)
    (keeper, _), used = job.workers(0), list[int]()
    trainer = children_of(forked_of(keeper))[0]
    for number in range(9):
        before = job.iteration
        os.kill(job.trainers(0)[1], signal.SIGKILL)
        job.until(lambda before=before: job.iteration > before + 2)  # type: ignore[misc]
        assert f"rank 0: restart {number + 1} in process" in job.said()
        lines = Path(f"/proc/{forked_of(trainer)}/status").read_text().splitlines()
        used.append(int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))))
    print("kB of memory after each restart:", used)
    assert used[-1] - used[2] < 6 * 2000, used  # less than 2 MB each; the model's Python objects alone are more


def test_the_rendezvous_is_lost_and_nobody_waits_for_it(tmp_path: Path, jobs: list[Job]) -> None:
    """kubeflow/trainer#1638, dlrover#450, pytorch#168242: pods that are left hang, or fail again and again."""
    want = alone(tmp_path / "alone", MODEL, jobs)
    flags = f"{MODEL} {ELASTIC} --max-nodes 2 --save-interval 2"
    first = started(tmp_path / "job", flags, 2, jobs)
    first.reach(5)
    del first.store
    codes = first.finish(200)
    assert 0 not in codes, first.said()
    second = Job(tmp_path / "job", f"{COMMON} {flags}", 1, 2, step=0)
    jobs.append(second)
    second.start(2)
    assert second.finish() == [0, 0], second.said()
    require_equal(first, want)


def test_memory_of_copies_is_free_behind_a_launcher_that_is_killed(tmp_path: Path, jobs: list[Job]) -> None:
    """llm-d#364: what a crash leaves in /dev/shm lets the next starts fail."""
    memory = tmp_path / "memory"
    flags = f"{MODEL} --peer-snapshot-interval 1 --peer-snapshot-dir {memory}"
    job = started(tmp_path / "job", flags, 1, jobs, each=2)
    job.reach(4)
    assert list(memory.glob("smp-copies-*/*/iter_*"))
    job.kill(0)
    deadline = time.monotonic() + 60
    while list(memory.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_copy_that_has_changed_in_memory(tmp_path: Path, jobs: list[Job]) -> None:
    """Megatron-LM#5281: it is trusted, gives NaN three steps later, and all starts again with it."""
    want = alone(tmp_path / "alone", MODEL, jobs)
    job = Job(tmp_path / "job", f"{COMMON} {MODEL} {ELASTIC} --max-nodes 2", 2, 2, step=0.5)
    jobs.append(job)
    lines = """
from pathlib import Path
from smp.checkpoint.peers import PeerCopies
inner = PeerCopies.find
def outer(self):
    first = os.environ["RANK"] == "0" and not Path("struck").exists()
    for path in list(self.root.glob("iter_*/shard_00000.safetensors")) if first else ():
        Path("struck").touch()
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
    return inner(self)
PeerCopies.find = outer
"""
    patched(job, lines)
    job.start(2)
    job.reach(5)
    job.kill_worker(1)
    assert job.finish() == [0, 0], job.said()
    assert (job.folder / "struck").exists()
    assert "WARNING: the copy in memory cannot be read: " in job.said()
    assert "resumed from the memory of the nodes at iteration" in job.said()
    require_equal(job, want)
