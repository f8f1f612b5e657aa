"""Files that are built once per node: by one process, wholly, and again after a kill."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from smp.config.command_line.command import exit_code
from smp.data.cache import CacheFolderError, DamagedCacheError, NodeCache

SLOW_BUILDER = """
import sys, time
from pathlib import Path
from smp.data.cache import NodeCache

def build(path):
    path.write_text("half")
    with open(sys.argv[1] + "/built", "a") as log:
        log.write("x")
    time.sleep(float(sys.argv[2]))
    path.write_text("whole")

print(NodeCache(sys.argv[1] + "/cache").file("index", build).read_text())
"""


def builder(folder: Path, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILDER, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def write_new(path: Path) -> None:
    path.write_text("new")


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    processes = [builder(tmp_path, 0.5) for _ in range(4)]
    assert [process.communicate()[0] for process in processes] == ["whole\n"] * 4
    assert (tmp_path / "built").read_text() == "x"


def test_a_killed_build_leaves_nothing_that_counts(tmp_path: Path) -> None:
    process = builder(tmp_path, 60)
    while not (tmp_path / "built").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "cache" / "index").exists()
    path = NodeCache(tmp_path / "cache").file("index", write_new)
    assert path.read_text() == "new"
    assert sorted(p.name for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".lock")) == ["index"]


def test_arrays_are_mapped_and_read_only(tmp_path: Path) -> None:
    cache, built = NodeCache(tmp_path), []

    def build() -> np.ndarray:
        built.append(1)
        return np.arange(5)

    arrays = [cache.array("numbers.npy", build) for _ in range(2)]
    assert [a.tolist() for a in arrays] == [[0, 1, 2, 3, 4]] * 2 and built == [1]
    assert isinstance(arrays[0].base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][0] = 1


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    cache.array("numbers.npy", lambda: np.arange(500))
    for size in (600, 40, 0):
        os.truncate(tmp_path / "numbers.npy", size)
        with pytest.raises(DamagedCacheError, match=r"numbers\.npy: damaged; delete it, and it is made again") as met:
            cache.array("numbers.npy", lambda: np.arange(500))
        assert exit_code(met.value) == 1
    (tmp_path / "numbers.npy").unlink()
    assert len(cache.array("numbers.npy", lambda: np.arange(500))) == 500


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def build(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = r"index: No space left on device; another --data-cache-path may do"
    with pytest.raises(CacheFolderError, match=full) as met:
        NodeCache(tmp_path).file("index", build)
    assert exit_code(met.value) == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")] == []


def test_a_folder_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(CacheFolderError, match="No locks available; another --data-cache-path may do") as met:
        NodeCache(tmp_path).file("index", lambda path: None)
    assert exit_code(met.value) == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match="--data-cache-path") as met:
        NodeCache(tmp_path / "file" / "cache").file("index", lambda path: None)
    assert exit_code(met.value) == 2
