"""The process that keeps torch's store stops while a run starts. Its clients wait for answers without a time limit, so
the ranks end themselves, each with a line that names the place. Only for that: a suspended process goes on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from smp.config import Config, Layout, LoggingConfig, ParallelConfig
from smp.parallel.network.topology import Topology
from smp.pipeline.failure import LOST
from smp.training import build, launch, runtime
from smp.training import run as run_module
from smp.training.build import RunSetup
from smp.training.errors import TrainingError
from smp.training.process import Process
from smp.training.run import Outcome, Run
from smp.training.runtime import Watchdog
from tests.distributed import forkserver
from tests.programs import run_program
from tests.training.flag_runs import TINY, clean_process

STORE = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
STOPS = """
import os, signal, sys
import pretrain_gpt
import torch
from smp.parallel import context
from smp.parallel.network.topology import Topology
from smp.training import pipelined, run, runtime
from torch.distributed import distributed_c10d

owner, name = {
    "rendezvous": (torch.distributed, "rendezvous"),
    "start": (distributed_c10d, "_new_process_group_helper"),
    "groups": (context, "_make_group"),
    "links": (pipelined, "Links"),
}[os.environ["MOMENT"]]
function = getattr(owner, name)

def stopping(*args, **options):
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # until all ranks have come so far
    os.kill(int(os.environ["STORE"]), signal.SIGSTOP)
    return function(*args, **options)

setattr(owner, name, stopping)
runtime.GRACE = 0.5
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""
REFUSES = """
import os, signal, sys
import pretrain_gpt
import torch
from smp.config import ConfigError
from smp.training import run

def refuse(*_):
    os.kill(int(os.environ["STORE"]), signal.SIGSTOP)
    raise ConfigError("--log-dir is in use")

def together(*args, function=run.on_rank_zero):
    torch.distributed.barrier()  # until both have their groups
    return function(*args)

run.refuse_log_dir_in_use, run.on_rank_zero = refuse, together
code = pretrain_gpt.main(sys.argv[1:])
print("returned to Python on rank", os.environ["RANK"], flush=True)
sys.exit(code)
"""
FLAGS = f"{TINY} --train-iters 1 --distributed-timeout-minutes 0.05 --status-file why.json"
# what starts to make groups, the function that each line names, flags
PLACES = {
    "rendezvous": ("start_process_group", ""),
    "start": ("start_process_group", ""),
    "groups": ("_make_group", ""),
    "links": (r"Links\.__init__", "--pipeline-model-parallel-size 2 --global-batch-size 4"),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a store in a process of its own, whose number is STORE in the environment."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        monkeypatch.setenv("STORE", str(keeper.pid))
        yield int(keeper.stdout.readline())
        keeper.kill()


@pytest.mark.parametrize("moment", [pytest.param(m, marks=[] if m == "groups" else pytest.mark.slow) for m in PLACES])
def test_all_ranks_end_themselves(moment: str, store: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, flags = PLACES[moment]
    monkeypatch.setenv("MOMENT", moment)
    (tmp_path / "stops.py").write_text(STOPS)
    words = [*FLAGS.split(), *flags.split()]
    done = run_program(tmp_path / "stops.py", words, tmp_path, processes=2, port=store, grace=60.0)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert len(lines) == 2, done.stderr
    for rank, line in enumerate(lines):
        why = rf"{function} failed: no answer and no error for (\d+) s, so this process ends; {LOST}"
        found = re.fullmatch(rf"error: rank {rank}: rank {rank} on \S+: {why}", line)
        assert found is not None, line
        # A timeout of three seconds; a rendezvous waits twice.
        assert int(found[1]) >= (7 if moment == "rendezvous" else 4), line
    status = json.loads((tmp_path / "why.json").read_text())
    assert status["status"] == "failed" and any(line.endswith(status["reason"]) for line in lines)


def test_an_error_is_said_and_the_ranks_end_while_the_store_does_not_answer(store: int, tmp_path: Path) -> None:
    """Rank 1 cannot ask what rank 0 says. Its watchdog still watches, though there is no run."""
    (tmp_path / "refuses.py").write_text(REFUSES)
    done = run_program(tmp_path / "refuses.py", FLAGS.split(), tmp_path, processes=2, port=store, grace=60.0)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert lines == ["error: --log-dir is in use", "error: rank 1: --log-dir is in use"], done.stderr
    assert "rank 1 of 2 has made no progress for 3 s" in done.stderr and "in report_once" in done.stderr
    # Its thread is in torch's client. An answer while Python ends would abort the process, so Python does not end.
    assert "on rank 0" in done.stdout and "on rank 1" not in done.stdout


def exit_code_of(target: Callable[[str, str], None], how: str, folder: Path) -> int | None:
    """Of a process that calls ``target(how, folder)``, which has a minute."""
    process = forkserver().Process(target=target, args=(how, str(folder)))
    process.start()
    process.join(60)
    process.kill()
    process.join()
    return process.exitcode


def fails_while_the_store_is_stuck(how: str, folder: str) -> None:
    """A run of one process that fails, and which cannot ask the store."""

    def stuck(*_: Any) -> None:
        time.sleep(600)

    class Fails(Run):
        def run(self) -> Outcome:
            raise TrainingError("3 steps in a row")

        def close(self, failed: bool = False) -> None:
            super().close(failed)
            Path(folder, "closed").touch()
            if how == "closing hangs":
                stuck()
            raise OSError("the disk is gone")

    launch.Run, launch.report_once, dist.destroy_process_group = Fails, lambda *_: False, stuck
    os.chdir(folder)
    os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    try:
        pretrain_gpt.main([*FLAGS.split(), "--distributed-timeout-minutes", "0.02" if how == "closing hangs" else "1"])
    finally:
        Path("returned to Python").touch()


@pytest.mark.parametrize("how", ["closing hangs", "closing raises"])
def test_a_run_ends_while_the_store_does_not_answer(how: str, tmp_path: Path) -> None:
    """Whatever becomes of its last save, and without the process group, whose threads ask that store."""
    assert exit_code_of(fails_while_the_store_is_stuck, how, tmp_path) == 1 and (tmp_path / "closed").exists()
    assert not (tmp_path / "returned to Python").exists()
    assert ("OSError: the disk is gone" in (tmp_path / "err").read_text()) == (how == "closing raises")
    status = json.loads((tmp_path / "why.json").read_text())
    assert status.items() >= {"status": "failed", "reason": "3 steps in a row", "iteration": 0}.items()


def test_stacks_are_shown_while_a_run_is_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a background save is stuck on a dead file system. A long and healthy one goes on."""
    said = ""

    class Closing(Run):
        def close(self, failed: bool = False) -> None:
            nonlocal said
            deadline = time.monotonic() + 10
            while "in close" not in said and time.monotonic() < deadline:
                time.sleep(0.05)
                said += capfd.readouterr().err
            super().close(failed)

    monkeypatch.setattr(launch, "Run", Closing)
    monkeypatch.chdir(tmp_path)
    with clean_process():
        assert pretrain_gpt.main([*FLAGS.split(), "--distributed-timeout-minutes", "0.005"]) == 0
    assert "rank 0 of 1 has made no progress" in said and "in close" in said
    assert json.loads((tmp_path / "why.json").read_text())["status"] == "done"


def test_stacks_are_shown_without_a_temporary_folder_and_where_stderr_has_no_descriptor() -> None:
    code = """
import io, sys, tempfile, time
from smp.training.process import Process
from smp.training.runtime import Watchdog

def refused(*_, **__):
    raise PermissionError("read-only")

tempfile.TemporaryFile, sys.stderr = refused, io.StringIO()
watchdog = Watchdog(Process(rank=3, world_size=4, local_rank=3), 0.01)
time.sleep(1.2)
watchdog.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rank 3 of 4 has made no progress" in done.stderr and "Thread 0x" in done.stderr, done.stderr


def test_stacks_go_to_the_system_s_stderr_unless_it_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "closed").open("w") as closed:
        pass
    descriptors = {"tee": (object(), 2), "notebook": (io.StringIO(), 2), "none": (None, -1), "closed": (closed, -1)}
    for name, (stream, descriptor) in descriptors.items():
        monkeypatch.setattr(sys, "stderr", stream)
        assert runtime._stderr() == descriptor, name


def ends_itself(how: str, folder: str) -> None:
    """A process that is stuck, and whose words nobody can hear."""
    runtime.GRACE = 0.5
    if how.startswith("full"):  # the others end as soon as they have written the status file
        launch.LAST_WORDS = 0.5
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    if how == "broken":
        os.close(reader)
    if how.startswith("full"):
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    if how == "full after a few lines":
        os.read(reader, 4096)
        os.write(writer, b"x" * 3600)
    if how == "none":
        sys.stderr = None
    config = Config(logging=LoggingConfig(status_file=f"{folder}/why.json"))
    watchdog = Watchdog(Process(1, 2, 1), 1 / 60, lambda why: launch._end(why, config, Process(1, 2, 1)))
    with watchdog.ending():
        time.sleep(600)


@pytest.mark.parametrize("how", ["broken", "full", "full after a few lines", "none"])
def test_a_process_ends_itself_where_its_words_go_nowhere(how: str, tmp_path: Path) -> None:
    assert exit_code_of(ends_itself, how, tmp_path) == 1
    assert json.loads((tmp_path / "why.json").read_text())["status"] == "failed"


def is_suspended(ended: Any) -> None:
    runtime.GRACE = 0.5
    watchdog = Watchdog(Process(0, 1, 0), 2 / 60, ended.send)  # two seconds, and half as much again
    with watchdog.ending():
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # for many looks of the watchdog
    ended.send("healthy")


def test_a_process_that_was_suspended_goes_on() -> None:
    receiver, sender = forkserver().Pipe(duplex=False)
    process = forkserver().Process(target=is_suspended, args=(sender,))
    process.start()
    stat = Path(f"/proc/{process.pid}/stat")
    deadline = time.monotonic() + 60
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(5)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    assert receiver.poll(60) and receiver.recv() == "healthy"
    process.join()


def test_what_waits_twice_has_the_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "GRACE", 0.5)
    ends: list[str] = []
    watchdog = Watchdog(Process(0, 1, 0), 2 / 60, ends.append)
    with watchdog.ending(waits=2):
        deadline = time.monotonic() + 60
        while not ends:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    watchdog.close()
    seconds = re.search(r"no error for (\d+) s", ends[0])
    assert seconds is not None and int(seconds[1]) >= 5  # twice two seconds, and half of two


def test_only_a_standstill_where_torch_has_a_time_limit_ends_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long and healthy does not: a part that is made after the other, and all that is not inside."""
    monkeypatch.setattr(runtime, "GRACE", 0.5)
    ends: list[str] = []
    watchdog = Watchdog(Process(3, 8, 0), 1 / 60, ends.append)  # a second, and half as much again
    with watchdog.ending():
        for _ in range(25):
            time.sleep(0.1)
            watchdog.progress()
    time.sleep(2.5)  # an evaluation
    assert not ends
    with watchdog.ending():
        deadline = time.monotonic() + 60
        while not ends:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    watchdog.close()
    why = rf"no answer and no error for \d+ s, so this process ends; {LOST}"
    assert re.fullmatch(f"a function of another package failed: {why}", ends[0])


@dataclass(frozen=True)
class Context:
    """Of two data-parallel processes of a pipeline of two, as far as it is asked."""

    collectives: object = None
    fsdp = expert_fsdp = None
    data_size = 2
    cp_size = 1
    world_size = 4
    pp = tp = property(lambda self: self)

    def size(self) -> int:
        return 2

    def secondary_parts(self, size: int) -> dict[str, object]:
        return {}


def test_every_part_that_waits_for_others_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a plan of the pipeline, which waits for nobody, is made where nothing ends the process."""
    events: list[str] = []
    values = {
        "build_context": Context(),
        "topology_of": Topology.even(2, 2),
        "choose_collectives": 1,
        "with_secondary_shards": 2,
    }
    for name, value in values.items():
        monkeypatch.setattr(run_module, name, lambda *_, name=name, value=value, **__: (events.append(name), value)[1])
    parallel = ParallelConfig(zero_hpz_partition_size=2, data_parallel_collectives="auto")
    watchdog = SimpleNamespace(progress=lambda: events.append("progress"))
    run = SimpleNamespace(
        config=Config(parallel=parallel),
        layout=Layout(),
        device=torch.device("cpu"),
        watchdog=watchdog,
        process=SimpleNamespace(world_size=4),
    )
    assert Run._build_context(run).collectives == 2  # type: ignore[arg-type]
    first = ["topology_of", "progress", "build_context", "choose_collectives", "progress", "with_secondary_shards"]
    assert events == first  # and making a group is told by what makes it

    events.clear()
    monkeypatch.setattr(build, "require_stages", lambda model: model)
    for name in ("plans_by_size", "Pipelined"):
        monkeypatch.setattr(build, name, lambda *given, name=name: (events.append(name), given)[1])

    @contextlib.contextmanager
    def making() -> Iterator[None]:
        events.append("enters")
        yield
        events.append("leaves")

    unused: Any = None
    setup = RunSetup(Context(), unused, unused, object(), making_groups=making, progress=watchdog.progress)  # type: ignore[arg-type]
    given: Any = build.build_forward_backward(run.config, setup, unused)
    assert events == ["plans_by_size", "enters", "Pipelined", "leaves"] and given[-1] is watchdog.progress


def test_a_watchdog_that_may_not_end_the_process_only_reports(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "GRACE", 0.1)
    watchdog = Watchdog(Process(0, 1, 0), 1 / 600)
    with watchdog.ending():
        time.sleep(1.0)
    watchdog.close()
    said = capfd.readouterr().err
    assert "has made no progress" in said and "Exception in thread" not in said
