"""What a preprocessing job has made so far: a folder of parts, from which a job that was killed continues.

A job works in the folder PREFIX.partial. What 64 chunks (about 64 MB of text) became is a part, a file there that has
its name only when it is whole. A job that is started again passes over the input of the parts that are there. At the
end the parts are joined and the datasets get their names, so under those names there is never half a dataset.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from smp.config.command_line.command import DamageError
from smp.data.indexed_dataset import IndexedDatasetWriter, dataset_paths, naming, publish, sync
from smp.data.tokenizers.tokenizer import Batch

PART_CHUNKS = 64
_NAMED = 10
"""Number of skipped records that are named one by one."""


class BadRecordError(ValueError):
    """A record that can be skipped: not a text, or refused by the tokenizer. The message names file and line."""


@dataclass(frozen=True)
class Encoded:
    """A chunk as token ids.

    Attributes:
        columns: for each key the documents, in the types in which they are stored.
        text_bytes: of their texts, for each key.
        skipped: why records were left out.
        size: bytes of input.
    """

    columns: list[Batch]
    text_bytes: list[int]
    skipped: list[str]
    size: int


@dataclass
class Report:
    """Counts of a job.

    Attributes:
        text_bytes: of the documents, for each key.
        dropped: records left out, the first of which are ``named`` with the reason.
        resumed_at: parts that an earlier start of the job had made.
    """

    text_bytes: list[int]
    dropped: int = 0
    named: list[str] = field(default_factory=list)
    resumed_at: int = 0


def is_unfinished(prefix: str) -> bool:
    """Whether a job with this prefix was interrupted and can go on. Some of its datasets may have their names
    already."""
    return any(Path(f"{prefix}.partial").glob("*.npz"))


class Output:
    """The parts of a job. A context manager: at its end without an error the datasets get their names. After a
    BadRecordError the parts are kept; other bad input removes everything; after any other error the parts stay, to go
    on from.

    Args:
        prefix: of the output; its folder is PREFIX.partial.
        names: prefix of the dataset of each key.
        dtype: of a stored token.
        job: stands for input and settings.

    Raises:
        ValueError: another process works there, or another job was left there.
    """

    def __init__(self, prefix: str, names: Sequence[str], dtype: np.dtype, job: str) -> None:
        self.folder, self.names, self.dtype, self.job = Path(f"{prefix}.partial"), names, dtype, job
        self._lock = self._take_lock()
        older = (self.folder / "journal.json").exists()  # of version 0.1, which kept no parts
        # The job's hash is in the names of its parts.
        if older or any(not path.name.startswith(job) for path in self.folder.glob("*.npz")):
            raise ValueError(f"{self.folder}: left by a job with other input or settings; delete it to start again")
        # Parts are made in order, so the first that is missing is where the job continues.
        self.parts = next(number for number in count() if not self._part(number).exists())
        self.report = Report([0] * len(names), resumed_at=self.parts)
        self._chunks: list[Encoded] = []

    def _take_lock(self) -> TextIO:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a")
            try:
                # Released by the system when the process dies.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise ValueError(f"{self.folder}: another process is writing there") from None
            # 0 links: the file was deleted meanwhile, and a lock on it would guard nothing.
            if os.fstat(lock.fileno()).st_nlink:
                return lock
            lock.close()  # of a job that ended meanwhile and took its folder away

    def _part(self, number: int) -> Path:
        return self.folder / f"{self.job}-{number}.npz"

    def _naming(self) -> AbstractContextManager[None]:
        return naming(self.folder, "; the same command continues from there")

    def add(self, encoded: Encoded) -> None:
        """Append a chunk."""
        self._chunks.append(encoded)
        if len(self._chunks) == PART_CHUNKS:
            self._save_part()

    def _save_part(self) -> None:
        """Write a part: ids and lengths of each key, and as JSON the bytes of its texts and the skipped records."""
        columns = zip(*(chunk.columns for chunk in self._chunks), strict=True)
        arrays = {}
        for i, batches in enumerate(columns):
            arrays[f"ids{i}"] = np.concatenate([batch.ids for batch in batches])
            arrays[f"lengths{i}"] = np.concatenate([batch.lengths for batch in batches])
        text_bytes = [sum(sizes) for sizes in zip(*(chunk.text_bytes for chunk in self._chunks), strict=True)]
        skipped = [line for chunk in self._chunks for line in chunk.skipped]
        temporary = self.folder / "part.tmp"
        with self._naming():
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, about=np.array(json.dumps([text_bytes, skipped])), **arrays)
                sync(file)
            # Renamed when it is on the disk: a part is complete or not there.
            temporary.replace(self._part(self.parts))
        self.parts += 1
        self._chunks = []

    def _publish(self) -> None:
        """Join the parts. A killed job repeats this when it is started again."""
        for key, name in enumerate(self.names):
            whole = self.folder / str(key)
            with IndexedDatasetWriter(whole, self.dtype) as writer:
                for number in range(self.parts):
                    self._copy(number, key, writer)
            publish(*dataset_paths(whole), name)

    def _copy(self, number: int, key: int, writer: IndexedDatasetWriter) -> None:
        path, report = self._part(number), self.report
        try:
            with np.load(path) as part:
                batch = Batch(part[f"ids{key}"], part[f"lengths{key}"])
                text_bytes, skipped = json.loads(str(part["about"]))
        except (ValueError, LookupError, zipfile.BadZipFile):
            raise DamageError(f"{path}: damaged; delete it, and the same command makes it again") from None
        writer.add_documents(batch.ids, batch.lengths)
        report.text_bytes[key] += text_bytes[key]
        # Once for each part, whatever the number of keys.
        if key == 0:
            report.dropped += len(skipped)
            report.named += skipped[: _NAMED - len(report.named)]

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> None:
        with self._lock:
            if error is None:
                if self._chunks:
                    self._save_part()
                with self._naming():
                    self._publish()
            # What was made is worth keeping when the same job can go on without the bad record.
            can_be_skipped = isinstance(error, BadRecordError) and self.parts
            # No part is worth keeping where the input itself has to be changed.
            if error is None or (isinstance(error, ValueError) and not can_be_skipped):
                shutil.rmtree(self.folder)
