"""Text documents from files: .jsonl (one JSON object per line), .parquet (a column per key) and .txt (the whole file),
each also compressed with gzip or zstandard."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from smp.config.blend import COMPRESSED_SUFFIXES, TEXT_SUFFIXES
from smp.config.command import DamageError
from smp.data.tokenizer import check_text

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file: the unit of work.

    Attributes:
        path: the file.
        file: its number among the inputs.
        first: number of the first record, from 1 (in .jsonl its line).
        records: lines of .jsonl, the bytes of a .txt file, or rows of .parquet as dictionaries.
        end: where the next chunk begins: bytes of (uncompressed) text, or rows.
        size: bytes of the file that it took to read it.
    """

    path: str
    file: int
    first: int
    records: list[Any]
    end: int
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


def read_chunks(
    paths: Sequence[Path], keys: Sequence[str] | None = None, start: tuple[int, int, int] = (0, 0, 1)
) -> Iterator[Chunk]:
    """The files' records in order, about CHUNK_BYTES of text at a time.

    Args:
        paths: the files.
        keys: columns of .parquet files; None: all.
        start: of the first chunk wanted: number of the file, ``end`` of the chunk before, number of the record.

    Raises:
        ValueError: a file is damaged, has no such column, or needs a library that is not installed.
    """
    for file, path in enumerate(paths):
        if file < start[0]:
            continue
        at, first = start[1:] if file == start[0] else (0, 1)
        if kind_of(path) == ".parquet":
            yield from _rows(path, file, keys, at)
            continue
        try:
            with _opened(path) as (text, raw):
                _skip(text, at)
                before = raw.tell() if at else 0
                while records := text.readlines(CHUNK_BYTES) if kind_of(path) == ".jsonl" else _whole(text):
                    at += sum(map(len, records))
                    size, before = raw.tell() - before, raw.tell()
                    yield Chunk(str(path), file, first, records, at, size)
                    first += len(records)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DamageError(f"{path}: damaged after {at} bytes of text, about record {first} ({error})") from None


def _whole(text: BinaryIO) -> list[bytes]:
    """The rest of a file as one record, unless it is at its end."""
    record = text.read()
    return [record] if record else []


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The text of a file, uncompressed, and the file itself."""
    with path.open("rb") as raw:
        if path.suffix in COMPRESSED_SUFFIXES and not path.stat().st_size:  # both libraries take it for no text
            raise DamageError(f"{path}: damaged (0 bytes)")
        if path.suffix == ".gz":
            with gzip.open(raw) as text:
                yield cast(BinaryIO, text), raw
        elif path.suffix == ".zst":
            try:
                import zstandard
            except ImportError:
                raise ValueError(f"{path}: needs the library zstandard: pip install 'smp[data]'") from None
            try:
                frames = _Frames(raw, zstandard.ZstdDecompressor().decompressobj)
                yield cast(BinaryIO, io.BufferedReader(frames, CHUNK_BYTES)), raw
            except zstandard.ZstdError as error:
                raise DamageError(f"{path}: damaged ({error})") from None
        else:
            yield raw, raw


class _Frames(io.RawIOBase):
    """The text of a .zst file, frame by frame; one that stops in the middle of a frame is an error, not an end."""

    def __init__(self, raw: BinaryIO, new_frame: Callable[[], Any]) -> None:
        self._raw, self._new_frame = raw, new_frame
        self._frame: Any = None
        self._data = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            data = self._data or self._raw.read(CHUNK_BYTES)
            if not data and self._frame is not None:
                raise EOFError("it ends in the middle of a frame")
            if not data:
                return 0
            frame = self._frame or self._new_frame()
            self._text = memoryview(frame.decompress(data))
            self._data = frame.unused_data  # the beginning of the next frame
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._text))
        buffer[:count], self._text = self._text[:count], self._text[count:]
        return count


def _skip(text: BinaryIO, count: int) -> None:
    if text.seekable():
        text.seek(count)
    else:
        while count > 0 and (skipped := text.read(min(count, CHUNK_BYTES))):
            count -= len(skipped)


def _rows(path: Path, file: int, keys: Sequence[str] | None, skip: int) -> Iterator[Chunk]:
    """Chunks of a .parquet file from row ``skip`` on, row group by row group."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: needs the library pyarrow: pip install 'smp[data]'") from None
    try:
        with parquet.ParquetFile(path) as table:
            missing = [key for key in keys or () if key not in table.schema_arrow.names]
            if missing:
                known = ", ".join(table.schema_arrow.names)
                raise ValueError(f"{path}: has no column {', '.join(missing)}, but {known}")
            row, share = 0, path.stat().st_size / max(1, table.metadata.num_rows)
            for group in range(table.num_row_groups):
                meta = table.metadata.row_group(group)
                if row + meta.num_rows <= skip:
                    row += meta.num_rows
                    continue
                for batch in table.iter_batches(_rows_at_once(meta), row_groups=[group], columns=keys and list(keys)):
                    rows = batch.slice(max(0, skip - row)).to_pylist()
                    row += batch.num_rows
                    if rows:
                        yield Chunk(str(path), file, row - len(rows) + 1, rows, row, int(share * len(rows)))
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the system, not a page that cannot be decoded
            raise
        raise ValueError(f"{path}: not a parquet file that can be read ({' '.join(str(error).split())})") from None


def _rows_at_once(group: Any) -> int:
    """Rows of about CHUNK_BYTES."""
    return max(1, min(group.num_rows, CHUNK_BYTES * group.num_rows // max(1, group.total_byte_size)))
