"""Text documents from files: .jsonl (one JSON object per line), .txt (the whole file), and rows of .parquet, .arrow,
.csv and .json (one array), see ``tables``; text also compressed with gzip or zstandard."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from smp.config.blend import COMPRESSED_SUFFIXES, TEXT_SUFFIXES, is_remote
from smp.config.command_line.command import DamageError
from smp.data.files.folders import files_of
from smp.data.files.remote import RemoteFile, expand, file_state, local_or_remote
from smp.data.files.tables import (
    arrow_rows,
    csv_rows,
    json_array,
    objects_over_lines,
    parquet_rows,
    pyarrow_for,
    unique_keys,
)
from smp.data.tokenizers.tokenizer import check_text

CHUNK_BYTES = 1 << 20
_OF_PYARROW = (".parquet", ".arrow")


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file: the unit of work.

    Attributes:
        path: the file.
        first: number of the first record, from 1 (in .jsonl its line).
        records: lines of .jsonl, the bytes of a .txt file, or rows as dictionaries.
        size: bytes of the file that it took to read it.
    """

    path: str
    first: int
    records: list[Any]
    size: int


def expand_paths(patterns: Sequence[str]) -> list[Path | RemoteFile]:
    """Files of every path, folder, glob pattern or URL, in the order given, each pattern's matches sorted by name.
    Raises ValueError for a pattern that matches no file, or a file that is there twice."""
    paths: list[Path | RemoteFile] = []
    for pattern in patterns:
        if is_remote(pattern):
            paths += expand(pattern)
            continue
        if Path(pattern).is_dir():
            paths += files_of(Path(pattern))
            continue
        # A name that is a file is no pattern, whatever characters it has.
        found = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in found if Path(name).is_file()]
        if not files:
            raise ValueError(f"{pattern}: no such file")
        paths += files
    seen: set[str] = set()
    for path in paths:
        # By what it leads to: a link to a file that is named too would train it twice.
        real = path.url if isinstance(path, RemoteFile) else os.path.realpath(path)
        if real in seen:
            raise ValueError(f"{path}: named twice")
        seen.add(real)
    return paths


def kind_of(path: Path | RemoteFile) -> str:
    """``.jsonl``, ``.json``, ``.csv``, ``.txt``, ``.parquet`` or ``.arrow``. Raises ValueError for another kind of
    file."""
    plain = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    if plain.suffix not in TEXT_SUFFIXES or (plain.suffix in _OF_PYARROW and plain != path):
        raise ValueError(
            f"{path}: neither .parquet nor .arrow, nor .txt, .jsonl, .json or .csv, alone or with .gz or .zst after it"
        )
    return plain.suffix


def parse_record(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ValueError when it is not one."""
    if not isinstance(line, bytes):  # an element of an array
        raise ValueError("not a JSON object")
    try:
        record = json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, thousands of brackets
        raise ValueError(f"not valid JSON ({error}){_json_hint(line, error)}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object{_list_hint(record)}")
    return record


def _json_hint(line: bytes, error: Exception) -> str:
    """A hint at what the writer of the file probably did."""
    if b"\0" in line:
        return "; it looks like UTF-16: write the file in UTF-8"
    if isinstance(error, UnicodeDecodeError):
        return "; write the file in UTF-8"
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
        after = line.decode("utf-8-sig")[error.pos :].lstrip()[:1]
        return {
            ",": "; a comma stands after the object, which a line of .jsonl does not have",
            "{": "; a line of .jsonl has one object",
        }.get(after, "")
    return ""


def _list_hint(record: Any) -> str:
    if not isinstance(record, list) or not all(isinstance(entry, dict) for entry in record):
        return ""
    if all({"role", "content"} <= entry.keys() or {"from", "value"} <= entry.keys() for entry in record):
        return ' but a list of messages: write {"messages": [...]}'
    return " but a list of them: write one on each line, or call the file .json"


def is_blank(record: Any, path: str) -> bool:
    """Whether a record is an empty line, such as editors leave at the end of .jsonl: all readers skip it. (A .txt file
    is one text, not lines.)"""
    empty = isinstance(record, bytes) and not record.removeprefix(BOM_UTF8).strip()
    return empty and kind_of(local_or_remote(path)) != ".txt"


def texts_of(record: Any, path: str, number: int, keys: Sequence[str]) -> list[str]:
    """The texts of one record of a chunk. Raises ValueError with file and line, row or byte, when it is not a text with
    a UTF-8 form."""
    if isinstance(record, bytes) and kind_of(local_or_remote(path)) == ".txt":
        try:
            return [record.decode("utf-8-sig")]
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


def read_texts(paths: Sequence[Path | RemoteFile], json_key: str) -> Iterator[str]:
    """Documents of ``paths``, one after the other."""
    for chunk in read_chunks(paths, [json_key]):
        for number, record in enumerate(chunk.records, start=chunk.first):
            if is_blank(record, chunk.path):
                continue
            yield texts_of(record, chunk.path, number, [json_key])[0]


def read_chunks(paths: Sequence[Path | RemoteFile], keys: Sequence[str] | None = None) -> Iterator[Chunk]:
    """The files' records in order, about CHUNK_BYTES of text at a time.

    Args:
        paths: the files.
        keys: columns of .parquet and .arrow files; None: all.

    Raises:
        ValueError: a file is damaged, has no such column, or needs a library that is not installed.
    """
    for path in paths:
        first, kind = 1, kind_of(path)
        if kind in _OF_PYARROW:
            rows = parquet_rows(path, keys, CHUNK_BYTES) if kind == ".parquet" else arrow_rows(path, keys)
            for records, size in rows:
                yield Chunk(str(path), first, records, size)
                first += len(records)
            continue
        before = 0
        try:
            with _opened(path) as (text, raw):
                for records in _parts(path, kind, text):
                    # Of the compressed file: its size is what progress is measured by.
                    size, before = raw.tell() - before, raw.tell()
                    yield Chunk(str(path), first, records, size)
                    first += len(records)
        except (EOFError, zlib.error, OSError) as error:
            if getattr(error, "errno", None) is not None:  # an error of the system, not of compression
                raise
            raise DamageError(f"{path}: damaged after {first - 1} records ({error})") from None


def _parts(path: Path | RemoteFile, kind: str, text: BinaryIO) -> Iterator[list[Any]]:
    """Records of a text file, some at a time."""
    if kind == ".txt":
        # An empty file has no record.
        yield from filter(all, [[text.read()]])
        return
    if kind == ".csv":
        yield from csv_rows(path, text)
        return
    head = _first_character(text) if kind == ".json" else b""
    # .json may also be one object per line.
    if kind == ".json" and head[-1:] != b"{":
        try:
            yield from json_array(path, (head + text.read()).decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
        return
    lines = text.readlines(CHUNK_BYTES)
    if head:
        # The bytes that were looked at belong to the first line.
        lines = [*io.BytesIO(head + b"".join(lines[:1])).readlines(), *lines[1:]]
    if _over_lines(lines):
        whole = b"".join(lines) + text.read()
        lines = objects_over_lines(whole) or io.BytesIO(whole).readlines()
    while lines:
        yield lines
        lines = text.readlines(CHUNK_BYTES)


def _over_lines(lines: Sequence[bytes]) -> bool:
    """Whether the first JSON object of consecutive lines ends on a later line than it begins on."""
    begin = next((i for i, line in enumerate(lines) if line.removeprefix(BOM_UTF8).strip()), len(lines))
    text = b"".join(lines[begin:]).decode("utf-8-sig", "replace").lstrip()
    try:
        return text.startswith("{") and "\n" in text[: json.JSONDecoder().raw_decode(text)[1]]
    except json.JSONDecodeError as error:
        return error.pos >= len(text.rstrip()) - 1  # the object is only cut off where reading stopped
    except RecursionError:
        return False


def _first_character(text: BinaryIO) -> bytes:
    """White space up to the first other byte, and that byte; without a byte order mark."""
    head = b""
    while (byte := text.read(1)) and (byte.isspace() or byte in BOM_UTF8):
        head += b"" if byte in BOM_UTF8 else byte
    return head + byte


@contextmanager
def _opened(path: Path | RemoteFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the uncompressed text of a file, the file itself)."""
    with path.open("rb") as raw:
        if path.suffix in COMPRESSED_SUFFIXES and not file_state(path)[1]:  # gzip takes it for no text
            raise DamageError(f"{path}: damaged (0 bytes)")
        if path.suffix == ".gz":
            with gzip.open(raw) as text:
                yield cast(BinaryIO, text), raw
        elif path.suffix == ".zst":  # not the library zstandard, which takes a truncated file for a complete one
            pyarrow = pyarrow_for(path)
            yield cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), CHUNK_BYTES)), raw
        else:
            yield raw, raw
