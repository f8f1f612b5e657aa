"""Records from .jsonl, .jsonl.gz, .jsonl.zst and .parquet files, each with the place where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.data.text_files import expand_paths, kind_of, read_chunks


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
        kind = kind_of(path)
        if kind == ".parquet":
            yield from _parquet(path)
        elif kind == ".jsonl":
            for chunk in read_chunks([path], []):
                for number, line in enumerate(chunk.records, start=chunk.first):
                    if line.strip():
                        yield _record(line, f"{path}:{number}")
        else:
            raise ValueError(f"{path}: samples come in .jsonl and .parquet files")


def _record(line: bytes, where: str) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        return Record(where, None, f"not valid JSON ({error})")
    if not isinstance(value, dict):
        return Record(where, None, "not a JSON object")
    return Record(where, value)


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'{path} needs pyarrow: pip install "smp[data]"') from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    # a column that other rows use is null here: the sample does not have it
                    yield Record(f"{path}:{number}", {k: v for k, v in value.items() if v is not None})
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
