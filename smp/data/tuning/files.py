"""Records from .jsonl, .jsonl.gz, .jsonl.zst and .parquet files, each with the place where it stands."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from smp.data.jsonl import expand_paths

_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


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
        ValueError: a pattern without a file, a file of an unknown kind or one that cannot be unpacked, or a library is
            missing.
    """
    for path in expand_paths(patterns):
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.name.endswith(_ENDINGS):
            yield from _lines(path)
        else:
            raise ValueError(f"{path}: not one of {', '.join(_ENDINGS)}")


def _lines(path: Path) -> Iterator[Record]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record(line, f"{path}:{number}")
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(f'{path} needs zstandard: pip install "smp[data]"') from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True))
    return path.open("rb")


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
