"""What is on disk when: a kill leaves the system's memory alone, a power cut does not.

Calls to the system are watched. Bytes are on disk after an fsync of their file, names after one of their folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.checkpoint import Retention, commit_latest, prune, save
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.rewrite import rewrite


class Disk:
    """Files whose bytes, and names that, would be lost now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.names = set[str](), set[str]()
        self.commits: list[str] = []
        self.calls: list[tuple[str, str]] = []
        for name in ("open", "write", "fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name), getattr(self, name)))

    def watched(self, plain: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            where = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            self.calls.append((plain.__name__, Path(where).name))
            note(where, *rest)
            return plain(first, *rest, **options)

        return call

    def open(self, path: str, flags: int, *_: int) -> None:
        if flags & os.O_CREAT:
            self.bytes.add(path)
            self.names.add(path)

    def write(self, path: str, _: object) -> None:
        self.bytes.add(path)

    def fsync(self, path: str) -> None:
        self.bytes.discard(path)
        self.names = {name for name in self.names if os.path.dirname(name) != path}

    def replace(self, old: str, new: object) -> None:
        """Nothing that the new file names may be missing after it."""
        assert not self.bytes and self.names == {old}, f"{new} would come before {self.bytes | self.names}"
        self.names = {os.fspath(new)}  # type: ignore[arg-type]
        self.commits.append(Path(str(new)).name)

    def unlink(self, path: str) -> None:
        """What came in its place must be there for good."""
        assert not self.names, f"{path} would be gone before {self.names} is there"


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks which file a descriptor is of")


def test_a_commit_comes_after_what_it_names_and_before_what_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    for factor in (1, 2):  # the second takes the place of the first
        save({"w": factor * torch.ones(300), "v": torch.ones(3)}, tmp_path / "x", extra={})
        commit_latest(tmp_path, tmp_path / "x")
        assert not disk.bytes and not disk.names
    rewrite(open_folder(tmp_path / "x"), open_folder(tmp_path / "y"), 2)
    assert not disk.bytes and not disk.names
    assert disk.commits == ["manifest.json", "latest", "manifest.json", "latest", "manifest.json"]
    assert sorted(os.listdir(tmp_path / "x")) == ["manifest.json", "shard_00000.1.safetensors"]


def test_what_is_pruned_is_no_checkpoint_before_its_data_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (1, 2, 3):
        save({"w": torch.ones(3)}, tmp_path / f"iter_000000{iteration}", extra={})
    disk = Disk(monkeypatch)
    assert prune(open_folder(tmp_path), Retention(2)) == ["iter_0000001"]
    folder = [("open", "iter_0000001"), ("fsync", "iter_0000001")]
    changes = [("unlink", "manifest.json"), *folder, ("unlink", "shard_00000.safetensors")]
    assert [call for call in disk.calls if call in changes][:4] == changes
