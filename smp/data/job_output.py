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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from smp.data.indexed_dataset import naming, publish, sync, write_index

_JOURNAL = "journal.json"
_JOURNAL_SECONDS = 5.0
_NAMED = 10
"""Skipped records that are named one by one."""


class BadRecordError(ValueError):
    """A record that can be skipped: it is no text, or the tokenizer refuses it. Names the file and the line."""


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
        next: file, offset and record with which the next chunk begins.
        totals: what was written, for each key.
        dropped: records left out, the first of which are ``named`` with the reason.
        read_bytes: of the input files.
        whole: everything is written; what is left to do is to give the files their names.
        resumed_at: documents that an earlier start of the job had written.
    """

    job: str
    next: tuple[int, int, int]
    totals: list[Totals]
    dropped: int = 0
    read_bytes: int = 0
    whole: bool = False
    named: list[str] = field(default_factory=list)
    resumed_at: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Journal:
        try:
            journal = cls(**json.loads(path.read_text()))
            journal.totals = [Totals(**total) for total in journal.totals]  # type: ignore[arg-type]
            journal.resumed_at = journal.totals[0].documents
            return journal
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{path}: not a journal; delete {path.parent} to start anew") from None


def is_unfinished(prefix: str) -> bool:
    """Whether a job with this prefix was killed and can go on. It may have named some of its datasets already."""
    return Path(f"{prefix}.partial", _JOURNAL).exists()


class Output:
    """The partial files of a job. A context manager: at its end without an error the datasets get their names. After a
    BadRecordError what was written is kept if there is a journal (a job of seconds has none); other bad input removes
    everything, and anything else that ends it leaves the files to go on from.

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
        self.kept = False
        if self.journal.job != job:
            raise ValueError(f"{self.folder}: left by a job with other input or settings; delete it to start anew")

    def _take_lock(self) -> TextIO:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise ValueError(f"{self.folder}: another process is writing there") from None
            if os.fstat(lock.fileno()).st_nlink:
                return lock
            lock.close()  # of a job that ended meanwhile and took its folder away

    def __enter__(self) -> Output:
        totals = [] if self.journal.whole else self.journal.totals  # then nothing is written any more
        self._tokens = [self._opened(f"{i}.bin", t.tokens * self.dtype.itemsize) for i, t in enumerate(totals)]
        self._lengths = [self._opened(f"{i}.lengths", t.documents * 4) for i, t in enumerate(totals)]
        self._saved = time.monotonic()
        return self

    def _opened(self, name: str, size: int) -> BinaryIO:
        file = (self.folder / name).open("ab")
        if file.tell() < size:
            raise ValueError(f"{file.name}: shorter than its journal says; delete {self.folder} to start anew")
        file.truncate(size)
        return file

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        with naming(self.folder, "; the same command goes on from there"):
            for i, column in enumerate(encoded.columns):
                self._tokens[i].write(column.tokens)
                self._lengths[i].write(column.lengths)
                self.journal.totals[i].add(column)
            journal = self.journal
            journal.next = encoded.next
            journal.read_bytes += encoded.size
            journal.dropped += len(encoded.skipped)
            journal.named += encoded.skipped[: _NAMED - len(journal.named)]
            if time.monotonic() - self._saved > _JOURNAL_SECONDS:
                self._save_journal()

    def _save_journal(self) -> None:
        """What it speaks of is on the disk before it."""
        for file in (*self._tokens, *self._lengths):
            sync(file)
        temporary = self._journal_path.with_suffix(".tmp")
        with temporary.open("w") as journal:
            journal.write(self.journal.text())
            sync(journal)
        temporary.replace(self._journal_path)
        self._saved = time.monotonic()

    def _commit(self) -> None:
        """Give everything its name. A job that was killed in it ends it when it is started again."""
        if not self.journal.whole:
            for i, file in enumerate(self._lengths):
                file.flush()
                lengths = np.fromfile(file.name, "<i4")
                documents = np.concatenate(([0], np.cumsum(lengths > 0)))  # an empty document has no sequence
                write_index(self.folder / f"{i}.idx", self.dtype, lengths[lengths > 0], documents)
            self.journal.whole = True
            self._save_journal()
        for i, name in enumerate(self.names):
            publish(self.folder / f"{i}.bin", self.folder / f"{i}.idx", name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> None:
        with self._lock:
            try:
                with naming(self.folder, "; the same command goes on from there"):
                    if kind is None:
                        self._commit()
                    elif issubclass(kind, BadRecordError) and self._journal_path.exists():
                        self._save_journal()
                        self.kept = True
            finally:
                for file in (*self._tokens, *self._lengths):
                    with suppress(OSError):  # what could not be written was reported where it was needed
                        file.close()
            if kind is None or (issubclass(kind, ValueError) and not self.kept):
                shutil.rmtree(self.folder)
