"""A disk that is full or broken during a save: the failure is said, the old checkpoint stays, the next save works."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.checkpoint import AsyncSaver, CheckpointError, async_save, load, save, verify
from smp.checkpoint.folders.local import LocalFolder

CALLS = ("open", "posix_fallocate", "write", "fsync", "replace", "unlink")


@contextmanager
def failing(root: Path, count: int, error: int) -> Iterator[list[str]]:
    """The count-th call that touches files under ``root`` fails, and its name is noted."""
    seen: list[str] = []
    failed: list[str] = []

    def path(argument: Any) -> str:
        return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else os.fspath(argument)

    def watched(name: str, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if str(root) in path(args[0]):
                seen.append(name)
                if len(seen) == count:
                    failed.append(name)
                    raise OSError(error, os.strerror(error))
            return plain(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield failed


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("replaced", [False, True])
def test_every_call_of_a_save_may_fail(tmp_path: Path, error: int, replaced: bool) -> None:
    new = {"w": torch.full((300,), 2.0), "v": torch.full((3,), 2.0)}
    met: set[str] = set()
    for count in range(1, 100):
        root = tmp_path / str(count)
        folder = root / "x"
        root.mkdir()
        if replaced:
            save({"w": torch.ones(300)}, folder, extra={"n": 1})
        before = sorted(path.name for path in root.rglob("*"))
        with failing(root, count, error) as failed:
            try:
                save(new, folder, extra={"n": 2})
                done = True
            except CheckpointError as raised:
                assert os.strerror(error) in str(raised) and "\n" not in str(raised)
                done = False
        if not failed:
            break
        met |= set(failed)
        check_what_is_left(folder, done, before)
        save(new, folder, extra={"n": 3})
        assert load({name: torch.zeros_like(t) for name, t in new.items()}, folder) == {"n": 3}
    assert {"open", "posix_fallocate", "write", "fsync", "replace"} <= met and not failed


def test_what_fails_after_the_commit_is_told_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert save({"w": torch.ones(3)}, tmp_path / "x", extra={"n": 1}) == []
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "delete", broken)
        notes = save({"w": torch.ones(3)}, tmp_path / "x", extra={"n": 2})
    assert len(notes) == 1 and notes[0].startswith("WARNING: ") and "Input/output error" in notes[0]
    assert load({"w": torch.zeros(3)}, tmp_path / "x") == {"n": 2}


FAIL = Path(__file__).parent / "crash"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_every_call_of_a_background_save_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """In the writer process; its calls are counted down in a file."""
    left, root = tmp_path / "left", tmp_path / "ck"
    monkeypatch.setenv("FAIL", f"{error}:{left}:{root}")
    monkeypatch.setenv("PYTHONPATH", str(FAIL), prepend=os.pathsep)
    state = {"w": torch.full((300,), 2.0)}
    failures = 0
    with AsyncSaver() as saver:
        for count in range(1, 100):
            folder = root / f"iter_{count:07d}"
            left.write_text(str(count))
            async_save(state, folder, saver=saver, extra={"n": count}, latest_in=root)
            try:
                saved = saver.wait()
                assert saved is not None and load({"w": torch.zeros(300)}, folder) == {"n": count}
            except CheckpointError as raised:
                failures += 1
                assert os.strerror(error) in str(raised) and "\n" not in str(raised)
                assert not folder.exists() or verify(folder) == []
            else:
                if int(left.read_text()) > 0:
                    break
                assert any(os.strerror(error) in note for note in saved.notes), "neither failed nor told"
    assert failures >= 6 and count < 99


def check_what_is_left(folder: Path, done: bool, before: list[str]) -> None:
    """What was there before, whole; or the new one, whole, when the failure came after its commit."""
    names = sorted(path.name for path in folder.parent.rglob("*"))
    if not (folder / "manifest.json").exists():
        assert not done and names == before
        return
    assert verify(folder) == []
    if not done and names != before:  # the manifest was replaced, and then its folder could not be synchronized
        assert load({"w": torch.zeros(300), "v": torch.zeros(3)}, folder) == {"n": 2}
