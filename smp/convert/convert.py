"""A checkpoint of one format written as another: tensor by tensor, in parallel, resumable, complete or not there.

Everything is written into a folder ``TARGET.partial`` next to the target, which gets the target's name when it is
complete. Notes in it say which files are done, so that the same command continues after an interruption.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any, Protocol

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.local import LocalFolder, sync_to_disk
from smp.config import ConfigError
from smp.config.command_line.command import DamageError
from smp.convert.pieces import Feed, Planned, Room
from smp.convert.weights import Weights

ERRORS = (ConfigError, CheckpointError, DamageError, OSError)
"""Errors that the files or the command of a conversion may cause. Any other error is a fault of the program."""
JOURNAL, DONE = "journal.jsonl", ".done"
"""Files of an interrupted conversion: its plan; and, next to a complete file, its note."""
Progress = Callable[[int], None]


class _GivenUpError(Exception):
    """Raised in the other threads once one file could not be written; that file's error is reported."""


class Target(Protocol):
    """A checkpoint to be written."""

    @property
    def files(self) -> Mapping[str, list[Planned]]:
        """Data files by path within the folder, and the tensors in each."""

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """Write one file, durably, with the tensors that ``feed`` gives; JSON that ``finish`` will need."""

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write the files that complete the checkpoint; ``records`` has what ``write`` returned, by file. The caller
        brings them to disk."""


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
        # With names, shapes and dtypes: a conversion continues only if it would write the same files.
        files = {f: [[t.name, t.stored.shape, str(t.stored.dtype)] for t in ts] for f, ts in target.files.items()}
        with _resumed(staging, {"source": weights.fingerprint(), "options": options, "files": files}) as records:
            kept = len(records)
            # What was done before counts as done.
            progress(sum(tensor.stored.nbytes for file in records for tensor in target.files[file]))
            _write_files(weights, target, staging, records, workers, progress)
            target.finish(staging, records)
        # After the lock is given back, whose file goes away with the notes.
        _publish(staging, path)
    except OSError as error:
        raise CheckpointError(f"{staging} cannot be written: {error}") from error
    return kept


@contextmanager
def _resumed(staging: Path, plan: Any) -> Iterator[dict[str, Any]]:
    """(context) What ``Target.write`` returned for files that the same conversion has completed before; other files are
    deleted. The folder is locked meanwhile."""
    text = json.dumps(plan)
    # a+: neither truncated nor required to exist, so the lock is taken before anything changes.
    with (staging / JOURNAL).open("a+", encoding="utf-8") as file:
        try:
            # Released by the system when its holder dies, so nothing has to be cleaned up.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{staging}: another conversion is writing there") from None
        file.seek(0)
        same = file.read() == text
        said = {name: _done(staging / name) for name in plan["files"] if same}
        records = {name: done["record"] for name, done in said.items() if done is not None}
        keep = {staging / JOURNAL, *(staging / f"{name}{end}" for name in records for end in ("", DONE))}
        # Whatever has no note may be half a file.
        for path in staging.rglob("*"):
            if path not in keep and not path.is_dir():
                path.unlink()
        if not same:
            file.truncate(0)
            file.write(text)
            file.flush()
        yield records


def _done(path: Path) -> Any:
    """The note of a file; None: it is not complete."""
    note = path.with_name(path.name + DONE)
    done = json.loads(note.read_bytes()) if note.is_file() and path.is_file() else None
    # The note came after the file was on disk; a size that differs means that somebody wrote to it.
    return done if done is not None and path.stat().st_size == done["size"] else None


def _note(path: Path, record: Any) -> None:
    done = {"size": path.stat().st_size, "record": record}
    LocalFolder(path.parent).replace(path.name + DONE, json.dumps(done).encode())


def _write_files(
    weights: Weights, target: Target, staging: Path, records: dict[str, Any], workers: int, progress: Progress
) -> None:
    """Write the missing files, ``workers`` at a time; the first error ends all."""
    lock, failed = Lock(), Event()
    # Room for two of the largest tensors: one thread can always go on.
    largest = max((tensor.stored.nbytes for tensors in target.files.values() for tensor in tensors), default=0)

    def count(done: int) -> None:
        # A file of many gigabytes is not written to its end once another one has failed.
        if failed.is_set():
            raise _GivenUpError
        with lock:
            progress(done)

    feed = Feed(weights, Room(2 * largest), count)

    def one(file: str) -> None:
        try:
            record = target.write(staging, file, feed)
            _note(staging / file, record)
            records[file] = record
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            jobs = [pool.submit(one, file) for file in target.files if file not in records]
            wait(jobs, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt from the keyboard
            failed.set()
            raise
        # Threads that run finish their current piece, and raise at the next ``count``.
        finally:
            pool.shutdown(cancel_futures=failed.is_set())
    for job in jobs:
        error = None if job.cancelled() else job.exception()
        # Those gave up because of the first; its error is the one to hear.
        if error is not None and not isinstance(error, _GivenUpError):
            raise error


def _publish(staging: Path, path: Path) -> None:
    """Bring everything to disk, then give the folder its name."""
    # Files first, then the name: a crash between the two leaves a conversion that can go on.
    for folder, _, files in os.walk(staging):
        for name in files:
            sync_to_disk(Path(folder) / name)
        sync_to_disk(Path(folder))
    # An empty folder, as was checked.
    if path.exists():
        path.rmdir()
    for note in (staging / JOURNAL, *staging.rglob(f"*{DONE}")):
        # Last before the rename: until then an interruption can go on.
        note.unlink()
    os.rename(staging, path)
    sync_to_disk(path.parent)
