"""Text documents from files: .jsonl (one JSON object per line), .parquet (a column per key) and .txt (the whole file),
each also compressed with gzip or zstandard."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from smp.config.blend import COMPRESSED_SUFFIXES, TEXT_SUFFIXES
from smp.config.command import DamageError
from smp.config.commands import pip_install
from smp.data.tokenizer import check_text

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file: the unit of work.

    Attributes:
        path: the file.
        first: number of the first record, from 1 (in .jsonl its line).
        records: lines of .jsonl, the bytes of a .txt file, or rows of .parquet as dictionaries.
        size: bytes of the file that it took to read it.
    """

    path: str
    first: int
    records: list[Any]
    size: int


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """Files of every path or glob pattern, in the order given, each pattern's matches sorted by name. Raises ValueError
    for a pattern that matches no file, or a file that is there twice."""
    paths: list[Path] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in found if Path(name).is_file()]
        if not files:
            raise ValueError(f"{pattern}: no such file")
        paths += files
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ValueError(f"{path}: named twice")
        seen.add(real)
    return paths


def kind_of(path: Path) -> str:
    """``.jsonl``, ``.txt`` or ``.parquet``. Raises ValueError for another kind of file."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    if plain.suffix not in TEXT_SUFFIXES or (plain.suffix == ".parquet" and plain != path):
        raise ValueError(f"{path}: neither .parquet nor .txt nor .jsonl, alone or with .gz or .zst behind it")
    return plain.suffix


def parse_record(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError when there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, thousands of brackets
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def texts_of(record: Any, path: str, number: int, keys: Sequence[str]) -> list[str]:
    """The texts of one record of a chunk. Raises ValueError, which names the file and the line, row or byte, when it is
    no text with a UTF-8 form."""
    if isinstance(record, bytes) and kind_of(Path(path)) == ".txt":
        try:
            return [record.decode()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    row = isinstance(record, dict)
    try:
        found = record if row else parse_record(record)
        texts: list[Any] = [found.get(key) for key in keys]
        if not all(isinstance(text, str) for text in texts):
            problem = "has no text" if row else "not a JSON object with a string"
            raise ValueError(f"{problem} under {', '.join(map(repr, keys))}")
        for text in texts:
            check_text(text)
    except ValueError as error:
        where = f"{path}: row {number}" if row else f"{path}:{number}:"
        raise ValueError(f"{where} {error}") from None
    return texts


def read_texts(paths: Sequence[Path], json_key: str) -> Iterator[str]:
    """Documents of ``paths``, one after the other."""
    for chunk in read_chunks(paths, [json_key]):
        for number, record in enumerate(chunk.records, start=chunk.first):
            yield texts_of(record, chunk.path, number, [json_key])[0]


def read_chunks(paths: Sequence[Path], keys: Sequence[str] | None = None) -> Iterator[Chunk]:
    """The files' records in order, about CHUNK_BYTES of text at a time.

    Args:
        paths: the files.
        keys: columns of .parquet files; None: all.

    Raises:
        ValueError: a file is damaged, has no such column, or needs a library that is not installed.
    """
    for path in paths:
        if kind_of(path) == ".parquet":
            yield from _rows(path, keys)
            continue
        first, before = 1, 0
        try:
            with _opened(path) as (text, raw):
                whole = kind_of(path) == ".txt"
                while records := list(filter(None, [text.read()])) if whole else text.readlines(CHUNK_BYTES):
                    size, before = raw.tell() - before, raw.tell()
                    yield Chunk(str(path), first, records, size)
                    first += len(records)
        except (EOFError, zlib.error, OSError) as error:
            if getattr(error, "errno", None) is not None:  # of the system, not text that cannot be decompressed
                raise
            raise DamageError(f"{path}: damaged after {first - 1} records ({error})") from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The text of a file, uncompressed, and the file itself."""
    with path.open("rb") as raw:
        if path.suffix in COMPRESSED_SUFFIXES and not path.stat().st_size:  # gzip takes it for no text
            raise DamageError(f"{path}: damaged (0 bytes)")
        if path.suffix == ".gz":
            with gzip.open(raw) as text:
                yield cast(BinaryIO, text), raw
        elif path.suffix == ".zst":  # not zstandard, to which a file that was cut off is one that ends
            pyarrow = _pyarrow(path)
            yield cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), CHUNK_BYTES)), raw
        else:
            yield raw, raw


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: needs the library pyarrow: {pip_install('pyarrow')}") from None
    return pyarrow


def _rows(path: Path, keys: Sequence[str] | None) -> Iterator[Chunk]:
    """Chunks of a .parquet file."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            missing = [key for key in keys or () if key not in table.schema_arrow.names]
            if missing:
                known = ", ".join(table.schema_arrow.names)
                raise ValueError(f"{path}: has no column {', '.join(missing)}, but {known}")
            total, groups = max(1, table.metadata.num_rows), range(table.num_row_groups)
            uncompressed = sum(table.metadata.row_group(group).total_byte_size for group in groups)
            at_once = min(total, CHUNK_BYTES * total // max(1, uncompressed)) or 1  # of about CHUNK_BYTES
            first, share = 1, path.stat().st_size / total
            for batch in table.iter_batches(at_once, columns=keys and list(keys)):
                rows = batch.to_pylist()
                yield Chunk(str(path), first, rows, int(share * len(rows)))
                first += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the system, not a page that cannot be decoded
            raise
        raise ValueError(f"{path}: not a parquet file that can be read ({' '.join(str(error).split())})") from None
