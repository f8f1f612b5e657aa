"""Records from .jsonl, .json, .csv (also .gz and .zst), .parquet and .arrow files, each with where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from smp.data.text_files import expand_paths, kind_of, parse_record, read_chunks

Record = bytes | dict[str, Any]
"""One sample as it is in a file: a line of .jsonl, or a row."""


def read_records(patterns: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Every record of every file, in order, with where it stands: ``file:line``, counted from 1 (``file:row`` for
    rows). Blank lines are skipped.

    Raises:
        ValueError: a pattern without a file, a file of an unknown kind or a damaged one, or a library is missing.
    """
    for path in expand_paths(patterns):
        if kind_of(path) == ".txt":
            raise ValueError(f"{path}: samples come in .jsonl, .json, .csv, .parquet and .arrow files")
        for chunk in read_chunks([path]):
            for number, record in enumerate(chunk.records, start=chunk.first):
                if not isinstance(record, bytes) or record.strip():
                    yield f"{path}:{number}", record


def parse(record: Record) -> dict[str, Any]:
    """What stands there. Raises ValueError when that is no JSON object."""
    if isinstance(record, dict):  # a column that other rows use is null here: the sample does not have it
        return {key: value for key, value in record.items() if value is not None}
    return parse_record(record)
