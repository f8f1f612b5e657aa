"""A checkpoint of one format written as another: tensor by tensor, in parallel, resumable, complete or not there.

Everything is written into a folder ``TARGET.partial`` beside the target, which gets the target's name when it is
complete. A journal in it says which files are done, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Protocol, TextIO

from smp.checkpoint import CheckpointError
from smp.checkpoint.local import sync_to_disk
from smp.config import ConfigError
from smp.config.command import DamageError
from smp.convert.pieces import Feed, Planned, Room
from smp.convert.weights import Weights

ERRORS = (ConfigError, CheckpointError, DamageError, OSError)
"""What may be wrong with the files or the command of a conversion. Any other error is a fault of the program."""
JOURNAL = "journal.jsonl"
Progress = Callable[[int], None]


class _GivenUpError(Exception):
    """Another file could not be written, and the error of that one is raised."""


class Target(Protocol):
    """A checkpoint to be written."""

    @property
    def files(self) -> Mapping[str, list[Planned]]:
        """Data files, by their paths in the folder that it becomes, and the tensors in each."""

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """Write one file, durably, with the tensors that ``feed`` gives; JSON that ``finish`` will need."""

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write what makes the files a checkpoint; ``records`` is what ``write`` returned, by file."""


def write(
    weights: Weights, target: Target, path: Path, *, options: Any, workers: int, progress: Progress = lambda count: None
) -> int:
    """Write ``target`` as ``path``.

    Args:
        weights: what to write.
        target: made for these weights.
        path: must not exist, or be an empty folder.
        options: JSON; with others an interrupted conversion is not continued.
        workers: files that are read and written at the same time.
        progress: told of bytes that are done, from several threads, but not at the same time.

    Returns:
        Files that were taken over from an interrupted conversion.

    Raises:
        CheckpointError: ``path`` is not empty, or something cannot be read or written. Nothing is at ``path`` then.
    """
    path = Path(os.path.abspath(path))  # "." has no name
    staging = path.with_name(path.name + ".partial")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists already: give a new name or remove it")
        if staging.is_dir() and any(staging.iterdir()) and not (staging / JOURNAL).is_file():
            raise CheckpointError(f"{staging} exists already and is no interrupted conversion: move it away")
        staging.mkdir(parents=True, exist_ok=True)
        files = {f: [[t.name, t.stored.shape, str(t.stored.dtype)] for t in ts] for f, ts in target.files.items()}
        with _journal(staging, {"source": weights.fingerprint(), "options": options, "files": files}) as journal:
            kept = len(journal.records)
            progress(sum(tensor.stored.nbytes for file in journal.records for tensor in target.files[file]))
            _write_files(weights, target, staging, journal, workers, progress)
            target.finish(staging, journal.records)
        _publish(staging, path)
    except OSError as error:
        raise CheckpointError(f"{staging} cannot be written: {error}") from error
    return kept


@dataclass(frozen=True)
class _Journal:
    """Which files are complete, and what ``Target.write`` returned for each."""

    file: TextIO
    records: dict[str, Any]

    def append(self, path: Path, name: str, record: Any) -> None:
        self.records[name] = record
        _append(self.file, {"file": name, "size": (path / name).stat().st_size, "record": record})


@contextmanager
def _journal(staging: Path, header: Any) -> Iterator[_Journal]:
    """The journal of the folder. Files that are not complete are deleted."""
    with (staging / JOURNAL).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{staging}: another conversion is writing there") from None
        file.seek(0)
        journal = _Journal(file, _complete(staging, file.read().splitlines(), json.loads(json.dumps(header))))
        keep = {staging / JOURNAL, *(staging / name for name in journal.records)}
        for path in staging.rglob("*"):
            if path not in keep and not path.is_dir():
                path.unlink()
        file.truncate(0)
        _append(file, header)
        for name, record in list(journal.records.items()):
            journal.append(staging, name, record)
        yield journal


def _complete(staging: Path, lines: list[str], header: Any) -> dict[str, Any]:
    """What a journal says of files that are there in full; nothing when it is of another conversion."""
    records: dict[str, Any] = {}
    try:
        if not lines or json.loads(lines[0]) != header:
            return {}
        for line in lines[1:]:
            entry = json.loads(line)
            path = staging / entry["file"]
            if path.is_file() and path.stat().st_size == entry["size"]:
                records[entry["file"]] = entry["record"]
    except ValueError:
        return records  # the last line was cut off
    return records


def _append(file: TextIO, line: Any) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _write_files(
    weights: Weights, target: Target, staging: Path, journal: _Journal, workers: int, progress: Progress
) -> None:
    """The files that are missing, some at a time; the first error ends it."""
    lock, failed = Lock(), Event()
    largest = max((tensor.stored.nbytes for tensors in target.files.values() for tensor in tensors), default=0)

    def count(done: int) -> None:
        if failed.is_set():
            raise _GivenUpError
        with lock:
            progress(done)

    feed = Feed(weights, Room(2 * largest), count)

    def one(file: str) -> None:
        try:
            record = target.write(staging, file, feed)
            with lock:
                journal.append(staging, file, record)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            jobs = [pool.submit(one, file) for file in target.files if file not in journal.records]
            wait(jobs, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt from the keyboard
            failed.set()
            raise
        finally:
            pool.shutdown(cancel_futures=failed.is_set())
    for job in jobs:
        error = None if job.cancelled() else job.exception()
        if error is not None and not isinstance(error, _GivenUpError):
            raise error


def _publish(staging: Path, path: Path) -> None:
    """Everything to disk, then the name."""
    for folder, _, files in os.walk(staging):
        for name in files:
            sync_to_disk(Path(folder) / name)
        sync_to_disk(Path(folder))
    if path.exists():
        path.rmdir()
    (staging / JOURNAL).unlink()
    os.rename(staging, path)
    sync_to_disk(path.parent)
