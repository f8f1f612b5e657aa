"""The process that writes checkpoints in the background: one beside every trainer, started afresh, never a fork.

It is told what to write in JSON through a socket, and finds the data in memory that it shares with its trainer. Writers
talk to each other through the checkpoint's folder only: each leaves a report beside its data file, and rank 0's waits
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
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from smp.checkpoint.entries import CheckpointError, Manifest, TensorEntry
from smp.checkpoint.folder import Folder
from smp.checkpoint.local import open_folder
from smp.checkpoint.lock import require_lock
from smp.checkpoint.manifest import parse_manifest
from smp.checkpoint.retention import Retention, publish
from smp.checkpoint.storage import commit
from smp.checkpoint.tensor_file import FileLayout, Slot, write_file

REPORT = ".json"
"""What the name of a report has after the name of its data file."""


def main(descriptor: int, trainer: int) -> None:
    """Work until the trainer, whose process number this is, closes the socket or dies."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # sent to whole groups; the trainer decides when the work is done
    threading.Thread(target=_die_with, args=(trainer,), daemon=True).start()
    connection, memory = Connection(descriptor), memoryview(b"")
    while True:
        try:
            job = json.loads(connection.recv_bytes())
            if "memory" in job:
                memory = _map(recv_handle(connection), job["memory"])
            elif "folder" in job:
                _Save(connection, job, memory).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the trainer is gone


def _die_with(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(0.1)
    os._exit(1)


def _map(descriptor: int, size: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


class _Save:
    """One job: this rank's file, and on rank 0 the commit."""

    def __init__(self, connection: Connection, job: dict[str, Any], memory: memoryview) -> None:
        self.connection, self.job, self.memory = connection, job, memory
        self.notes: list[str] = []
        self.folder = open_folder(job["folder"])

    def run(self) -> None:
        """Answer ``{"part": error or None}``, then on rank 0 ``{"commit": error or None}``."""
        error = self._attempt(self._write_part) if self.job["part"] else None
        self._answer({"part": error})
        if self.job["commit"] and error is None:
            self._answer({"commit": self._attempt(self._commit)})

    def _attempt(self, action: Any) -> str | None:
        try:
            action()
        except Exception as error:
            return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return None

    def _answer(self, message: dict[str, Any]) -> None:
        self.connection.send_bytes(json.dumps({"notes": self.notes, **message}).encode())

    def _write_part(self) -> None:
        part = self.job["part"]
        slots = [Slot(*slot) for slot in part["slots"]]
        layout = FileLayout(part["header"].encode("latin-1"), tuple(slots))
        data = [(slot.key, self.memory[slot.start : slot.start + slot.size]) for slot in slots]
        try:
            self._report({"hashes": write_file(self.folder, part["file"], layout, data)})
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._attempt(lambda: self._report({"error": text}))  # on a full disk there may be no room for it either
            raise

    def _report(self, content: dict[str, Any]) -> None:
        name = self.job["part"]["file"]
        report = {"save": self.job["save"], "size": self.folder.size(name), **content}
        self.folder.replace(name + REPORT, json.dumps(report).encode())

    def _commit(self) -> None:
        wanted = self.job["commit"]
        manifest = parse_manifest(wanted["manifest"])
        hashes = self._gather(sorted({s.file for entry in manifest.tensors.values() for s in entry.shards}))
        self._check()
        self.notes += commit(self.folder, _with_hashes(manifest, hashes))
        if wanted["latest_in"] is not None:
            keep = wanted["retention"] and Retention(**wanted["retention"])
            self.notes += publish(open_folder(wanted["latest_in"]), self.folder, keep, self._check)

    def _check(self) -> None:
        """Raise CheckpointError when another job has the lock under which this save began."""
        if (lock := self.job["commit"]["lock"]) is not None:
            require_lock(open_folder(lock["root"]), lock["token"])

    def _gather(self, files: list[str]) -> dict[str, dict[str, str]]:
        """The hashes of all files by tensor, when the last report is there."""
        hashes: dict[str, dict[str, str]] = {}
        pause, last = 0.005, time.monotonic()
        while missing := [file for file in files if file not in hashes]:
            for file in missing:
                if (found := _read_report(self.folder, file, self.job["save"])) is not None:
                    hashes[file] = found
                    pause, last = 0.005, time.monotonic()
            if time.monotonic() - last > self.job["commit"]["patience"]:
                raise CheckpointError(f"{len(missing)} other ranks do not finish their files: {', '.join(missing[:5])}")
            if len(hashes) < len(files) and self.connection.poll(pause):
                json.loads(self.connection.recv_bytes())  # the only thing a trainer says in the middle of a save
                raise CheckpointError("given up, because another rank failed")
            pause = min(2 * pause, 1.0)
        return hashes


def _read_report(folder: Folder, file: str, save: str) -> dict[str, str] | None:
    """The hashes that a writer reports; None while there is no report, or the file is not seen as it says."""
    try:
        report = json.loads(folder.read(file + REPORT))
    except FileNotFoundError:
        return None
    if report["save"] != save:
        return None
    if "error" in report:
        raise CheckpointError(f"{folder}/{file}: {report['error']}")
    return report["hashes"] if folder.size(file) == report["size"] else None


def _with_hashes(manifest: Manifest, hashes: dict[str, dict[str, str]]) -> Manifest:
    def signed(entry: TensorEntry) -> TensorEntry:
        return replace(entry, shards=tuple(replace(s, xxh3_64=hashes[s.file][s.key]) for s in entry.shards))

    return replace(manifest, tensors={name: signed(entry) for name, entry in manifest.tensors.items()})
