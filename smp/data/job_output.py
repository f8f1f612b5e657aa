"""The files of a preprocessing job: what a chunk became, sums, a journal, and the folder of a job that is not done.

A job works in the folder PREFIX.partial: the tokens and the lengths so far, and a journal that says how much of both
belongs to the part of the input that is done. A job that is started again cuts both to that and goes on. The files get
their names at the end, so under those names there is never a half-written dataset.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from smp.data.indexed_dataset import publish, write_index

_JOURNAL = "journal.json"
_JOURNAL_SECONDS = 5.0
_NAMED = 10
"""Skipped records that are named one by one."""


@dataclass(frozen=True)
class Column:
    """The documents of a chunk under one key: tokens and lengths as they are written, and bytes of their text."""

    tokens: bytes
    lengths: bytes
    text_bytes: int


@dataclass(frozen=True)
class Encoded:
    """A chunk's result: a column per key, why records were left out, where the next chunk begins, bytes of input."""

    columns: list[Column]
    skipped: list[str]
    next: tuple[int, int, int]
    size: int


@dataclass
class Totals:
    """Sums for the report of one key."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    longest: int = 0
    text_bytes: int = 0

    def add(self, column: Column) -> None:
        lengths = np.frombuffer(column.lengths, "<i4")
        self.documents += len(lengths)
        self.empty += int((lengths == 0).sum())
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.text_bytes += column.text_bytes

    def __str__(self) -> str:
        ratio = f"{self.text_bytes / self.tokens:.4f}" if self.tokens else "no"
        return (
            f"{self.documents} documents, {self.tokens} tokens, {ratio} bytes per token, "
            f"longest {self.longest} tokens, {self.empty} empty"
        )


@dataclass
class Journal:
    """How far a job is.

    Attributes:
        job: stands for input and settings; another job does not go on from here.
        next: file, place and record with which the next chunk begins.
        totals: what was written, for each key.
        dropped: records left out.
        read_bytes: of the input files.
        whole: everything is written; what is left to do is to give the files their names.
    """

    job: str
    next: tuple[int, int, int]
    totals: list[Totals]
    dropped: int = 0
    read_bytes: int = 0
    whole: bool = False
    named: list[str] = field(default_factory=list)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Journal:
        try:
            known = json.loads(path.read_text())
            totals = [Totals(**total) for total in known.pop("totals")]
            return cls(**{**known, "next": tuple(known["next"]), "totals": totals})
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path}: not a journal; delete {path.parent} to start anew") from None


def is_unfinished(prefix: str) -> bool:
    """Whether a job with this prefix was killed and can go on. It may have named some of its datasets already."""
    return Path(f"{prefix}.partial", _JOURNAL).exists()


class Output:
    """The partial files of a job. A context manager: bad input removes them unless ``keep`` was called, anything else
    that ends it leaves them to go on from.

    Args:
        prefix: of the output; its folder is PREFIX.partial.
        names: prefix of the dataset of each key.
        dtype: of a stored token.
        job: stands for input and settings.

    Raises:
        ValueError: another process works there, or another job was left there.
    """

    def __init__(self, prefix: str, names: Sequence[str], dtype: np.dtype, job: str) -> None:
        self.folder, self.names, self.dtype = Path(f"{prefix}.partial"), names, dtype
        self._lock = self._take_lock()
        self._journal_path = self.folder / _JOURNAL
        self.resumed = self._journal_path.exists()
        new = Journal(job, (0, 0, 1), [Totals() for _ in names])
        self.journal = Journal.read(self._journal_path) if self.resumed else new
        if self.journal.job != job:
            raise ValueError(f"{self.folder}: left by a job with other input or settings; delete it to start anew")

    def _take_lock(self) -> TextIO:
        path = self.folder / "lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise ValueError(f"{self.folder}: another process is writing there") from None
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
            lock.close()  # of a job that ended meanwhile and took its folder away

    def __enter__(self) -> Output:
        totals = [] if self.journal.whole else self._totals  # then nothing is written any more
        self._tokens = [self._opened(i, "bin", t.tokens * self.dtype.itemsize) for i, t in enumerate(totals)]
        self._lengths = [self._opened(i, "lengths", t.documents * 4) for i, t in enumerate(totals)]
        self._started = time.monotonic()
        self._background = ThreadPoolExecutor(1, "journal")
        self._journal_write: Future[None] | None = None
        self._kept = False
        return self

    @property
    def _totals(self) -> list[Totals]:
        return self.journal.totals

    def _path(self, key: int, suffix: str) -> Path:
        return self.folder / f"{key}.{suffix}"

    def _opened(self, key: int, suffix: str, size: int) -> BinaryIO:
        file = self._path(key, suffix).open("ab")
        if file.tell() < size:
            raise ValueError(f"{file.name}: shorter than its journal says; delete {self.folder} to start anew")
        file.truncate(size)
        return file

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        with self._named():
            for i, column in enumerate(encoded.columns):
                self._tokens[i].write(column.tokens)
                self._lengths[i].write(column.lengths)
                self._totals[i].add(column)
            journal = self.journal
            journal.next = encoded.next
            journal.read_bytes += encoded.size
            journal.dropped += len(encoded.skipped)
            journal.named += encoded.skipped[: _NAMED - len(journal.named)]
            if time.monotonic() - self._started > _JOURNAL_SECONDS:
                self._start_journal()

    def keep(self) -> bool:
        """Bring the journal up to date and keep everything, if there is one: a job of seconds has none."""
        with self._named():
            self._settle_journal()
            self._kept = self._journal_path.exists()
            if self._kept:
                self._write_journal()
        return self._kept

    def _start_journal(self) -> None:
        """Write it in the background: the disk takes its time, for which no tokenizer has to wait."""
        if self._journal_write is not None and not self._journal_write.done():
            return
        self._settle_journal()
        for file in (*self._tokens, *self._lengths):
            file.flush()
        self._journal_write = self._background.submit(self._write_down, self.journal.text())
        self._started = time.monotonic()

    def _write_down(self, text: str) -> None:
        """What it speaks of is on the disk before it."""
        for file in (*self._tokens, *self._lengths):
            os.fsync(file.fileno())
        temporary = self._journal_path.with_suffix(".tmp")
        with temporary.open("w") as journal:
            journal.write(text)
            journal.flush()
            os.fsync(journal.fileno())
        temporary.replace(self._journal_path)

    def _write_journal(self) -> None:
        """Write it now, after the one that is on its way."""
        self._settle_journal()
        self._start_journal()
        self._settle_journal()

    def _settle_journal(self) -> None:
        """Wait for the one that is on its way, and raise what went wrong."""
        if self._journal_write is not None:
            self._journal_write.result()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the file system says where, and that nothing is lost."""
        try:
            yield
        except OSError as error:
            why = f"{error.strerror or error}; the same command goes on from there"
            raise OSError(error.errno, why, str(self.folder)) from None

    def commit(self) -> None:
        """Give everything its name. A job that was killed in it ends it when it is started again."""
        if not self.journal.whole:
            for file in self._lengths:
                file.flush()
            for i in range(len(self.names)):
                path = self._path(i, "lengths")
                lengths = np.memmap(path, "<i4", "r") if path.stat().st_size else np.empty(0, "<i4")
                documents = np.concatenate(([0], np.cumsum(lengths > 0)))  # an empty document has no sequence
                write_index(self._path(i, "idx"), self.dtype, lengths[lengths > 0], documents)
            self.journal.whole = True
            self._write_journal()
        for i, name in enumerate(self.names):
            publish(self._path(i, "bin"), self._path(i, "idx"), name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> None:
        bad_input = kind is not None and issubclass(kind, ValueError)
        finished = bad_input and not self._kept
        try:
            if kind is None:
                with self._named():
                    self.commit()
                finished = True
        finally:
            self._background.shutdown()
            for file in (*self._tokens, *self._lengths):
                with suppress(OSError):  # what could not be written was reported where it was needed
                    file.close()
            if finished:
                shutil.rmtree(self.folder)
            self._lock.close()
