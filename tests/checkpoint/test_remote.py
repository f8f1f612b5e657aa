"""Object stores: a real S3 server (moto's), in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.checkpoint import (
    AsyncSaver,
    CheckpointError,
    Retention,
    async_save,
    commit_latest,
    load,
    prune,
    read_manifest,
    save,
    verify,
)
from smp.checkpoint.folders import lock as lock_module
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.latest import complete
from smp.checkpoint.folders.lock import RunLock
from smp.checkpoint.folders.remote import RemoteFolder
from smp.checkpoint.recovery import clean, load_newest
from tests.checkpoint.test_folder import example, zeros
from tests.data.shards import check_streamed, write_shards
from tests.distributed import run_distributed
from tests.training.flag_runs import run_here
from tools.checkpoint import main as checkpoint_tool

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",  # a server that is away is noticed soon
}


class Server:
    """moto's, which forgets everything when it ends."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def machine() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def server(machine: Server) -> str:
    return machine.url


@pytest.fixture
def root(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A prefix of its own in a bucket that is there."""
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3")
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return f"s3://bucket/{tmp_path.name}"


@pytest.mark.slow
def test_shards_are_streamed_and_a_resume_is_exact(root: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards")
    fsspec.filesystem("s3").put(f"{tmp_path}/shards/", f"{root}/shards/", recursive=True)
    check_streamed(tmp_path, tmp_path / "shards", f"{root}/shards")


def fill(root: str, iterations: list[int]) -> None:
    for iteration in iterations:
        folder = f"{root}/iter_{iteration:07d}"
        save({"w": torch.full((5,), float(iteration))}, folder, extra={"iteration": iteration})
        commit_latest(root, folder)


def test_round_trip_and_replacement(root: str) -> None:
    save(example(), f"{root}/x", extra={"n": 1})
    loaded = zeros(example())
    assert load(loaded, f"{root}/x") == {"n": 1} and verify(f"{root}/x") == []
    assert all(torch.equal(t.float(), example()[name].float()) for name, t in loaded.items())
    save({"w": torch.ones(3)}, f"{root}/x", extra={"n": 2})
    assert open_folder(f"{root}/x").names() == ["manifest.json", "shard_00000.1.safetensors"]
    assert load({"w": torch.zeros(3)}, f"{root}/x") == {"n": 2}


def test_a_large_file_goes_up_in_parts(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp.checkpoint.folders.remote._PART", 5 << 20)  # the least that S3 takes
    state = {"w": torch.randn(4 << 20), "v": torch.randn(7)}
    save(state, f"{root}/x", extra={})
    loaded = zeros(state)
    load(loaded, f"{root}/x")
    assert torch.equal(loaded["w"], state["w"]) and torch.equal(loaded["v"], state["v"])


def test_the_same_bytes_as_on_a_disk(root: str, tmp_path: Path) -> None:
    save(example(), tmp_path / "x", extra={"n": 1})
    save(example(), f"{root}/x", extra={"n": 1})
    for name in ("manifest.json", "shard_00000.safetensors"):
        assert open_folder(f"{root}/x").read(name) == (tmp_path / "x" / name).read_bytes()


def test_damage_is_found_and_set_aside(root: str) -> None:
    fill(root, [1, 2, 3])
    folder = open_folder(f"{root}/iter_0000003")
    data = bytearray(folder.read("shard_00000.safetensors"))
    data[-1] ^= 1
    folder.replace("shard_00000.safetensors", bytes(data))
    open_folder(f"{root}/iter_0000002").delete("shard_00000.safetensors")
    assert len(verify(folder)) == len(verify(f"{root}/iter_0000002")) == 1
    said: list[str] = []
    state = {"w": torch.zeros(5)}
    found = load_newest(open_folder(root), lambda f, m: load(state, f), may_rename=True, say=said.append)
    assert found is not None and found[1] == {"iteration": 1} and len(said) == 4
    assert complete(root) == ["iter_0000001"] and open_folder(root).read("latest") == b"iter_0000001\n"
    aside = open_folder(f"{root}/damaged_iter_0000003")
    assert aside.names() == ["DAMAGED.txt", "manifest.json", "shard_00000.safetensors"]


def test_everything_in_a_folder_is_set_aside_with_it(root: str) -> None:
    """What the converter keeps in a folder of its own too, and nothing of a neighbour."""
    fill(root, [2, 20])
    open_folder(f"{root}/iter_0000002/hf").replace("config.json", b"{}")
    open_folder(root).rename("iter_0000002", "damaged_iter_0000002")
    assert open_folder(root).names() == ["damaged_iter_0000002", "iter_0000020", "latest"]
    assert open_folder(f"{root}/damaged_iter_0000002/hf").read("config.json") == b"{}"
    assert verify(f"{root}/damaged_iter_0000002") == [] and verify(f"{root}/iter_0000020") == []


def test_only_back_ends_that_bear_it_are_read_by_several_threads(root: str) -> None:
    for folder, readers in ((f"{root}/x", 4), (f"memory:/{root[4:]}/x", 1)):
        save(example(), folder, extra={})
        with open_folder(folder).reader("shard_00000.safetensors") as source:
            assert source.readers == readers
        loaded = zeros(example())
        load(loaded, folder)
        assert all(torch.equal(t.float(), example()[name].float()) for name, t in loaded.items())


def test_unfinished_saves_are_no_checkpoints_and_are_cleaned(root: str) -> None:
    fill(root, [1])
    open_folder(f"{root}/iter_0000002").replace("shard_00000.safetensors", b"x")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        read_manifest(f"{root}/iter_0000002")
    assert complete(root) == ["iter_0000001"]
    assert len(clean(open_folder(root))) == 1 and open_folder(root).names() == ["iter_0000001", "latest"]
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        read_manifest(f"{root}/absent")


def test_a_failed_save_leaves_nothing(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp.checkpoint.commit.write_manifest", lambda *_: Path("/nowhere/x").read_bytes())
    with pytest.raises(CheckpointError):
        save(example(), f"{root}/x", extra={})
    assert open_folder(root).names() == []


def test_a_writer_that_fails_midway_uploads_nothing(root: str) -> None:
    folder = open_folder(root)
    with pytest.raises(ValueError, match="midway"), folder.writer("file", 100) as sink:
        sink.write(memoryview(b"x" * 50))
        raise ValueError("midway")
    assert folder.names() == []


def test_parts_of_a_file_that_fails_midway_are_deleted(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp.checkpoint.folders.remote._PART", 5 << 20)
    files = fsspec.filesystem("s3")
    with pytest.raises(ValueError, match="midway"), open_folder(root).writer("file", 7 << 20) as sink:
        sink.write(memoryview(b"x" * (7 << 20)))
        assert [upload["Key"] for upload in files.list_multipart_uploads("bucket")] == [f"{root[12:]}/file"]
        raise ValueError("midway")
    assert files.list_multipart_uploads("bucket") == [] and open_folder(root).names() == []


def test_pruning_and_the_lock(root: str) -> None:
    fill(root, [1, 2, 3, 4])
    assert prune(open_folder(root), Retention(2)) == ["iter_0000001", "iter_0000002"]
    assert open_folder(root).names() == ["iter_0000003", "iter_0000004", "latest"]
    lock = RunLock(open_folder(root), print)
    with pytest.raises(CheckpointError, match="is in use by"):
        RunLock(open_folder(root), print)
    lock.release()
    RunLock(open_folder(root), print).release()


def test_the_lock_outlives_a_server_that_is_away(root: str, machine: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "RENEWED_EVERY", 0.2)
    monkeypatch.setattr(lock_module, "_PATIENCE", 1.0)
    folder = open_folder(root)
    lock = RunLock(folder, print)
    until(lambda: lock._me.beat > 0)
    machine.stop()
    with pytest.raises(OSError, match="EndpointConnectionError"):  # the back-end's own is no OSError
        folder.read("lock")
    renewed = lock._renewed
    until(lambda: time.monotonic() - renewed > 1.0)
    with pytest.raises(CheckpointError, match="could not be renewed for"):
        lock.check()
    machine.start()
    fsspec.filesystem("s3").mkdir("bucket")  # empty: the lock is gone as well
    until(lambda: folder.size("lock") is not None)
    lock.check()
    assert lock._renewed > renewed and folder.names() == ["lock"]
    lock.release()


def test_a_small_file_is_made_by_one(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when another one makes it after this one looked."""
    folder = open_folder(root)
    assert folder.create("a", b"first")
    monkeypatch.setattr(type(folder), "size", lambda *_: None)
    assert not folder.create("a", b"second") and folder.read("a") == b"first"


def test_one_of_two_takers_has_a_dead_jobs_lock(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = replace(lock_module.Holder.here(), started="1")
    folder = open_folder(root)
    folder.replace("lock", json.dumps(asdict(dead)).encode())
    here = json.dumps(asdict(lock_module.Holder.here())).encode()
    plain = type(folder).create

    def late(folder: RemoteFolder, name: str, data: bytes) -> bool:
        folder.replace(name, here)  # another was faster
        return plain(folder, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "create", late)
        with pytest.raises(CheckpointError, match="was taken by process .* just now"):
            RunLock(folder, print)
    folder.delete("lock.1")
    said: list[str] = []
    RunLock(folder, said.append).release()
    assert len(said) == 1 and "took over" in said[0] and folder.names() == []


def test_in_the_background(root: str) -> None:
    with AsyncSaver() as saver:
        for n in (1, 2, 3):
            folder = f"{root}/iter_{n:07d}"
            keep = Retention(2)
            async_save(example(), folder, saver=saver, extra={"n": n}, latest_in=root, retention=keep)
        saver.wait()
    assert complete(root) == ["iter_0000003", "iter_0000002"] and verify(f"{root}/iter_0000003") == []
    assert open_folder(root).read("latest") == b"iter_0000003\n"


def on_two_ranks(rank: int, world_size: int, root: str, settings: dict[str, str]) -> Any:
    os.environ.update(settings)
    with AsyncSaver() as saver:
        async_save({f"w{rank}": torch.full((3,), float(rank))}, f"{root}/x", saver=saver, extra={})
        saver.wait()
    both = {f"w{r}": torch.zeros(3) for r in (0, 1)}
    load(both, f"{root}/x")
    return [float(tensor[0]) for tensor in both.values()]


def test_two_ranks(root: str, server: str) -> None:
    settings = {**SETTINGS, "AWS_ENDPOINT_URL": server}
    assert run_distributed(on_two_ranks, 2, root, settings) == [[0.0, 1.0], [0.0, 1.0]]


def test_what_is_not_installed_is_said() -> None:
    with pytest.raises(CheckpointError, match="unheard://x/y: .*pip install"):
        save(example(), "unheard://x/y", extra={})


def test_a_run_saves_to_and_resumes_from_s3(root: str, tmp_path: Path) -> None:
    whole = run_here(tmp_path / "whole", "--train-iters 4")
    first = run_here(tmp_path / "a", f"--train-iters 4 --exit-interval 2 --save {root} --async-save")
    second = run_here(tmp_path / "b", f"--train-iters 4 --save {root} --load auto --keep-last-k 2")
    assert (whole.code, first.code, second.code) == (0, 0, 0), second.err
    assert first.losses + second.losses == whole.losses
    assert open_folder(root).names() == ["iter_0000002", "iter_0000004", "latest"]
    missing = run_here(tmp_path / "c", f"--load {root}/nowhere")
    assert missing.code == 2 and "nowhere holds no complete checkpoint" in missing.errors[0]


def test_the_tool_copies_into_a_bucket(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(example(), tmp_path / "here", extra={"n": 1})
    assert checkpoint_tool(["reshard", str(tmp_path / "here"), f"{root}/there", "--files", "2"]) == 0
    assert checkpoint_tool(["verify", f"{root}/there"]) == 0
    assert checkpoint_tool(["diff", str(tmp_path / "here"), f"{root}/there"]) == 0
    assert len(read_manifest(open_folder(f"{root}/there")).files) == 2
    capsys.readouterr()
