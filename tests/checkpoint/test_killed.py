"""SIGKILL at every call in which one process touches the folder, whatever it does there: nothing whole is lost.

The process is a fork of this one, which costs milliseconds; test_crash.py has whole runs.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from smp.checkpoint import Retention, commit_latest, load, prune, save, verify
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.latest import complete
from smp.checkpoint.folders.lock import RunLock
from smp.checkpoint.format.entries import Manifest
from smp.checkpoint.recovery import clean, load_newest, set_aside
from smp.checkpoint.rewrite import rewrite

CALLS = (
    *("open", "write", "posix_fallocate", "fsync", "link", "replace", "rename"),
    *("unlink", "rmdir", "mkdir", "scandir", "listdir"),
)
Action = Callable[[Path], object]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints and `latest`."""
    root = tmp_path_factory.mktemp("template")
    for n in range(1, 6):
        save_at(root, n)
    commit_latest(root, root / "iter_0000005")
    return root


def save_at(root: Path, n: int) -> None:
    save({"w": torch.full((50 + n,), float(n))}, root / f"iter_{n:07d}", extra={"n": n})


def damage(root: Path) -> None:
    path = root / "iter_0000005/shard_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def leave(root: Path) -> None:
    """What crashes leave."""
    (root / "iter_0000009").mkdir()
    for name in ("iter_0000009/shard_00000.safetensors", "iter_0000003/manifest.json.00aa11bb.tmp", "lock.tmp"):
        (root / name).write_bytes(b"x")
    (root / "latest").write_text("iter_0000009\n")


def recover(root: Path) -> None:
    found = load_newest(open_folder(root), restore, may_rename=True, say=lambda line: None)
    assert found is not None


def restore(folder: Folder, manifest: Manifest) -> int:
    n, state = manifest.extra["n"], {"w": torch.zeros(manifest.tensors["w"].shape)}
    load(state, folder)
    assert state["w"].eq(n).all()
    return n


SCENES: dict[str, tuple[Action, Action, int]] = {
    # before, what the victim does, the oldest iteration that may come back
    "a new checkpoint": (lambda root: None, lambda root: save_at(root, 6), 5),
    "one over another": (lambda root: None, lambda root: save_at(root, 5), 5),
    "latest": (lambda root: None, lambda root: commit_latest(root, root / "iter_0000004"), 5),
    "pruning": (lambda root: None, lambda root: prune(open_folder(root), Retention(2)), 5),
    "setting aside": (damage, lambda root: set_aside(open_folder(root), "iter_0000005", "cut off"), 4),
    "falling back": (damage, recover, 4),
    "cleaning": (leave, lambda root: clean(open_folder(root)), 5),
    "the lock": (lambda root: None, lambda root: RunLock(open_folder(root), print).release(), 5),
    "rewriting": (
        lambda root: None,
        lambda root: rewrite(open_folder(root / "iter_0000005"), open_folder(root / "iter_0000007"), 3),
        5,
    ),
}


def killed_at(root: Path, action: Action, count: int) -> bool:
    """Whether a fork that does ``action`` was killed at its count-th call; else it did all of it."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def watched(plain: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                nonlocal seen
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(*args, **options)

            return call

        try:
            for name in CALLS:
                setattr(os, name, watched(getattr(os, name)))
            action(root)
            os._exit(0)
        finally:
            os._exit(3)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def check(root: Path, least: int) -> None:
    """A start in the folder finds the newest whole checkpoint, and in the end nothing else is there."""
    lock = RunLock(open_folder(root), lambda line: None)
    clean(open_folder(root))
    found = load_newest(open_folder(root), restore, may_rename=True, say=lambda line: None)
    assert found is not None and found[1] >= least
    names = complete(root)
    assert (root / "latest").read_text().strip() == names[0] == found[0].name
    assert all(verify(root / name) == [] for name in names)
    lock.release()
    left = [str(path.relative_to(root)) for path in root.rglob("*") if ".tmp" in path.name or "lock" in path.name]
    assert left == []
    aside = {path.name for path in root.glob("damaged_iter_*")}
    assert {path.name for path in root.iterdir()} == {*names, "latest", *aside}


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_so_manyth_call(tmp_path: Path, template: Path, stride: int) -> None:
    moments = 0
    for number, (scene, (before, action, least)) in enumerate(SCENES.items()):
        for count in range(1 + number % stride, 200, stride):
            root = tmp_path / f"{scene} {count}"
            shutil.copytree(template, root)
            before(root)
            killed = killed_at(root, action, count)
            check(root, least)
            shutil.rmtree(root)
            if not killed:
                break
            moments += 1
        assert 5 < count < 199, scene
    assert moments >= 100 // stride
