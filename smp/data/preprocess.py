"""Text files to indexed datasets: several processes, ordered output, and a job that continues where it was killed."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from smp.data.files import text_files
from smp.data.files.remote import RemoteFile, file_state, of_size_only
from smp.data.files.text_files import Chunk, is_blank, kind_of, read_chunks, texts_of
from smp.data.indexed_dataset import dtype_for_vocab
from smp.data.job_output import PART_CHUNKS, BadRecordError, Encoded, Output, Report
from smp.data.tokenizers.files import load_tokenizer, tokenizer_key
from smp.data.tokenizers.gigatoken_backend import GigatokenTokenizer
from smp.data.tokenizers.tokenizer import Batch, Tokenizer

_LONGEST = 2**31 - 1
"""Longest document in tokens, with its end: an int32 in the index."""


@dataclass(frozen=True)
class Encoder:
    """The work of one process on a chunk of text.

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
        """Tokens of every record under every key. Raises BadRecordError."""
        skipped: list[str] = []
        rows: dict[int, list[str]] = {}
        for number, record in enumerate(chunk.records, start=chunk.first):
            if is_blank(record, chunk.path):
                continue
            try:
                rows[number] = texts_of(record, chunk.path, number, self.keys)
            except ValueError as error:
                self._skip(str(error), skipped)
        try:
            columns = self._columns(rows.values())
        except ValueError:  # the tokenizer does not say which of the texts it refuses
            for number, texts in list(rows.items()):
                try:
                    self._columns([texts])
                except ValueError as error:
                    self._skip(f"{chunk.path}:{number}: {error}", skipped)
                    del rows[number]
            columns = self._columns(rows.values())
        sizes = [sum(len(texts[key].encode()) for texts in rows.values()) for key in range(len(self.keys))]
        return Encoded(columns, sizes, skipped, chunk.size)

    def _skip(self, why: str, skipped: list[str]) -> None:
        if not self.skip_bad:
            raise BadRecordError(why) from None
        skipped.append(why)

    def _columns(self, rows: Collection[list[str]]) -> list[Batch]:
        return [self._column([texts[i] for texts in rows]) for i in range(len(self.keys))]

    def _column(self, texts: list[str]) -> Batch:
        tokenizer = self.tokenizer
        batch = tokenizer.encode_batch(texts)
        if batch.ids.max(initial=0) >= tokenizer.vocab_size:
            raise ValueError(f"{self.tokenizer_model} gives id {batch.ids.max()} and has {tokenizer.vocab_size}")
        if batch.lengths.max(initial=0) >= _LONGEST:
            raise ValueError(f"a document of {batch.lengths.max()} tokens; an index holds {_LONGEST} at most")
        if self.append_eod:
            batch = batch.with_ends(tokenizer.eod)
        return Batch(batch.ids.astype(dtype_for_vocab(tokenizer.vocab_size)), batch.lengths.astype(np.int32))


@functools.cache
def _load_tokenizer(path: str, pattern: str | None, backend: str) -> Tokenizer:
    """The tokenizer, loaded once per process. Each worker uses one core."""
    # The library tokenizers starts threads of its own otherwise.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(path, pattern)
    return GigatokenTokenizer(tokenizer, path, pattern) if backend == "gigatoken" else tokenizer


def encode_all(encoder: Callable[[Chunk], Encoded], chunks: Iterable[Chunk], workers: int) -> Iterator[Encoded]:
    """``encoder`` of every chunk, in order; at most two chunks per worker are in flight.

    Raises:
        ValueError: bad input.
        ChildProcessError: a worker was killed.
    """
    if workers == 1:
        yield from map(encoder, chunks)
        return
    # Spawned, so that every platform and Python version does the same.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(encoder, chunk))
                # Not more, or all of the input would wait in memory for its turn.
                if len(pending) == 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ChildProcessError("a worker process was killed (out of memory?): try fewer --workers") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """Start of a worker process: it ends when its job is killed, instead of waiting for work for ever; SIGINT, which
    reaches all processes of a terminal, is left to the job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def preprocess(
    paths: Sequence[Path | RemoteFile],
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
        ValueError: bad input, or another job in the same folder. Nothing is left, unless it is a BadRecordError and the
            job already had a part: then --on-error skip can go on.
        OSError: such as a full disk or a killed worker. The job continues from there when it is started again.
    """
    _check_input(paths, encoder.keys)
    _check_backend(encoder, paths, say)
    for line in of_size_only({str(path): file_state(path)[2] for path in paths}):
        say(line)
    output = Output(prefix, names, dtype_for_vocab(encoder.tokenizer.vocab_size), _job(paths, names, encoder))
    if output.parts:
        say(f"continuing after {output.parts} parts that are in {output.folder}")
    try:
        with output:
            _write(paths, encoder, workers, output)
    except BadRecordError:
        if output.parts:
            say(f"{output.folder} keeps {output.parts} parts: the same command with --on-error skip continues")
        raise
    return output.report


def _write(paths: Sequence[Path | RemoteFile], encoder: Encoder, workers: int, output: Output) -> None:
    """Encode everything that is not in ``output`` yet, with a progress bar."""
    chunks = read_chunks(paths, encoder.keys)
    size = sum(file_state(path)[1] for path in paths)
    with tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing") as bar:
        # Read again and dropped: chunks are of the same records every time, and only tokenizing takes long.
        for chunk in islice(chunks, output.parts * PART_CHUNKS):
            bar.update(chunk.size)
        started, tokens = time.monotonic(), 0
        for encoded in encode_all(encoder, chunks, workers):
            output.add(encoded)
            tokens += sum(len(batch.ids) for batch in encoded.columns)
            rate = tokens / max(time.monotonic() - started, 1e-9)
            bar.set_postfix_str(f"{rate / 1e6:.2f} Mtokens/s", refresh=False)
            bar.update(encoded.size)


def _check_input(paths: Sequence[Path | RemoteFile], keys: Sequence[str]) -> None:
    for key in keys:
        if keys.count(key) > 1 or "/" in key:
            why = "named twice" if keys.count(key) > 1 else "cannot be part of a file's name"
            raise ValueError(f"--json-keys {' '.join(keys)}: {key} {why}")
    for path in paths:
        if kind_of(path) == ".txt" and len(keys) > 1:
            raise ValueError(f"{path}: a .txt file holds one text, --json-keys {' '.join(keys)} wants {len(keys)}")


def _job(paths: Sequence[Path | RemoteFile], names: Sequence[str], encoder: Encoder) -> str:
    """A hash of everything that the parts depend on. --on-error may change when a job continues."""
    stats = [file_state(path) for path in paths]
    tokenizer = tokenizer_key(encoder.tokenizer_model, encoder.tiktoken_pattern)
    settings = [tokenizer, list(encoder.keys), encoder.append_eod, text_files.CHUNK_BYTES, PART_CHUNKS]
    return xxhash.xxh3_128_hexdigest(json.dumps([stats, list(names), settings]).encode())


def _check_backend(encoder: Encoder, paths: Sequence[Path | RemoteFile], say: Callable[[str], None]) -> None:
    """Compare a faster back-end with the tokenizer on the first chunk, and tell the result."""
    tokenizer = encoder.tokenizer
    if not isinstance(tokenizer, GigatokenTokenizer):
        return
    texts: list[str] = []
    for chunk in islice(read_chunks(paths, encoder.keys), 1):
        for number, record in enumerate(chunk.records, start=1):
            with suppress(ValueError):  # reported where it is tokenized
                texts += texts_of(record, chunk.path, number, encoder.keys)
    say(tokenizer.check(texts))
