"""The process that writes checkpoints in the background: one next to every trainer, started afresh, never a fork.

It is told what to write through a socket, and finds the data in memory that it shares with its trainer. Writers
talk to each other through the checkpoint's folder only: each leaves a report next to its data file, and rank 0's waits
for all of them and commits. So a checkpoint is complete as soon as the slowest writer is, whatever the trainers do
meanwhile, and no collective ever runs here. A writer dies with its trainer: nothing keeps writing into a folder that
the next run has taken.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from smp.checkpoint.commit import commit
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.lock import require_lock
from smp.checkpoint.folders.retention import Retention, publish
from smp.checkpoint.format.entries import CheckpointError, Manifest, TensorEntry
from smp.checkpoint.format.tensor_file import FileLayout, write_file

REPORT = ".json"
"""Suffix of a report's name after the name of its data file."""


@dataclass(frozen=True)
class Commit:
    """The commit by rank 0's writer, once the files of all ranks exist.

    Attributes:
        manifest: without checksums.
        patience: seconds to wait without hearing of any other rank's.
        lock: address of the run's folder and token of its lock.
        latest_in: address of the folder whose ``latest`` is to name the checkpoint.
        retention: what stays in that.
    """

    manifest: Manifest
    patience: float
    lock: tuple[str, str] | None
    latest_in: str | None
    retention: Retention | None


@dataclass(frozen=True)
class Job:
    """One save, by a number of its own, into the folder at an address. ``part`` is this rank's file, if it has one."""

    folder: str
    save: str
    part: tuple[str, FileLayout] | None
    commit: Commit | None


Answer = tuple[str | None, list[str]]
"""(error of a part or a commit, or None; lines for the user)."""


def main(descriptor: int, trainer: int) -> None:
    """Work until the trainer, whose process number this is, closes the socket or dies."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # sent to whole groups; the trainer decides when the work is done
    # On a thread of its own: this one may be in the middle of a write when the trainer dies.
    threading.Thread(target=_die_with, args=(trainer,), daemon=True).start()
    connection, memory = Connection(descriptor), memoryview(b"")
    while True:
        try:
            job = connection.recv()
            # A number announces new shared memory of that size, and its descriptor follows.
            if isinstance(job, int):
                memory = _map(recv_handle(connection), job)
            elif isinstance(job, Job):  # else it is told to give up what is over
                _Save(connection, job, memory).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the trainer is gone


def _die_with(trainer: int) -> None:
    # An orphan gets another parent, however its trainer died. No signal has to arrive.
    while os.getppid() == trainer:
        time.sleep(0.1)
    # At once, without finishing anything: the folder may belong to the next run by now.
    os._exit(1)


def _map(descriptor: int, size: int) -> memoryview:
    try:
        # mmap keeps a reference of its own, so the descriptor can be closed.
        return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


class _Save:
    """One job: this rank's file, and on rank 0 the commit."""

    def __init__(self, connection: Connection, job: Job, memory: memoryview) -> None:
        self.connection, self.job, self.memory = connection, job, memory
        self.notes: list[str] = []
        self.folder = open_folder(job.folder)

    def run(self) -> None:
        """Answer for this rank's part, then on rank 0, if that went well, for the commit."""
        wanted = self.job.commit
        error = self._attempt(self._write) if self.job.part else None
        # Before the commit, so that the trainer knows of its own file while others are still writing.
        self.connection.send((error, []))
        if wanted is not None and error is None:
            error = self._attempt(lambda: self._commit(wanted))
            self.connection.send((error, self.notes))

    def _attempt(self, action: Callable[[], None]) -> str | None:
        try:
            action()
        except Exception as error:
            return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return None

    def _write(self) -> None:
        assert self.job.part is not None
        file, layout = self.job.part
        data = [(slot.key, self.memory[slot.start : slot.start + slot.size]) for slot in layout.slots]
        try:
            self._report(file, {"hashes": write_file(self.folder, file, layout, data)})
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._attempt(lambda: self._report(file, {"error": text}))  # on a full disk there may be no room for it
            raise

    def _report(self, file: str, content: dict[str, Any]) -> None:
        # The size too: on a network file system a report may be seen before all of the data.
        report = {"save": self.job.save, "size": self.folder.size(file), **content}
        self.folder.replace(file + REPORT, json.dumps(report).encode())

    def _commit(self, wanted: Commit) -> None:
        files = sorted({s.file for entry in wanted.manifest.tensors.values() for s in entry.shards})
        hashes = self._gather(files, wanted.patience)

        def check() -> None:
            """Raise CheckpointError when another job has the lock under which this save began."""
            if wanted.lock is not None:
                require_lock(open_folder(wanted.lock[0]), wanted.lock[1])

        # The last look before the commit: waiting for the other ranks may have taken long.
        check()
        self.notes += commit(self.folder, _with_hashes(wanted.manifest, hashes))
        if wanted.latest_in is not None:
            self.notes += publish(open_folder(wanted.latest_in), self.folder, wanted.retention, check)

    def _gather(self, files: list[str], patience: float) -> dict[str, dict[str, str]]:
        """The hashes of all files by tensor, once all reports are there."""
        hashes: dict[str, dict[str, str]] = {}
        pause, last = 0.005, time.monotonic()
        while missing := [file for file in files if file not in hashes]:
            for file in missing:
                if (found := _read_report(self.folder, file, self.job.save)) is not None:
                    hashes[file] = found
                    pause, last = 0.005, time.monotonic()
            if time.monotonic() - last > patience:
                raise CheckpointError(f"{len(missing)} other ranks do not finish their files: {', '.join(missing[:5])}")
            # Sleeps, and hears when the trainer says something.
            if len(hashes) < len(files) and self.connection.poll(pause):
                self.connection.recv()  # the only thing a trainer says in the middle of a save
                raise CheckpointError("given up, because another rank failed")
            # Soon at first, for small models; at most once a second, because each look is a request to the storage.
            pause = min(2 * pause, 1.0)
        return hashes


def _read_report(folder: Folder, file: str, save: str) -> dict[str, str] | None:
    """The hashes that a writer reports; None while there is no report, or while the file has another size than it
    says."""
    try:
        report = json.loads(folder.read(file + REPORT))
    except FileNotFoundError:
        return None
    # The report of an earlier save under the same file name.
    if report["save"] != save:
        return None
    if "error" in report:
        raise CheckpointError(f"{folder}/{file}: {report['error']}")
    return report["hashes"] if folder.size(file) == report["size"] else None


def _with_hashes(manifest: Manifest, hashes: dict[str, dict[str, str]]) -> Manifest:
    # Shards come from the trainers without checksums.
    def signed(entry: TensorEntry) -> TensorEntry:
        return replace(entry, shards=tuple(replace(s, xxh3_64=hashes[s.file][s.key]) for s in entry.shards))

    return replace(manifest, tensors={name: signed(entry) for name, entry in manifest.tensors.items()})
