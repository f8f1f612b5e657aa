"""Files whose records are rows: .parquet, .arrow (what the library datasets saves), .csv with a header, and .json with
one array of objects. Rows come as dictionaries, some at a time."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from smp.config.command_line.commands import pip_install
from smp.data.files.remote import RemoteFile, file_state

Rows = tuple[list[dict[str, Any]], int]
"""Consecutive rows, and the bytes of the file that they take."""

_AT_ONCE = 1000
_LONGEST_FIELD = (1 << 31) - 1
_SPACE = " \t\r\n"


def pyarrow_for(path: Path | RemoteFile) -> Any:
    """The library pyarrow with its readers. Raises ValueError when it is not installed."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: needs the library pyarrow: {pip_install('pyarrow')}") from None
    return pyarrow


def _source(path: Path | RemoteFile) -> AbstractContextManager[Any]:
    """A context with what pyarrow reads a .parquet file from."""
    return nullcontext(path) if isinstance(path, Path) else path.open()


def parquet_rows(path: Path | RemoteFile, keys: Sequence[str] | None, chunk_bytes: int) -> Iterator[Rows]:
    """Rows of a .parquet file; ``keys``: columns, by default all. Raises ValueError when it lacks one or is damaged."""
    pyarrow = pyarrow_for(path)
    try:
        with _source(path) as file, pyarrow.parquet.ParquetFile(file) as table:
            _check_columns(path, table.schema_arrow.names, keys)
            total, groups = max(1, table.metadata.num_rows), range(table.num_row_groups)
            uncompressed = sum(table.metadata.row_group(group).total_byte_size for group in groups)
            # By the mean size of a row; nothing says how large each is.
            # Memory is what counts: uncompressed bytes.
            at_once = min(total, chunk_bytes * total // max(1, uncompressed)) or 1  # of about chunk_bytes
            share = file_state(path)[1] / total
            for batch in table.iter_batches(at_once, columns=keys and list(keys)):
                rows = batch.to_pylist()
                yield rows, int(share * len(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(error, path, "parquet") from None


def arrow_rows(path: Path | RemoteFile, keys: Sequence[str] | None) -> Iterator[Rows]:
    """Rows of an .arrow file, streamed or with an index. Raises ValueError as :func:`parquet_rows`."""
    pyarrow = pyarrow_for(path)
    try:
        # A stream format file does not open as one with an index, and the other way round.
        with pyarrow.memory_map(str(path)) if isinstance(path, Path) else path.open() as file:
            try:
                batches = pyarrow.ipc.open_stream(file)
                _check_columns(path, batches.schema.names, keys)
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(file)
                _check_columns(path, table.schema.names, keys)
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
            for batch in batches:
                chosen = batch if keys is None else batch.select(list(keys))
                for first in range(0, chosen.num_rows, _AT_ONCE):
                    part = chosen.slice(first, _AT_ONCE)
                    yield part.to_pylist(), part.nbytes
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(error, path, "arrow") from None


def csv_rows(path: Path | RemoteFile, file: BinaryIO) -> Iterator[list[dict[str, Any]]]:
    """Rows of UTF-8 text whose first line names the columns, between commas, else semicolons, tabs or bars; all values
    are text.

    Raises:
        ValueError: a row has more fields than there are columns, or it is no such file.
    """
    csv.field_size_limit(_LONGEST_FIELD)  # the default of 128 KiB is less than documents have
    # utf-8-sig: spreadsheet programs write a byte order mark.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    number = 0
    try:
        first = text.readline()
        if said := re.fullmatch(r"sep=(.)\s*", first):  # as Excel writes it
            first = text.readline()
        rows = csv.DictReader(chain([first], text), strict=True, delimiter=said[1] if said else _delimiter(first))
        rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]  # "prompt, completion"
        while found := list(islice(rows, _AT_ONCE)):
            for number, row in enumerate(found, start=number + 1):  # noqa: B020 (continues counting)
                if None in row:
                    raise ValueError(f"row {number} has more fields than the {len(row) - 1} of the first line")
            yield found
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a .csv file that can be read, after row {number} ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    finally:
        text.detach()  # the caller closes the file


def _delimiter(header: str) -> str:
    """The sign between the names of columns: a comma, unless only another one separates them."""
    signs = (sign for sign in ",;\t|" if len(next(csv.reader([header], delimiter=sign), [])) > 1)
    return next(signs, ",")


def objects_over_lines(content: bytes) -> list[bytes] | None:
    """JSON objects that take several lines each: each one instead of its first line, with empty lines for the others,
    so that a record's number is its line. None: the file holds something else."""
    decoder, records, counted = json.JSONDecoder(), list[bytes](), 0
    try:
        text = content.decode("utf-8-sig")
        at, line = _skip(text, 0), 0
        while at < len(text):
            # Only the text since the last object is counted.
            line, counted = line + text.count("\n", counted, at), at
            value, end = decoder.raw_decode(text, at)
            if not isinstance(value, dict):
                return None
            records += [b""] * (line - len(records))
            records.append(text[at:end].encode())
            at = _skip(text, end)
    except (ValueError, RecursionError):
        return None
    return records


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where a key is there twice: JSON does not say which value counts, and Python
    drops all except the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


def json_array(path: Path | RemoteFile, text: str) -> Iterator[list[Any]]:
    """Elements of a JSON array, decoded a thousand at a time.

    Raises:
        ValueError: it is no array, or damaged.
    """
    decoder, at, found = json.JSONDecoder(object_pairs_hook=unique_keys), _skip(text, 0), list[Any]()
    if text[at : at + 1] != "[":
        raise ValueError(f"{path}: neither a JSON array nor a JSON object on each line")
    at = _skip(text, at + 1)
    try:
        while text[at : at + 1] != "]":
            # One element at a time: the text is in memory, but never all of its objects at once.
            element, at = decoder.raw_decode(text, at)
            found.append(element)
            at = _skip(text, at)
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)
                if text[at : at + 1] == "]":
                    raise ValueError(f"no element after the comma, at character {at}")
            elif text[at : at + 1] != "]":
                raise ValueError(f"no comma or bracket at character {at}")
            if len(found) == _AT_ONCE:
                yield found
                found = []
        if (at := _skip(text, at + 1)) < len(text):
            raise ValueError(f"more after the array, at character {at}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON array that can be read ({error})") from None
    if found:
        yield found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _check_columns(path: Path | RemoteFile, names: Sequence[str], keys: Sequence[str] | None) -> None:
    missing = [key for key in keys or () if key not in names]
    if missing:
        raise ValueError(f"{path}: has no column {', '.join(missing)}, but {', '.join(names)}")


def _unreadable(error: Exception, path: Path | RemoteFile, kind: str) -> Exception:
    if getattr(error, "errno", None) is not None:  # an error of the system, not of the format
        return error
    return ValueError(f"{path}: not a {kind} file that can be read ({' '.join(str(error).split())})")
