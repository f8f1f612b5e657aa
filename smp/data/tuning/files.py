"""Records from .jsonl, .jsonl.gz, .jsonl.zst and .parquet files, each with where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smp.data.text_files import expand_paths, kind_of, parse_record, read_chunks


@dataclass(frozen=True)
class Record:
    """One sample as it is in a file.

    Attributes:
        where: ``file:line``, counted from 1 (``file:row`` for parquet).
        value: what stands there; None when that is no JSON object.
        problem: why not.
    """

    where: str
    value: dict[str, Any] | None
    problem: str = ""


def read_records(patterns: Sequence[str]) -> Iterator[Record]:
    """Every record of every file, in order; blank lines are skipped.

    Raises:
        ValueError: a pattern without a file, a file of an unknown kind or a damaged one, or a library is missing.
    """
    for path in expand_paths(patterns):
        if kind_of(path) == ".txt":
            raise ValueError(f"{path}: samples come in .jsonl and .parquet files")
        for chunk in read_chunks([path]):
            for number, record in enumerate(chunk.records, start=chunk.first):
                if isinstance(record, dict) or record.strip():
                    yield _parsed(record, f"{path}:{number}")


def _parsed(record: Any, where: str) -> Record:
    if isinstance(record, dict):  # a column that other rows use is null here: the sample does not have it
        return Record(where, {key: value for key, value in record.items() if value is not None})
    try:
        return Record(where, parse_record(record))
    except ValueError as error:
        return Record(where, None, str(error))
