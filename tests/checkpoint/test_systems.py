"""Systems and file systems that lack a call: what is a hint is left out, and what is needed is had in another way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from smp.checkpoint import AsyncSaver, CheckpointError, async_save, load, save
from smp.checkpoint.folders import local as local_module
from smp.checkpoint.folders.local import LocalFolder
from tests.checkpoint.test_folder import example, zeros


def check_round_trip(tmp_path: Path) -> None:
    save(example(), tmp_path / "x", extra={"n": 1})
    into = zeros(example())
    assert load(into, tmp_path / "x") == {"n": 1}
    assert all(torch.equal(into[name].float(), tensor.float()) for name, tensor in example().items())


def test_without_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    check_round_trip(tmp_path)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_room_that_cannot_be_asked_for_is_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    check_round_trip(tmp_path)


def test_room_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(example(), tmp_path / "x", extra={})


def test_background_saves_without_nameless_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with AsyncSaver() as saver:
        for n in (1, 2):
            async_save({"w": torch.full((1000 * n,), float(n))}, tmp_path / str(n), saver=saver, extra={})
            saver.wait()
    for n in (1, 2):
        into = {"w": torch.zeros(1000 * n)}
        load(into, tmp_path / str(n))
        assert into["w"].eq(n).all()


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_made_once(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    folder = LocalFolder(tmp_path)
    assert folder.create("a", b"first") and not folder.create("a", b"second")
    assert folder.read("a") == b"first" and os.listdir(tmp_path) == ["a"]


def test_a_file_that_cannot_be_written_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    for call in (LocalFolder(tmp_path).create, LocalFolder(tmp_path).replace):
        with pytest.raises(OSError, match="No space left"):
            call("a", b"content")
        assert not list(tmp_path.iterdir())


def test_folders_that_are_made_are_on_disk_with_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(local_module, "sync_to_disk", synced.append)
    LocalFolder(tmp_path / "a/b/c").make()
    assert (tmp_path / "a/b/c").is_dir() and set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a/b"}
    synced.clear()
    LocalFolder(tmp_path / "a/b/c").make()
    assert not synced
