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
from pathlib import Path
from threading import Lock
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
_GIVEN_UP = "another file could not be written"
"""Seen by nobody: the error of that file is raised."""


class Target(Protocol):
    """A checkpoint to be written."""

    @property
    def files(self) -> Mapping[str, list[Planned]]:
        """Data files and the tensors in each."""

    def path(self, file: str) -> str:
        """Of a data file, in the folder that the checkpoint becomes."""

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
        progress: told of bytes that are done, from several threads.

    Returns:
        Files that were taken over from an interrupted conversion.

    Raises:
        CheckpointError: ``path`` is not empty, or something cannot be read or written. Nothing is at ``path`` then.
    """
    path = Path(os.path.abspath(path))  # "." has no name
    staging = path.with_name(path.name + ".partial")
    lock = Lock()

    def told(count: int) -> None:
        with lock:
            progress(count)

    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(f"{path} exists already: give a new name or remove it")
        if staging.is_dir() and any(staging.iterdir()) and not (staging / JOURNAL).is_file():
            raise CheckpointError(f"{staging} exists already and is no interrupted conversion: move it away")
        staging.mkdir(parents=True, exist_ok=True)
        header = {"source": weights.fingerprint(), "options": options, "files": _described(target)}
        with _journal(staging, header) as (records, journal):
            kept = len(records)
            for file in records:
                told(_size(target, file))
            _write_files(weights, target, staging, records, journal, workers, told)
            target.finish(staging, records)
        _publish(staging, path)
    except OSError as error:
        raise CheckpointError(f"{staging} cannot be written: {error}") from error
    return kept


def _described(target: Target) -> Any:
    return {
        file: [[t.name, list(t.stored.shape), str(t.stored.dtype)] for t in ts] for file, ts in target.files.items()
    }


def _size(target: Target, file: str) -> int:
    return sum(tensor.stored.nbytes for tensor in target.files[file])


@contextmanager
def _journal(staging: Path, header: Any) -> Iterator[tuple[dict[str, Any], TextIO]]:
    """Records of files that are complete, and where to write more. Files that are not complete are deleted."""
    with (staging / JOURNAL).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{staging}: another conversion is writing there") from None
        file.seek(0)
        text = json.loads(json.dumps(header))
        records = _complete(staging, file.read().splitlines(), text)
        _clear(staging, {staging / JOURNAL, *(staging / record["path"] for record in records.values())})
        file.truncate(0)
        for line in [text, *({"file": name, **record} for name, record in records.items())]:
            _append(file, line)
        yield {name: record["record"] for name, record in records.items()}, file


def _complete(staging: Path, lines: list[str], header: Any) -> dict[str, Any]:
    """What a journal says of files that are there in full; nothing when it is of another conversion."""
    records: dict[str, Any] = {}
    try:
        if not lines or json.loads(lines[0]) != header:
            return {}
        for line in lines[1:]:
            entry = json.loads(line)
            path = staging / entry["path"]
            if path.is_file() and path.stat().st_size == entry["size"]:
                records[entry.pop("file")] = entry
    except ValueError:
        return records  # the last line was cut off
    return records


def _clear(folder: Path, keep: set[Path]) -> None:
    """Delete all other files."""
    for path in folder.rglob("*"):
        if path not in keep and not path.is_dir():
            path.unlink()


def _append(file: TextIO, line: Any) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _write_files(
    weights: Weights,
    target: Target,
    staging: Path,
    records: dict[str, Any],
    journal: TextIO,
    workers: int,
    progress: Progress,
) -> None:
    """The files that are missing, some at a time; the first error ends it."""
    lock, failed = Lock(), False
    largest = max((tensor.stored.nbytes for tensors in target.files.values() for tensor in tensors), default=0)

    def told(count: int) -> None:
        if failed:
            raise CheckpointError(_GIVEN_UP)
        progress(count)

    feed = Feed(weights, Room(2 * largest), told)

    def one(file: str) -> None:
        nonlocal failed
        try:
            record = target.write(staging, file, feed)
            with lock:
                records[file] = record
                path = target.path(file)
                size = (staging / path).stat().st_size
                _append(journal, {"file": file, "path": path, "size": size, "record": record})
        except BaseException:
            failed = True
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            jobs = [pool.submit(one, file) for file in target.files if file not in records]
            wait(jobs, return_when=FIRST_EXCEPTION)
        except BaseException:  # an interrupt from the keyboard
            failed = True
            pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown(wait=True, cancel_futures=failed)
    errors = [e for job in jobs if not job.cancelled() and (e := job.exception()) is not None]
    for error in errors:
        if str(error) != _GIVEN_UP:
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
