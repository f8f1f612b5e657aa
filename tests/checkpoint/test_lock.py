"""One job per folder; dead ones are recognized."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders import lock
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.folders.lock import Holder, LockLostError, RunLock

HOLD = """
import sys, time
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.lock import RunLock
held = RunLock(open_folder(sys.argv[1]), print)
print("held", flush=True)
time.sleep(60)
"""


def take(root: Path, said: list[str] | None = None) -> RunLock:
    return RunLock(open_folder(root), ([] if said is None else said).append)


def test_a_second_job_is_refused_until_the_first_releases(tmp_path: Path) -> None:
    first = take(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is in use by process {os.getpid()} on .*two jobs"):
        take(tmp_path)
    first.check()
    first.release()
    first.release()
    assert not list(tmp_path.iterdir())
    take(tmp_path).release()


def test_a_killed_holder_is_recognized_at_once(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=f"process {holder.pid}"):
        take(tmp_path)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # only its exit status is left of it
    said: list[str] = []
    take(tmp_path, said).release()
    holder.wait()
    assert len(said) == 1 and f"took over the lock of process {holder.pid}" in said[0]


def write(root: Path, holder: Holder) -> None:
    (root / "lock").write_text(json.dumps(asdict(holder)))


def test_another_process_with_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    write(tmp_path, replace(Holder.here(), started="1"))
    said: list[str] = []
    take(tmp_path, said).release()
    assert len(said) == 1


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"system": "another container"}])
def test_elsewhere_a_lock_that_is_not_renewed_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    monkeypatch.setattr(lock, "_PATIENCE", 0.5)
    write(tmp_path, replace(Holder.here(), **change))
    said: list[str] = []
    take(tmp_path, said).release()
    assert "watching for" in said[0] and "took over" in said[1]


def test_elsewhere_a_lock_that_is_renewed_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.05)
    monkeypatch.setattr(lock, "_PATIENCE", 20.0)
    first = take(tmp_path)
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(CheckpointError, match="is in use by"):
        take(tmp_path)
    first.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "null"])
def test_a_lock_that_names_nobody_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    said: list[str] = []
    take(tmp_path, said).release()
    assert "an unknown job" in said[0]


def test_a_job_that_lost_its_lock_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.05)
    first = take(tmp_path)
    write(tmp_path, replace(Holder.here(), pid=12345, host="elsewhere"))
    deadline = time.monotonic() + 20
    with pytest.raises(CheckpointError, match="was taken over by process 12345 on elsewhere"):
        while time.monotonic() < deadline:
            first.check()
            time.sleep(0.05)
    first.release()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == 12345, "released what belongs to another job"


def test_a_check_sees_at_once_that_the_lock_is_another_ones(tmp_path: Path) -> None:
    """Without waiting for the next renewal, which is seconds away."""
    first = take(tmp_path)
    write(tmp_path, replace(Holder.here(), pid=12345, host="elsewhere"))
    for _ in range(2):
        with pytest.raises(LockLostError, match="was taken over by process 12345 on elsewhere"):
            first.check()
    first.release()


class Flaky(LocalFolder):
    """Storage that is away for a while, and says so in its own way."""

    away = False

    def read(self, name: str) -> bytes:
        if self.away:
            raise OSError("no route to storage")
        return super().read(name)

    def size(self, name: str) -> int | None:
        if self.away:
            raise RuntimeError("of the back-end")
        return super().size(name)


def test_renewal_outlives_storage_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.05)
    folder = Flaky(tmp_path)
    held = RunLock(folder, print)
    folder.away = True
    time.sleep(0.3)
    held.check()  # away for a moment only: nobody elsewhere has given this job up
    monkeypatch.setattr(lock, "_PATIENCE", 0.2)
    with pytest.raises(CheckpointError, match=r"could not be renewed for .*no route to storage"):
        held.check()
    folder.away = False
    beat = json.loads((tmp_path / "lock").read_text())["beat"]
    until(lambda: json.loads((tmp_path / "lock").read_text())["beat"] > beat)
    held.check()
    (tmp_path / "lock").unlink()
    until((tmp_path / "lock").exists)
    held.release()
    assert not list(tmp_path.iterdir())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def dead_holder() -> Holder:
    """A process of this machine that is no more."""
    return replace(Holder.here(), started="1", token=os.urandom(8).hex())


def race(root: Path, takers: int, seed: int) -> list[bytes]:
    """What becomes of several jobs that come at the same moment, each of which is slow in places of its own."""
    begin = time.monotonic() + 0.1
    answers = []
    for number in range(takers):
        mine, theirs = os.pipe()
        if os.fork() == 0:
            try:
                os.close(mine)
                slow_down(random.Random(100 * seed + number))
                time.sleep(max(0.0, begin - time.monotonic()))
                take(root)
                os.write(theirs, b"has it")
            except CheckpointError:
                os.write(theirs, b"refused")
            except BaseException as error:
                os.write(theirs, repr(error).encode())
            finally:
                time.sleep(60)  # until it is killed: the winner must not be dead while others still look
                os._exit(0)
        os.close(theirs)
        answers.append(mine)
    try:
        return [os.read(answer, 200) for answer in answers]
    finally:
        for answer in answers:
            os.close(answer)


def slow_down(chance: random.Random) -> None:
    """Up to a tenth of a second before and after each call that another job can get in between of."""
    for name in ("names", "create", "read", "replace", "delete"):
        plain = getattr(LocalFolder, name)

        def slowly(*args: object, plain: Any = plain) -> object:
            time.sleep(chance.choice((0.0, 0.0, 0.03, 0.1)))
            result = plain(*args)
            time.sleep(chance.choice((0.0, 0.0, 0.03, 0.1)))
            return result

        setattr(LocalFolder, name, slowly)


@pytest.fixture
def children() -> Iterator[None]:
    """Kills what a race started."""
    yield
    for name in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if Path(f"/proc/{name}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes():  # a fork
            os.kill(int(name), 9)
            os.waitpid(int(name), 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("abandoned", [0, 1, 2])
def test_of_many_takers_of_a_dead_jobs_lock_exactly_one_has_it(
    tmp_path: Path, children: None, seed: int, abandoned: int
) -> None:
    """Also when those that tried before died on the way."""
    for name in ("lock", "lock.1", "lock.2")[: abandoned + 1]:
        (tmp_path / name).write_text(json.dumps(asdict(dead_holder())))
    answers = race(tmp_path, 5, seed)
    assert sorted(answers) == [b"has it"] + 4 * [b"refused"]


def test_a_taker_that_died_is_in_nobodys_way(tmp_path: Path) -> None:
    write(tmp_path, dead_holder())
    (tmp_path / "lock.9").write_text(json.dumps(asdict(dead_holder())))
    said: list[str] = []
    held = take(tmp_path, said)
    assert os.listdir(tmp_path) == ["lock.10"] and len(said) == 1
    held.check()
    held.release()
    assert not list(tmp_path.iterdir())


def test_without_proc_a_lock_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac."""
    monkeypatch.setattr(lock, "_system", lambda: "")
    monkeypatch.setattr(lock, "started_at", lambda pid: "")
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.05)
    monkeypatch.setattr(lock, "_PATIENCE", 20.0)
    first = take(tmp_path)
    with pytest.raises(CheckpointError, match="is in use by"):
        take(tmp_path)
    first.release()
    ended = subprocess.Popen(["true"])
    ended.wait()
    write(tmp_path, replace(Holder.here(), pid=ended.pid))
    monkeypatch.setattr(lock, "_PATIENCE", 0.5)
    said: list[str] = []
    take(tmp_path, said).release()
    assert "watching for" in said[0] and "took over" in said[1]
