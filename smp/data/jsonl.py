"""Text documents from .jsonl (one JSON object per line) and .txt files."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """Files of every path or glob pattern, in the order given, each pattern's matches sorted by name.

    Raises:
        ValueError: a pattern that matches no file.
    """
    paths: list[Path] = []
    for pattern in patterns:
        found = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in found if Path(name).is_file()]
        if not files:
            raise ValueError(f"{pattern}: no such file")
        paths += files
    return paths


def parse_record(line: bytes, keys: Sequence[str], where: str) -> list[str]:
    """The texts that one JSON line holds under ``keys``.

    Raises:
        ValueError: the line is no JSON object with a string under each key; the message starts with ``where``.
    """
    try:
        record = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in keys):
        raise ValueError(f"{where}: not a JSON object with a string under {', '.join(map(repr, keys))}")
    return [record[key] for key in keys]


def read_texts(paths: Sequence[Path], json_key: str) -> Iterator[str]:
    """Documents of ``paths``: each line of a .jsonl file, each .txt file as a whole."""
    for path in paths:
        if path.suffix == ".txt":
            yield _decode(path)
        elif path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield parse_record(line, [json_key], f"{path}:{number}")[0]
        else:
            raise ValueError(f"{path}: neither .txt nor .jsonl")


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
