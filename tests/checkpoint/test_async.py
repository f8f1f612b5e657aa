"""Saving in the background: same files, one save at a time, failures that are heard of, processes that end."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp.checkpoint import (
    AsyncSaver,
    CheckpointError,
    LockLostError,
    Retention,
    RunLock,
    async_save,
    load,
    read_manifest,
    save,
)
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.latest import complete
from smp.checkpoint.folders.lock import Holder
from tests.checkpoint.layouts import build, build_mesh
from tests.checkpoint.test_folder import example
from tests.distributed import run_distributed

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_it_writes_what_save_writes(tmp_path: Path) -> None:
    save(example(), tmp_path / "plain", extra={"a": 1})
    with AsyncSaver() as saver:
        state = example()
        async_save(state, tmp_path / "x", saver=saver, extra={"a": 1})
        assert saver.busy
        for tensor in state.values():
            tensor.zero_()  # the copy was taken
        saved = saver.wait()
        assert saved is not None and str(saved.folder) == str(tmp_path / "x") and not saver.busy
        assert saver.wait() is None and saver.poll() is None
    for name in ("manifest.json", "shard_00000.safetensors"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "x")) == ["manifest.json", "shard_00000.safetensors"]


def test_a_path_is_that_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have gone to another folder after the writer began."""
    with AsyncSaver() as saver:
        monkeypatch.chdir(tmp_path)
        async_save(example(), "run/iter_0000001", saver=saver, extra={}, latest_in="run")
        assert saver.wait() is not None
    assert complete(tmp_path / "run") == ["iter_0000001"] and (tmp_path / "run/latest").exists()


def test_one_at_a_time_in_memory_that_is_kept(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        for iteration in range(1, 7):
            size = 1000 if iteration != 4 else 50_000  # once larger than all before
            state = {"w": torch.full((size,), float(iteration))}
            folder = tmp_path / f"iter_{iteration:07d}"
            keep = Retention(2, every=3)
            async_save(state, folder, saver=saver, extra={}, latest_in=tmp_path, retention=keep)
            assert saver._memory.generation == (1 if iteration < 4 else 2)
            assert iteration == 1 or (tmp_path / f"iter_{iteration - 1:07d}/manifest.json").exists()
        saved = saver.wait()
    assert saved is not None and saved.notes == (f"removed {tmp_path}/iter_0000004",)
    assert complete(tmp_path) == ["iter_0000006", "iter_0000005", "iter_0000003"]
    assert (tmp_path / "latest").read_text() == "iter_0000006\n"
    for iteration in (3, 5, 6):
        state = {"w": torch.zeros(1000)}
        load(state, tmp_path / f"iter_{iteration:07d}")
        assert state["w"].eq(iteration).all()


def test_poll_hears_of_the_end(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
        found = []
        until(lambda: found.append(saver.poll()) or found[-1])
        assert (tmp_path / "x/manifest.json").exists() and not saver.busy


def test_what_cannot_begin_is_said_at_once(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        with pytest.raises(TypeError, match="extra"):
            async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={"a": {1}})
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="cannot save .*NotADirectoryError"):
            async_save({"w": torch.ones(3)}, tmp_path / "file/x", saver=saver, extra={})
        assert not saver.busy
        async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
        assert saver.wait() is not None


def test_the_writer_starts_without_torch(tmp_path: Path) -> None:
    """Which would be a second and a hundred megabytes more beside every rank."""
    with AsyncSaver() as saver:
        async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
        saver.wait()
        libraries = Path(f"/proc/{saver.writer_pid}/maps").read_text()
    assert "libtorch" in Path("/proc/self/maps").read_text() and "libtorch" not in libraries


def largest_file(pid: int, size: int) -> None:
    """A disk that is full for one process: writing more than this into a file is an error."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_failed_save_is_raised_once_and_the_next_one_works(tmp_path: Path) -> None:
    state = {"w": torch.arange(10_000.0)}
    with AsyncSaver() as saver:
        async_save(state, tmp_path / "x", saver=saver, extra={"n": 1})
        saver.wait()
        largest_file(saver.writer_pid, 20_000)
        for folder in (tmp_path / "x", tmp_path / "y"):
            async_save(state, folder, saver=saver, extra={"n": 2})
            with pytest.raises(CheckpointError, match=f"cannot save {folder}: rank 0: OSError: .*File too large"):
                saver.wait()
            assert saver.wait() is None
        assert not (tmp_path / "y").exists() and load({"w": torch.zeros(10_000)}, tmp_path / "x") == {"n": 1}
        largest_file(saver.writer_pid, resource.RLIM_INFINITY)
        async_save(state, tmp_path / "y", saver=saver, extra={"n": 3})
        assert saver.wait() is not None and load({"w": torch.zeros(10_000)}, tmp_path / "y") == {"n": 3}


def test_the_next_save_raises_for_the_one_before_and_does_not_begin(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        largest_file(saver.writer_pid, 100)
        async_save({"w": torch.ones(1000)}, tmp_path / "x", saver=saver, extra={})
        with pytest.raises(CheckpointError, match="/x: rank 0: OSError"):
            async_save({"w": torch.ones(1000)}, tmp_path / "y", saver=saver, extra={})
        assert not saver.busy and not (tmp_path / "y").exists()


def test_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        first = saver.writer_pid
        os.kill(first, signal.SIGSTOP)
        async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
        os.kill(first, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="writes checkpoints in the background was killed by signal 9"):
            saver.wait()
        assert saver.writer_pid != first and not (tmp_path / "x").exists()
        async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
        assert saver.wait() is not None
        os.kill(saver.writer_pid, signal.SIGKILL)  # between two saves
        with pytest.raises(CheckpointError, match="killed by signal 9"):
            async_save({"w": torch.ones(3)}, tmp_path / "y", saver=saver, extra={})
            saver.wait()
        async_save({"w": torch.ones(3)}, tmp_path / "y", saver=saver, extra={})
        assert saver.wait() is not None


def test_signals_to_the_whole_group_do_not_end_the_writer(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        async_save({"w": torch.ones(3)}, tmp_path / "warm", saver=saver, extra={})
        saver.wait()  # it has started by now
        async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
        os.kill(saver.writer_pid, signal.SIGTERM)
        os.kill(saver.writer_pid, signal.SIGINT)
        assert saver.wait() is not None


SCRIPT = """
import os, signal, sys, time
import torch
from smp.checkpoint import AsyncSaver, async_save
saver = AsyncSaver()
print(saver.writer_pid, flush=True)
async_save({"w": torch.ones(3)}, sys.argv[1], saver=saver, extra={})
if sys.argv[2] == "raise":
    raise ValueError("of the training")
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def script(tmp_path: Path, how: str) -> tuple[subprocess.CompletedProcess[str], int]:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "x"), how]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    return result, int(result.stdout)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["return", "raise"])
def test_the_exit_of_the_program_waits_for_the_save(tmp_path: Path, how: str) -> None:
    result, writer = script(tmp_path, how)
    assert result.returncode == (how == "raise"), result.stderr
    assert read_manifest(tmp_path / "x") and not alive(writer)


def test_the_writer_dies_with_its_trainer(tmp_path: Path) -> None:
    result, writer = script(tmp_path, "die")
    assert result.returncode == -signal.SIGKILL
    until(lambda: not alive(writer))


def on_two_ranks(rank: int, world_size: int, root: str) -> None:
    model = build(build_mesh((1, 2, 1)), 1, "cpu")
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with AsyncSaver(patience=60) as saver:
        async_save(state, Path(root, "iter_0000001"), saver=saver, extra={"n": 1}, latest_in=root)
        saver.wait()
        save(state, Path(root, "plain"), extra={"n": 1})
        if rank == 1:
            os.kill(saver.writer_pid, signal.SIGKILL)
        async_save(state, Path(root, "iter_0000002"), saver=saver, extra={"n": 2}, latest_in=root)
        with pytest.raises(CheckpointError, match="rank 1: the process that writes"):
            poll_until_over(saver)  # rank 0's writer waits for a report that never comes, until it is told
        dist.barrier()
        assert not Path(root, "iter_0000002").exists()
        async_save(state, Path(root, "iter_0000002"), saver=saver, extra={"n": 2}, latest_in=root)
        poll_until_over(saver)
        only = {"w": torch.ones(3)}  # the other rank has nothing to write
        async_save(only, Path(root, "iter_0000003"), saver=saver, extra={"n": 3}, latest_in=root)
        poll_until_over(saver)
    assert Path(root, "latest").read_text() == "iter_0000003\n"
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert load(copy, Path(root, "iter_0000002")) == {"n": 2}
    assert all(torch.equal(copy[n].to_local(), t.to_local()) for n, t in state.items())  # type: ignore[attr-defined]


def poll_until_over(saver: AsyncSaver) -> None:
    for _ in range(3000):
        if saver.poll() is not None:
            return
        time.sleep(0.01)
    raise AssertionError("never over")


def test_two_ranks(tmp_path: Path) -> None:
    run_distributed(on_two_ranks, 2, str(tmp_path))
    for name in ("shard_00000.safetensors", "shard_00001.safetensors", "manifest.json"):
        assert (tmp_path / "iter_0000001" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "iter_0000002")) == [
        "manifest.json",
        "shard_00000.safetensors",
        "shard_00001.safetensors",
    ]
    assert len(os.listdir(tmp_path / "iter_0000003")) == 2


DYING = """
import datetime, importlib, os, sys
import torch, torch.distributed as dist
from smp.checkpoint import AsyncSaver, async_save
importlib.import_module("smp.checkpoint.background.async_saver").LAST_WAIT = 0.5
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))
with AsyncSaver() as saver:
    if rank == 1:
        os.kill(saver.writer_pid, 9)
    async_save({"w": torch.ones(300), "v": torch.ones(200)}, sys.argv[2] + "/x", saver=saver, extra={})
    if rank == 1:
        os.kill(os.getpid(), 9)
    if sys.argv[3] == "error":
        raise ValueError("of the training")
    while saver.poll() is None:
        pass
"""


@pytest.mark.parametrize("how", ["error", "poll"])
def test_a_rank_that_dies_in_a_save_does_not_keep_the_others(tmp_path: Path, how: str) -> None:
    """Their writers would wait for its file for an hour."""
    ranks = []
    for rank in ("0", "1"):
        command = [sys.executable, "-c", DYING, rank, str(tmp_path), how]
        ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT))
    _, said = ranks[0].communicate(timeout=270)  # far from an hour
    assert ranks[0].returncode == 1 and ranks[1].wait(timeout=10) == -signal.SIGKILL
    assert f"error: cannot save {tmp_path}/x: given up, because another rank failed" in said
    assert not (tmp_path / "x/manifest.json").exists()


def test_what_fails_after_the_commit_is_told_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/file").touch()
    with AsyncSaver() as saver:
        async_save({"w": torch.ones(3)}, tmp_path / "iter_0000001", saver=saver, extra={}, latest_in=tmp_path)
        saved = saver.wait()
    assert saved is not None and len(saved.notes) == 1
    assert saved.notes[0].startswith(f"WARNING: {tmp_path}/iter_0000001 is complete, but 'latest' does not name it")
    assert load({"w": torch.zeros(3)}, tmp_path / "iter_0000001") == {}


def steal(root: Path) -> None:
    """As a job does that takes this one for dead."""
    thief = replace(Holder.here(), pid=12345, host="elsewhere")
    (root / "lock").write_text(json.dumps(asdict(thief)))


def test_nothing_is_committed_by_who_lost_the_folder(tmp_path: Path) -> None:
    lock = RunLock(open_folder(tmp_path), print)
    state, first = {"w": torch.ones(3)}, tmp_path / "iter_0000001"
    with AsyncSaver() as saver:
        async_save(state, first, saver=saver, extra={}, latest_in=tmp_path, lock=lock)
        saver.wait()
        os.kill(saver.writer_pid, signal.SIGSTOP)
        async_save(state, tmp_path / "iter_0000002", saver=saver, extra={}, latest_in=tmp_path, lock=lock)
        steal(tmp_path)
        os.kill(saver.writer_pid, signal.SIGCONT)
        with pytest.raises(CheckpointError, match="was taken over by process 12345 on elsewhere"):
            saver.wait()
    with pytest.raises(LockLostError, match="was taken over by process 12345 on elsewhere"):
        save(state, tmp_path / "iter_0000003", extra={}, lock=lock)
    lock.release()
    assert complete(tmp_path) == ["iter_0000001"] and sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest", "lock"]


def test_a_writer_whose_trainer_is_gone_ends_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saver = AsyncSaver()
    os.kill(saver.writer_pid, signal.SIGSTOP)
    async_save({"w": torch.ones(3)}, tmp_path / "x", saver=saver, extra={})
    writer = saver._writer
    writer._connection.close()
    os.kill(writer.pid, signal.SIGCONT)
    assert writer._process.wait(timeout=100) == 0
    assert capfd.readouterr().err == ""
    saver._save = None
    saver.close()
