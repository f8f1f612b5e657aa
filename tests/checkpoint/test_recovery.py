"""Newest first, damaged ones set aside, leftovers removed, `latest` repaired."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from smp.checkpoint import (
    CheckpointError,
    DamagedError,
    LockLostError,
    Retention,
    RunLock,
    commit_latest,
    load,
    prune,
    save,
    verify,
)
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.latest import complete
from smp.checkpoint.folders.local import LocalFolder, Sink, _LocalSource
from smp.checkpoint.folders.retention import publish
from smp.checkpoint.format.entries import Manifest
from smp.checkpoint.recovery import clean, load_newest, load_step
from smp.config import ConfigError
from smp.config.command_line.command import exit_code
from smp.parallel.agree import on_all_or_none, on_rank_zero
from tests.distributed import run_distributed

FILE = "shard_00000.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (5, 10, 20):
        save_at(tmp_path, iteration)
    commit_latest(tmp_path, tmp_path / "iter_0000020")
    return tmp_path


def save_at(root: Path, iteration: int) -> None:
    save({"w": torch.full((5,), float(iteration))}, root / f"iter_{iteration:07d}", extra={"iteration": iteration})


def loads(root: Path, said: list[str], may_rename: bool = True) -> float | None:
    """The value that the loaded checkpoint holds."""
    state = {"w": torch.zeros(5)}

    def restore(folder: Folder, manifest: Manifest) -> float:
        load(state, folder)
        assert state["w"].eq(manifest.extra["iteration"]).all()
        return float(state["w"][0])

    found = load_newest(open_folder(root), restore, may_rename=may_rename, say=said.append)
    return None if found is None else found[1]


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "bit": lambda folder: flip(folder / FILE),
    "header": lambda folder: flip(folder / FILE, 0),
    "cut": lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1]),
    "missing": lambda folder: (folder / FILE).unlink(),
    "empty": lambda folder: (folder / FILE).write_bytes(b""),
    "link": lambda folder: ((folder / FILE).rename(folder / "x"), (folder / FILE).symlink_to("x")),
    "pipe": lambda folder: ((folder / FILE).unlink(), os.mkfifo(folder / FILE)),
    "folder": lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
    "manifest bit": lambda folder: flip(folder / "manifest.json", 40),
    "manifest cut": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "manifest text": lambda folder: (folder / "manifest.json").write_text("{}"),
}


def test_the_newest_is_loaded_even_if_latest_is_behind(root: Path) -> None:
    said: list[str] = []
    commit_latest(root, root / "iter_0000005")
    assert loads(root, said) == 20 and not said


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_set_aside_loudly_and_the_next_older_one_is_loaded(root: Path, kind: str) -> None:
    DAMAGE[kind](root / "iter_0000020")
    said: list[str] = []
    assert loads(root, said) == 10
    assert len(said) == 2 and all(line.startswith("WARNING: ") and "\n" not in line for line in said)
    assert f"{root}/iter_0000020 is damaged: " in said[0] and f"set aside as {root}/damaged_iter_0000020" in said[1]
    reason = (root / "damaged_iter_0000020/DAMAGED.txt").read_text()
    assert reason.strip() in said[0]
    assert complete(root) == ["iter_0000010", "iter_0000005"] and (root / "latest").read_text() == "iter_0000010\n"


def test_another_one_of_the_same_name_is_set_aside_too(root: Path) -> None:
    for expected in ("damaged_iter_0000020", "damaged_iter_0000020+"):
        flip(root / "iter_0000020" / FILE)
        assert loads(root, []) == 10
        assert (root / expected / "DAMAGED.txt").exists()
        save_at(root, 20)


def test_two_damaged_ones(root: Path) -> None:
    flip(root / "iter_0000020" / FILE)
    flip(root / "iter_0000010/manifest.json", 60)
    said: list[str] = []
    assert loads(root, said) == 5 and len(said) == 4


def test_when_none_is_whole_nothing_starts_from_nothing(root: Path) -> None:
    for iteration in (5, 10, 20):
        flip(root / f"iter_{iteration:07d}" / FILE)
    for _ in range(2):  # the second time there are only those set aside
        with pytest.raises(DamagedError, match="no checkpoint that is whole, only damaged ones: (damaged_)?iter_00000"):
            loads(root, [])
    assert not (root / "latest").exists()


def test_a_folder_of_somebody_else_is_not_changed(root: Path) -> None:
    flip(root / "iter_0000020" / FILE)
    before = sorted(path.name for path in root.rglob("*"))
    said: list[str] = []
    assert loads(root, said, may_rename=False) == 10 and "passed over" in said[1]
    assert sorted(path.name for path in root.rglob("*")) == before


def test_nothing_there(tmp_path: Path) -> None:
    assert loads(tmp_path, []) is None and loads(tmp_path / "absent", []) is None
    (tmp_path / "iter_0000003").mkdir()
    assert loads(tmp_path, []) is None


def test_a_checkpoint_that_does_not_fit_or_cannot_be_read_is_not_damaged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be set aside for somebody else's fault."""

    def other_state(folder: Folder, manifest: Manifest) -> None:
        load({"other": torch.zeros(5)}, folder)

    with pytest.raises(CheckpointError, match="other") as caught:
        load_newest(open_folder(root), other_state, may_rename=True, say=print)
    assert not isinstance(caught.value, DamagedError)

    def broken(self: LocalFolder, name: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalFolder, "reader", broken)
    with pytest.raises(CheckpointError, match=r"cannot be read .*Input/output error") as caught:
        loads(root, [])
    assert not isinstance(caught.value, DamagedError) and len(complete(root)) == 3


def test_a_newer_version_of_the_format_is_not_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("smp.checkpoint.format.manifest.VERSION", 2)
        save_at(root, 30)
    with pytest.raises(CheckpointError, match="version 2 is not the known one") as caught:
        loads(root, [])
    assert not isinstance(caught.value, DamagedError)


def test_one_iteration_by_name(root: Path) -> None:
    def extra(folder: Folder, manifest: Manifest) -> int:
        return manifest.extra["iteration"]

    assert load_step(open_folder(root), "iter_0000010", extra)[1] == 10
    with pytest.raises(CheckpointError, match=r"no complete checkpoint iter_0000007 \(newest first: iter_0000020"):
        load_step(open_folder(root), "iter_0000007", extra)


def test_leftovers_are_removed_and_nothing_else(root: Path) -> None:
    whole = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    (root / "iter_0000030").mkdir()
    for name in (FILE, "shard_00001.safetensors.json", "manifest.json.tmp"):
        (root / "iter_0000030" / name).write_bytes(b"x")
    for name in ("shard_00000.1.safetensors", "shard_00003.safetensors.json.tmp"):
        (root / "iter_0000010" / name).write_bytes(b"x")
    (root / "iter_0000040").mkdir()
    (root / "iter_0000040/notes.txt").write_text("mine")
    (root / "latest.tmp").write_text("iter_00")
    (root / "notes").mkdir()
    lines = clean(open_folder(root))
    assert len(lines) == 3 and "iter_0000010: removed 2 files of a save that did not finish" in lines[0]
    assert "iter_0000030: removed 3 files" in lines[1] and "holds files of others (notes.txt" in lines[2]
    left = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert left == whole | {root / "iter_0000040/notes.txt": b"mine"}
    assert not (root / "iter_0000030").exists() and (root / "notes").exists()
    assert clean(open_folder(root)) == lines[2:]


def test_a_link_to_a_checkpoint_elsewhere_is_pruned(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The link goes; where it leads to may be another run's folder, and nothing changes there."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x"
    (root / "iter_0000005").rename(elsewhere)
    (root / "iter_0000005").symlink_to(elsewhere)
    assert prune(open_folder(root), Retention(2)) == ["iter_0000005"]
    assert sorted(os.listdir(root)) == ["iter_0000010", "iter_0000020", "latest"]
    assert verify(elsewhere) == []


def test_latest_is_repaired(root: Path) -> None:
    (root / "latest").write_text("iter_0000010\n")
    assert clean(open_folder(root)) == [f"{root}/latest now names iter_0000020, the newest complete checkpoint"]
    (root / "latest").unlink()
    clean(open_folder(root))
    assert (root / "latest").read_text() == "iter_0000020\n"


def fails_on(rank: int) -> list[int]:
    """Exit codes after errors of the system that one rank alone meets."""
    fail = broken if torch.distributed.get_rank() == rank else lambda: None
    codes = []
    for action in (lambda: on_rank_zero(fail, CheckpointError), lambda: on_all_or_none(fail, ConfigError, "--flag x")):
        try:
            action()
        except ValueError as error:
            codes.append(exit_code(error))
    return codes


def on_each_rank(rank: int, world_size: int, root: str) -> tuple[float | None, list[str], list[int]]:
    said: list[str] = []
    codes = fails_on(0) + fails_on(1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_LocalSource, "read_into", broken)
        try:
            loads_sharded(rank, root, said)
        except CheckpointError as error:
            codes.append(exit_code(error))
    torch.distributed.barrier()
    if rank == 1:
        # only this rank reads the second file, so only it sees the damage
        flip(Path(root, "iter_0000020/shard_00001.safetensors"))
    torch.distributed.barrier()
    return loads_sharded(rank, root, said), said, codes


def loads_sharded(rank: int, root: str, said: list[str]) -> float | None:
    state = {f"w{rank}": torch.zeros(5)}

    def restore(folder: Folder, manifest: Manifest) -> float:
        load(state, folder)
        return float(state[f"w{rank}"][0])

    found = load_newest(open_folder(root), restore, may_rename=True, say=said.append)
    return None if found is None else found[1]


def save_two(rank: int, world_size: int, root: str) -> None:
    for iteration in (10, 20):
        folder = Path(root, f"iter_{iteration:07d}")
        save({f"w{rank}": torch.full((5,), float(iteration))}, folder, extra={"iteration": iteration})


def test_all_ranks_agree_on_the_one_loaded(tmp_path: Path) -> None:
    run_distributed(save_two, 2, str(tmp_path))
    results = run_distributed(on_each_rank, 2, str(tmp_path))
    assert [value for value, _, _ in results] == [10, 10]
    assert [codes for _, _, codes in results] == [[1, 1, 1, 1]] * 2, "what one rank's system does ends all alike"
    assert results[0][1] == results[1][1] and "shard_00001" in results[0][1][0]
    assert complete(tmp_path) == ["iter_0000010"]


def broken(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_setting_aside_needs_no_room_on_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(root / "iter_0000020" / FILE)
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "replace", broken)
        assert loads(root, said) == 10
    assert "DAMAGED.txt or 'latest' could not be written" in said[1] and "No space left" in said[1]
    assert complete(root) == ["iter_0000010", "iter_0000005"] and (root / "damaged_iter_0000020").is_dir()
    clean(open_folder(root))
    assert (root / "latest").read_text() == "iter_0000010\n"


def test_what_crashes_leave_beside_checkpoints_is_removed(root: Path) -> None:
    flip(root / "iter_0000020" / FILE)
    assert loads(root, []) == 10
    before = sorted(path.relative_to(root) for path in root.rglob("*"))
    left = ["latest.0a1b2c3d.tmp", "lock.00112233aabbccdd", "lock.00112233aabbccdd.0a1b2c3d.tmp", "lock.tmp"]
    left += ["damaged_iter_0000020/DAMAGED.txt.0a1b2c3d.tmp", "iter_0000010/manifest.json.0a1b2c3d.tmp"]
    for name in left:
        (root / name).write_text("x")
    (root / "latest.bak").write_text("mine")
    clean(open_folder(root))
    assert sorted(p.relative_to(root) for p in root.rglob("*") if p.name != "latest.bak") == before


def test_a_loss_that_cannot_be_read_now_is_not_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, loss in enumerate([0.5, 1.0, 2.0, 3.0], start=1):
        folder = tmp_path / f"iter_000000{number}"
        save({"w": torch.ones(3)}, folder, extra={"validation_loss": loss})
    plain, root, keep = LocalFolder.read, open_folder(tmp_path), Retention(2, best=1)

    def read(self: LocalFolder, name: str) -> bytes:
        if "iter_0000001" in str(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "read", read)
        with pytest.raises(CheckpointError, match="Input/output error"):
            prune(root, keep)
        notes = publish(root, root.child("iter_0000004"), keep, lambda: None)
    assert (
        len(notes) == 1
        and notes[0].startswith("WARNING: no old checkpoints are removed")
        and "iter_0000001" in notes[0]
    )
    assert len(complete(tmp_path)) == 4 and (tmp_path / "latest").read_text() == "iter_0000004\n"
    assert prune(root, keep) == ["iter_0000002"] and complete(tmp_path)[-1] == "iter_0000001"


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    for number in range(1, 6):
        save({"w": torch.ones(3)}, tmp_path / f"iter_000000{number}", extra={})
    for number in (2, 4, 5):
        flip(tmp_path / f"iter_000000{number}/manifest.json", 60)
    root = open_folder(tmp_path)
    notes = publish(root, root.child("iter_0000003"), Retention(2), lambda: None)
    assert len(complete(tmp_path)) == 5, "the last two that are whole are 3 and 1"
    for number, note in zip((5, 4, 2), notes, strict=True):
        assert f"iter_000000{number}/manifest.json" in note and note.endswith("and is not removed")
    save({"w": torch.ones(3)}, tmp_path / "iter_0000006", extra={})
    assert prune(root, Retention(2)) == ["iter_0000001"]


def test_nothing_is_published_by_who_lost_the_folder(root: Path) -> None:
    def lost() -> None:
        raise CheckpointError("taken over")

    notes = publish(open_folder(root), open_folder(root / "iter_0000010"), Retention(2), lost)
    assert len(notes) == 1 and "taken over" in notes[0] and (root / "latest").read_text() == "iter_0000020\n"
    assert len(complete(root)) == 3


def test_a_plain_save_looks_at_the_lock_before_it_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job took the folder while the data were written."""
    lock = RunLock(open_folder(tmp_path), print)
    write = LocalFolder.writer

    def taken_meanwhile(folder: LocalFolder, name: str, size: int) -> AbstractContextManager[Sink]:
        (tmp_path / "lock").write_text('{"token": "of another"}')
        return write(folder, name, size)

    monkeypatch.setattr(LocalFolder, "writer", taken_meanwhile)
    with pytest.raises(LockLostError, match="was taken over by an unknown job"):
        save({"w": torch.ones(3)}, tmp_path / "x", extra={}, lock=lock)
    lock.release()
    assert os.listdir(tmp_path) == ["lock"]
