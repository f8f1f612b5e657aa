"""One job per folder; dead ones are recognized."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from smp.checkpoint import CheckpointError, lock
from smp.checkpoint.local import open_folder
from smp.checkpoint.lock import Holder, RunLock

HOLD = """
import sys, time
from smp.checkpoint.local import open_folder
from smp.checkpoint.lock import RunLock
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
    holder.kill()  # not waited for: only its exit status is left of it
    time.sleep(0.2)
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
