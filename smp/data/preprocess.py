"""Text files to indexed datasets: several processes, ordered output, and a job that goes on where it was killed.

A job works in the folder PREFIX.partial: the tokens and the lengths so far, and a journal that says how much of both
belongs to the part of the input that is done. A job that is started again cuts both to that and goes on. The files get
their names at the end, so under those names there is never a half-written dataset.
"""

from __future__ import annotations

import fcntl
import functools
import json
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from tqdm import tqdm

from smp.data.gigatoken_backend import GigatokenTokenizer
from smp.data.indexed_dataset import dtype_for_vocab, publish, write_index
from smp.data.text_files import Chunk, kind_of, read_chunks, texts_of
from smp.data.tokenizer import Tokenizer, check_text
from smp.data.tokenizer_files import load_tokenizer

_JOURNAL_SECONDS = 5.0
_NAMED = 10
"""Skipped records that are named one by one."""


@dataclass(frozen=True)
class Encoder:
    """What a worker does with a chunk.

    Attributes:
        tokenizer_model, tiktoken_pattern, backend: which tokenizer.
        keys: what is tokenized of every record.
        append_eod: end every document with the end-of-document token.
        skip_bad: leave out records that are no text under every key, and not fail.
    """

    tokenizer_model: str
    keys: tuple[str, ...]
    append_eod: bool
    tiktoken_pattern: str | None = None
    backend: str = "reference"
    skip_bad: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return _load_tokenizer(self.tokenizer_model, self.tiktoken_pattern, self.backend)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokens of every record under every key. Raises ValueError naming the file and line."""
        rows, skipped = [], []
        for number, record in enumerate(chunk.records, start=chunk.first):
            try:
                texts = texts_of(record, chunk.path, number, self.keys)
                for text in texts:
                    _check(text, f"{chunk.path}:{number}")
                rows.append(texts)
            except ValueError as error:
                if not self.skip_bad:
                    raise
                skipped.append(str(error))
        columns = [[row[i] for row in rows] for i in range(len(self.keys))]
        place = (chunk.file, chunk.end, chunk.first + len(chunk.records))
        return Encoded([self._column(texts) for texts in columns], skipped, place, chunk.size)

    def _column(self, texts: list[str]) -> Column:
        tokenizer = self.tokenizer
        batch = tokenizer.encode_batch(texts)
        if self.append_eod:
            batch = batch.with_ends(tokenizer.eod)
        ids = batch.ids.astype(dtype_for_vocab(tokenizer.vocab_size))
        return Column(ids.tobytes(), batch.lengths.astype("<i4").tobytes(), sum(map(_utf8_bytes, texts)))


def _check(text: str, where: str) -> None:
    try:
        check_text(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


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


@functools.cache
def _load_tokenizer(path: str, pattern: str | None, backend: str) -> Tokenizer:
    """Once per process, which is one of the workers: it uses one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(path, pattern)
    return GigatokenTokenizer(tokenizer, path, pattern) if backend == "gigatoken" else tokenizer


def encode_all(encoder: Callable[[Chunk], Encoded], chunks: Iterable[Chunk], workers: int) -> Iterator[Encoded]:
    """``encoder`` of every chunk, in order; at most two chunks per worker are in flight.

    Raises:
        ValueError: bad input, or a worker was killed.
    """
    if workers == 1:
        yield from map(encoder, chunks)
        return
    # Spawned, so that every platform and Python version does the same.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(encoder, chunk))
                if len(pending) == 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ValueError("a worker process was killed (out of memory?): try fewer --workers") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


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
    """

    job: str
    next: tuple[int, int, int]
    totals: list[Totals]
    dropped: int = 0
    named: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Journal:
        known = json.loads(path.read_text())
        totals = [Totals(**total) for total in known.pop("totals")]
        return cls(**{**known, "next": tuple(known["next"]), "totals": totals})


class Output:
    """The partial files of a job. A context manager: bad input removes them, anything else leaves them to go on from.

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
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"{self.folder}: another process is writing {prefix}") from None
        path = self.folder / "journal.json"
        self.resumed = path.exists()
        self.journal = Journal.read(path) if self.resumed else Journal(job, (0, 0, 1), [Totals() for _ in names])
        if self.journal.job != job:
            raise ValueError(f"{self.folder}: left by a job with other input or settings; delete it to start anew")

    def __enter__(self) -> Output:
        self._tokens = [self._opened(i, "bin", t.tokens * self.dtype.itemsize) for i, t in enumerate(self._totals)]
        self._lengths = [self._opened(i, "lengths", t.documents * 4) for i, t in enumerate(self._totals)]
        self._written = time.monotonic()
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
        for i, column in enumerate(encoded.columns):
            self._tokens[i].write(column.tokens)
            self._lengths[i].write(column.lengths)
            self._totals[i].add(column)
        journal = self.journal
        journal.next = encoded.next
        journal.dropped += len(encoded.skipped)
        journal.named += encoded.skipped[: _NAMED - len(journal.named)]
        if time.monotonic() - self._written > _JOURNAL_SECONDS:
            self._sync()
            self.journal.write(self.folder / "journal.json")
            self._written = time.monotonic()

    def _sync(self) -> None:
        for file in (*self._tokens, *self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Give everything its name."""
        self._sync()
        for i in range(len(self.names)):
            path = self._path(i, "lengths")
            lengths = np.memmap(path, "<i4", "r") if path.stat().st_size else np.empty(0, "<i4")
            documents = np.concatenate(([0], np.cumsum(lengths > 0)))  # an empty document has no sequence
            write_index(self._path(i, "idx"), self.dtype, lengths[lengths > 0], documents)
        for i, name in enumerate(self.names):
            publish(self._path(i, "bin"), self._path(i, "idx"), name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> None:
        finished = kind is not None and issubclass(kind, ValueError)  # bad input: there is nothing to go on with
        try:
            if kind is None:
                self.commit()
                finished = True
        finally:
            for file in (*self._tokens, *self._lengths):
                with suppress(OSError):  # what could not be written was reported where it was needed
                    file.close()
            if finished:
                shutil.rmtree(self.folder)
            self._lock.close()


@dataclass(frozen=True)
class Report:
    """What a job did.

    Attributes:
        totals: of each key.
        dropped: records left out, and why for the first of them.
        resumed_at: documents that an earlier start of the job had written.
    """

    totals: list[Totals]
    dropped: int
    named: list[str]
    resumed_at: int


def preprocess(
    paths: Sequence[Path],
    prefix: str,
    names: Sequence[str],
    encoder: Encoder,
    workers: int,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Write one dataset per key of ``encoder``.

    Args:
        paths: text files.
        prefix: the job's folder is PREFIX.partial.
        names: prefix of the dataset of each key.
        encoder: what to do with a record.
        workers: processes; the bytes do not depend on them.
        say: tells the user a line.

    Raises:
        ValueError: bad input, or another job in the same place; nothing is left.
        OSError: such as a full disk. The job goes on from there when it is started again.
    """
    for path in paths:
        kind_of(path)
    dtype = dtype_for_vocab(encoder.tokenizer.vocab_size)
    _check_backend(encoder, paths, say)
    with Output(prefix, names, dtype, _job(paths, names, encoder)) as output:
        journal, resumed_at = output.journal, output.journal.totals[0].documents
        if output.resumed:
            say(f"going on after {resumed_at} documents that are in {output.folder}")
        with ExitStack() as stack:
            sizes = [path.stat().st_size for path in paths]
            size, done = sum(sizes), sum(sizes[: journal.next[0]])
            bar = tqdm(total=size, initial=done, unit="B", unit_scale=True, desc="tokenizing", mininterval=0.5)
            stack.enter_context(bar)
            started, before = time.monotonic(), sum(total.tokens for total in journal.totals)
            for encoded in encode_all(encoder, read_chunks(paths, encoder.keys, journal.next), workers):
                output.add(encoded)
                tokens = sum(total.tokens for total in journal.totals) - before
                rate = tokens / max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{rate / 1e6:.2f} Mtokens/s", refresh=False)
                bar.update(encoded.size)
    return Report(journal.totals, journal.dropped, journal.named, resumed_at)


def _job(paths: Sequence[Path], names: Sequence[str], encoder: Encoder) -> str:
    """Stands for everything that the output depends on. Whether bad records are skipped may change on the way."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    tokenizer = xxhash.xxh3_64_hexdigest(Path(encoder.tokenizer_model).read_bytes())
    settings = [tokenizer, encoder.tiktoken_pattern, list(encoder.keys), encoder.append_eod]
    return xxhash.xxh3_128_hexdigest(json.dumps([stats, list(names), settings]).encode())


def _check_backend(encoder: Encoder, paths: Sequence[Path], say: Callable[[str], None]) -> None:
    """Compare a faster back-end with the tokenizer on the first chunk, and say so."""
    tokenizer = encoder.tokenizer
    if not isinstance(tokenizer, GigatokenTokenizer):
        return
    chunk = next(read_chunks(paths, encoder.keys), None)
    texts: list[str] = []
    for number, record in enumerate(chunk.records if chunk else [], start=1):
        try:
            found = texts_of(record, str(paths[0]), number, encoder.keys)
            for text in found:
                check_text(text)
            texts += found
        except ValueError:
            continue  # reported where it is tokenized
    say(tokenizer.check(texts))
