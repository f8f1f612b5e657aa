r"""Tokenize .jsonl files into Megatron's indexed dataset.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-model tokenizer.model \
        --output-prefix corpus --append-eod --workers 8

Writes <output-prefix>_<key>_document.bin and .idx for every key; the prefix without .bin is what --data-path takes.
The bytes do not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from smp.data.indexed_dataset import IndexedDatasetWriter, dtype_for_vocab
from smp.data.jsonl import expand_paths, parse_record
from smp.data.tokenizer import SentencePieceTokenizer

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of one file: the unit of work."""

    path: str
    first_line: int
    lines: list[bytes]


@dataclass(frozen=True)
class Encoder:
    """What a worker does with a chunk."""

    tokenizer_model: str
    keys: tuple[str, ...]
    append_eod: bool

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokens of every line under every key. Raises ValueError naming the file and line."""
        encoded = Encoded(sum(map(len, chunk.lines)))
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            where = f"{chunk.path}:{number}"
            texts = parse_record(line, self.keys, where)
            try:
                encoded.documents.append([self._tokens(text) for text in texts])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            encoded.text_bytes.append([len(text.encode()) for text in texts])
        return encoded

    def _tokens(self, text: str) -> np.ndarray:
        tokenizer = _load_tokenizer(self.tokenizer_model)
        ids = tokenizer.encode(text)
        if ids and self.append_eod:  # as in Megatron: an empty text stays an empty document
            ids.append(tokenizer.eod)
        return np.array(ids, dtype=dtype_for_vocab(tokenizer.vocab_size))


@dataclass
class Encoded:
    """A chunk's result, one entry per line, one per key in each."""

    size: int  # bytes of input
    documents: list[list[np.ndarray]] = field(default_factory=list)
    text_bytes: list[list[int]] = field(default_factory=list)


@functools.cache
def _load_tokenizer(path: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(path)  # once per process


def read_chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """The files' lines in order, about CHUNK_BYTES at a time."""
    for path in paths:
        first = 1
        with path.open("rb") as file:
            while lines := file.readlines(CHUNK_BYTES):
                yield Chunk(str(path), first, lines)
                first += len(lines)


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
    tokens: int = 0
    text_bytes: int = 0

    def add(self, tokens: int, text_bytes: int) -> None:
        self.documents += 1
        self.tokens += tokens
        self.text_bytes += text_bytes

    def __str__(self) -> str:
        ratio = f"{self.text_bytes / self.tokens:.4f}" if self.tokens else "no"
        return f"{self.documents} documents, {self.tokens} tokens, {ratio} bytes per token"


def preprocess(paths: Sequence[Path], prefixes: Sequence[str], encoder: Encoder, workers: int) -> list[Totals]:
    """Write one dataset per key of ``encoder``, named by ``prefixes``; returns what went into each."""
    dtype = dtype_for_vocab(_load_tokenizer(encoder.tokenizer_model).vocab_size)
    totals = [Totals() for _ in prefixes]
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        size = sum(path.stat().st_size for path in paths)
        bar = stack.enter_context(tqdm(total=size, unit="B", unit_scale=True, desc="tokenizing"))
        for encoded in encode_all(encoder, read_chunks(paths), workers):
            for documents, sizes in zip(encoded.documents, encoded.text_bytes, strict=True):
                for writer, total, tokens, text_bytes in zip(writers, totals, documents, sizes, strict=True):
                    writer.add_document(tokens)
                    total.add(len(tokens), text_bytes)
            bar.update(encoded.size)
    return totals


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl files or glob patterns, in this order")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenize (default: text)")
    parser.add_argument("--output-prefix", required=True, help="output path without _<key>_document.bin")
    parser.add_argument("--tokenizer-model", required=True, help="sentencepiece .model file")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    prefixes = [f"{args.output_prefix}_{key}_document" for key in args.json_keys]
    try:
        if args.workers < 1:
            raise ValueError(f"--workers {args.workers} is not at least 1")
        encoder = Encoder(args.tokenizer_model, tuple(args.json_keys), args.append_eod)
        totals = preprocess(expand_paths(args.input), prefixes, encoder, args.workers)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    for prefix, total in zip(prefixes, totals, strict=True):
        print(f"{prefix}: {total}")


if __name__ == "__main__":
    main()
