"""--inprocess-restart: a process is lost, the others stay, and the run is that of one process that nobody disturbed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from smp.config import ConfigError
from smp.config.parallel import ParallelConfig
from smp.training.inprocess.connections import bound_silence, open_connections
from smp.training.inprocess.keeper import AGENT_STORE, Keeper, keep
from smp.training.inprocess.link import FRUITLESS
from smp.training.inprocess.meeting import GaveUpError, Meeting, RunEndedError
from smp.training.inprocess.presence import GONE, WHERE, Presence, be_present
from smp.training.process import Process
from tests.checkpoint.plain_reader import read_checkpoint
from tests.training.cut_lab import CutJob
from tests.training.elastic_lab import Job
from tests.training.flag_runs import proves, run_here
from tests.training.preloaded import preloaded
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer

pytestmark = pytest.mark.timeout(600)
BOUND = 1e-6
LAST = 16
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 17 --init-method-std 0.2 --hidden-dropout 0.1 --global-batch-size 4 --micro-batch-size 1 "
    f"--log-interval 1 --no-tensorboard --no-progress-bar --log-dir logs --train-iters {LAST} --save ck"
)
SGD = "--optimizer sgd --lr 0.02"
"""Adam makes of a rounding in a tiny gradient what the bound is for: with it runs of one layout are compared."""
INSIDE = "--inprocess-restart --peer-snapshot-interval 1 --distributed-timeout-minutes 2"


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


def started(folder: Path, flags: str, jobs: list[Job], each: int = 2) -> Job:
    job = Job(folder, f"{FLAGS} {INSIDE} {flags}", 1, 1, step=0.3, each=each)
    jobs.append(job)
    job.start()
    job.until(lambda: job.iteration > 1)
    return job


def lose(job: Job, *ranks: int, by: signal.Signals = signal.SIGKILL) -> None:
    """The processes that train go, and a new step is done."""
    trainers, before = job.trainers(0), job.iteration
    for rank in ranks:
        os.kill(trainers[rank], by)
    job.until(lambda: job.iteration > before + 1)


def require_equal(job: Job, losses: list[float], folder: Path, bound: float) -> None:
    """Losses of all steps, and all of the last state, moments included, with those of another run."""
    got = job.losses()
    assert sorted(got) == list(range(1, LAST + 1)), job.said()
    np.testing.assert_allclose([got[i] for i in sorted(got)], losses, rtol=bound)
    state, want = (read_checkpoint(path / f"ck/iter_{LAST:07d}")[0] for path in (job.folder, folder))
    assert state.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(state[name], value, rtol=bound, atol=bound * np.abs(value).max(), err_msg=name)


def require_same_bits(job: Job, jobs: list[Job]) -> None:
    """As the same processes give that nobody disturbs."""
    quiet = Job(job.folder.parent / "quiet", FLAGS, 1, 1, step=0, each=2)
    jobs.append(quiet)
    quiet.start()
    assert quiet.finish() == [0], quiet.said()
    losses = quiet.losses()
    require_equal(job, [losses[i] for i in sorted(losses)], quiet.folder, 0.0)


@pytest.mark.usefixtures("forked")
@proves("inprocess_restart")
def test_a_lost_process_is_replaced_and_the_others_stay(tmp_path: Path, jobs: list[Job]) -> None:
    alone = run_here(tmp_path / "alone", f"{FLAGS} {SGD}", base="")
    job = started(tmp_path / "job", SGD, jobs)
    keepers, before = job.workers(0), job.trainers(0)
    lose(job, 1)
    after = job.trainers(0)
    assert job.workers(0) == keepers and after[0] == before[0] and after[1] != before[1]
    assert "rank 0: another process is lost" in job.said() and "restart 1 in process: after the loss" in job.said()
    assert job.finish() == [0], job.said()
    assert job.said().count("resumed from the memory of the nodes") == 1
    require_equal(job, alone.losses, alone.folder, BOUND)


@pytest.mark.slow
@proves("inprocess_max_iterations")
def test_behind_the_last_restart_in_process_torchrun_starts_all(tmp_path: Path, jobs: list[Job]) -> None:
    job = started(tmp_path / "job", "--inprocess-max-iterations 1", jobs)
    keepers = job.workers(0)
    lose(job, 1)
    lose(job, 0)
    assert "no in-process restart: --inprocess-max-iterations 1 reached" in job.said()
    assert not set(job.workers(0)) & set(keepers)
    assert job.finish() == [0], job.said()
    assert job.said().count("resumed from the memory of the nodes") == 2
    require_same_bits(job, jobs)


@pytest.mark.slow
@proves("inprocess_heartbeat_timeout", "inprocess_barrier_timeout")
def test_a_process_that_is_stopped_is_replaced_and_nobody_waits_for_ever(tmp_path: Path, jobs: list[Job]) -> None:
    # The keeper that is stopped would be killed after the heartbeat's timeout: the barrier's is to be the shorter one.
    flags = "--cpu-collectives gloo --inprocess-heartbeat-timeout 60 --inprocess-barrier-timeout 40"
    job = started(tmp_path / "job", flags, jobs)
    lose(job, 0, by=signal.SIGSTOP)
    assert re.search(r"rank 0: no sign of life for \d+ s", job.said()) and "restart 1 in process" in job.said()
    lose(job, 0, 1)
    assert "restart 2 in process" in job.said()
    os.kill(job.workers(0)[1], signal.SIGSTOP)  # nobody puts another process in the place of the one that is lost
    lose(job, 1)
    assert "no in-process restart: 1 of 2 processes came within 40 s" in job.said()
    assert job.finish() == [0], job.said()
    require_same_bits(job, jobs)


EXPERTS = "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
LAYOUTS = {
    "PP 2": ("", "--pipeline-model-parallel-size 2", 2, (1,)),
    "PP 3, the middle stage": ("--num-layers 3", "--pipeline-model-parallel-size 3", 3, (1,)),
    "PP 4, both stages in the middle": ("--num-layers 4", "--pipeline-model-parallel-size 4", 4, (1, 2)),
    "TP 2": ("", "--tensor-model-parallel-size 2", 2, (1,)),
    "CP 2": ("--seq-length 16", "--context-parallel-size 2", 2, (1,)),
    "experts, EP 2": (EXPERTS, "--expert-model-parallel-size 2", 2, (1,)),
}
"""Settings of the model, of the layout, processes, and which of them are lost."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_go_on(name: str, tmp_path: Path, jobs: list[Job]) -> None:
    model, layout, processes, lost = LAYOUTS[name]
    alone = run_here(tmp_path / "alone", f"{FLAGS} {SGD} {model}", base="")
    job = started(tmp_path / "job", f"{SGD} {model} {layout}", jobs, each=processes)
    keepers, before = job.workers(0), job.trainers(0)
    lose(job, *lost)
    after = job.trainers(0)
    assert job.workers(0) == keepers
    assert [rank for rank in range(processes) if after[rank] != before[rank]] == list(lost)
    assert job.finish() == [0], job.said()
    assert "rank 0: restart 1 in process: after the loss" in job.said()
    require_equal(job, alone.losses, alone.folder, BOUND)


@pytest.mark.slow
def test_packed_fine_tuning_goes_on(tmp_path: Path, jobs: list[Job]) -> None:
    write_model(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    write_samples(tmp_path / "m", count=30)
    flags = (
        f"--load {tmp_path}/m --seq-length 48 --data-path {tmp_path}/m/sft.jsonl --global-batch-size 4 "
        f"--micro-batch-size 1 {SGD} --log-interval 1 --no-tensorboard --no-progress-bar --log-dir logs "
        f"--train-iters {LAST} --save ck"
    )
    quiet = Job(tmp_path / "quiet", flags, 1, 1, entry="finetune", step=0)
    jobs.append(quiet)
    quiet.start()
    assert quiet.finish() == [0], quiet.said()
    job = Job(tmp_path / "job", f"{flags} {INSIDE}", 1, 1, entry="finetune", step=0.3, each=2)
    jobs.append(job)
    job.start()
    job.until(lambda: job.iteration > 1)
    lose(job, 1)
    assert job.finish() == [0], job.said()
    losses = quiet.losses()
    require_equal(job, [losses[i] for i in sorted(losses)], quiet.folder, BOUND)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_the_link_of_the_node_with_the_store_is_cut(tmp_path: Path, jobs: list[Job]) -> None:
    settings = "--max-nodes 2 --load auto --inprocess-heartbeat-timeout 8 --distributed-timeout-minutes 0.4"
    job = CutJob(tmp_path / "job", f"{FLAGS} {SGD} {INSIDE} {settings}", 1, 2)
    jobs.append(job)
    with preloaded(tmp_path):
        job.start(2)
        job.until(lambda: "2 nodes" in job.now() and job.iteration > 2)
        lost = job.node_of("  2 nodes")  # with rank 0, whose keeper keeps the store
        CutJob._ip("-n", job.switch, "link", "set", f"port{job.space[lost]}", "down")
        job.nodes[1 - lost].wait(400)
    assert job.nodes[1 - lost].returncode == 0, job.said()
    assert "no answer from the store of this start" not in job.said()
    alone = run_here(tmp_path / "alone", f"{FLAGS} {SGD}", base="")
    require_equal(job, alone.losses, alone.folder, BOUND)


@pytest.fixture
def meetings() -> Iterator[Callable[[int], list[Meeting]]]:
    """Those of so many ranks. They are closed: each has a thread that ends its process where a run is not left."""
    made: list[Meeting] = []

    def of_ranks(size: int) -> list[Meeting]:
        store, settings = dist.HashStore(), ParallelConfig(inprocess_barrier_timeout=5.0)
        made.extend(Meeting(store, settings, rank, size) for rank in range(size))
        return made

    yield of_ranks
    for meeting in made:
        meeting.close()


def test_a_generation_is_lost_once_whoever_says_so(meetings: Callable[[int], list[Meeting]]) -> None:
    first, second = meetings(2)
    other = threading.Thread(target=second.meet)
    other.start()
    assert first.meet() == 0
    other.join()
    first.lose()
    second.lose()
    assert first.current() == 1 and second.broken
    # In its place comes another, which had not come to the next one.
    other = threading.Thread(target=second.meet, args=(True,))
    other.start()
    assert first.meet() == 1
    other.join()
    assert second.number == 1 and not first.broken
    second.end(3)
    first.lose()
    with pytest.raises(RunEndedError, match="exit code 3"):
        first.meet()


def test_a_run_that_comes_no_further_is_given_up(meetings: Callable[[int], list[Meeting]]) -> None:
    (alone,) = meetings(1)
    for number in range(FRUITLESS):
        assert alone.meet() == number
        alone.began(7)
        alone.lose()
    with pytest.raises(GaveUpError, match="5 times in a row no further than iteration 7"):
        alone.meet()


def test_a_meeting_that_is_closed_cuts_nothing_and_its_thread_ends(meetings: Callable[[int], list[Meeting]]) -> None:
    (alone,) = meetings(1)
    alone.meet()
    watching = next(one for one in threading.enumerate() if one.name == "meeting")
    alone.close()
    alone.lose()
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Not one of Python's, which are spared anyway.
        client = socket.create_connection(server.getsockname()).detach()
        other, _ = server.accept()
        watching.join()
        alone.let_go()
        os.write(client, b"x")
        assert other.recv(1) == b"x"
        other.close()
        os.close(client)


def test_the_others_hear_of_a_keeper_that_is_gone() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Presence(store, 8.0)
    where = store.get(WHERE).decode()
    meeting = Meeting(dist.PrefixStore("smp/inprocess", store), ParallelConfig(inprocess_barrier_timeout=60.0), 0, 2)
    stranger = be_present("127.0.0.1", f"{where.split()[0]} 7", 5, 8.0)
    keepers = [be_present("127.0.0.1", where, rank, 8.0) for rank in (1, 2)]
    assert stranger is not None and None not in keepers
    stranger.close()
    keepers[0].close()  # type: ignore[union-attr]
    with pytest.raises(GaveUpError, match="the keeper of rank 1 is gone"):
        meeting.meet()
    meeting.close()
    assert store.get(GONE) == b"1"


def test_a_connection_to_a_store_ends_where_its_machine_is_silent() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = open_connections()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    assert bound_silence(before, 8.0) >= 1
    bounded = 0
    for name, descriptor in open_connections().items():
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if name not in before and one.getpeername()[1] == server.port:
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                bounded += 1
    assert bounded == 1
    assert bound_silence(before, 1e9) >= 1  # of a run that is looked at with a debugger
    client.set("still", "there")
    assert server.get("still") == b"there"


@pytest.fixture
def keeper_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Keeper]]:
    """A keeper whose workers are these lines of Python."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def of_lines(lines: str) -> Keeper:
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", lines])
        return Keeper(ParallelConfig(), Process(0, 1, 0))

    yield of_lines
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_keeper_that_is_stopped_is_killed() -> None:
    lines = "Keeper(ParallelConfig(inprocess_heartbeat_timeout=3.0), Process(5, 6, 0)).run()"
    program = (
        "import sys; from smp.config.parallel import ParallelConfig; from smp.training.process import Process; "
        "from smp.training.inprocess.keeper import Keeper; assert 'torch' not in sys.modules; "
        "sys.orig_argv = [sys.executable, '-S', '-c', 'import time; print(1, flush=True); time.sleep(20)']; "
    )
    words = [sys.executable, "-c", program + lines]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == "1\n"
        keeper.send_signal(signal.SIGSTOP)
        assert keeper.wait(60) == -signal.SIGKILL
        assert keeper.stderr is not None
        assert keeper.stderr.readline().startswith("rank 5's keeper: no sign of life for ")


IMPORTS = """
import os, time
from smp.training.inprocess.link import Link
link = Link.of_environment()
{more}
os.kill(os.getpid(), 19)
time.sleep(100)
"""


@pytest.mark.parametrize("more", ["", "link.wait()"])
def test_an_import_may_hold_the_interpreter_for_longer_than_training_may(
    more: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a large library on a slow disk does. A worker that trains is killed after the heartbeat's timeout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", IMPORTS.format(more=f"time.sleep(2); {more or 0}")])
    settings = ParallelConfig(inprocess_heartbeat_timeout=3.0, distributed_timeout_minutes=0.2)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    keeper = Keeper(settings, Process(0, 1, 0))
    try:
        keeper._active.begin(b"1")
        assert keeper._watch() == -signal.SIGKILL
        silent = re.search(r"no sign of life for (\d+) s", capfd.readouterr().err)
        assert silent is not None and (int(silent[1]) < 12) == bool(more)
    finally:
        keeper._active.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_workers_that_never_train_are_replaced_so_many_times(
    keeper_of: Callable[[str], Keeper], capfd: pytest.CaptureFixture[str]
) -> None:
    assert keeper_of("import os; os.kill(os.getpid(), 9)").run() == 1
    said = capfd.readouterr().err
    assert said.count("a standby process replaces it") == FRUITLESS
    assert f"{FRUITLESS + 1} processes in a row were lost before they trained" in said


def test_an_end_that_is_asked_for_while_a_worker_is_replaced(keeper_of: Callable[[str], Keeper]) -> None:
    keeper = keeper_of("import time; time.sleep(300)")
    keeper._stop(signal.SIGTERM, None)
    keeper._replace("was lost")
    assert keeper._active.process.wait() == -signal.SIGTERM
    keeper._active.end()


def test_a_store_that_the_next_start_would_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv(AGENT_STORE, "True")
    with pytest.raises(ConfigError, match="--inprocess-restart needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        keep(ParallelConfig(inprocess_restart=True), Process(0, 2, 0))
