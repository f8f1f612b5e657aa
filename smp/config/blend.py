"""The values of --data-path, its relatives and --split. Does not read any data file."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from smp.config.schema import ConfigError, DataConfig

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")
COMPRESSED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True)
class BlendPart:
    """One data set of a blend; weight None: in proportion to its size."""

    path: str
    weight: Fraction | None = None


def is_text(path: str) -> bool:
    """Whether a data path names a text file, and not the prefix of a tokenized data set."""
    if path.startswith(("http://", "https://")):  # elsewhere ? is a letter of a name
        path = path.partition("?")[0]
    for suffix in COMPRESSED_SUFFIXES:
        path = path.removesuffix(suffix)
    return path.endswith(TEXT_SUFFIXES)


def is_remote(path: str) -> bool:
    """Whether it is a URL, such as s3://bucket/data."""
    return "://" in path


def parse_blend(flag: str, text: str) -> list[BlendPart]:
    """The parts of ``P``, ``P1 P2 ...`` or ``w1 P1 w2 P2 ...``. Weights are exact fractions: 0.1 is a tenth.

    Raises:
        ConfigError: no words, a weight that is missing, zero or negative, or a data set that is named twice.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None
    weights = [_number(word) for word in words]
    if not any(weight is not None for weight in weights):
        parts = [BlendPart(word) for word in words]
    # Numbers at even places, paths at odd ones.
    elif len(words) % 2 == 0 and all((weight is None) == bool(i % 2) for i, weight in enumerate(weights)):
        parts = [BlendPart(path, weight) for path, weight in zip(words[1::2], weights[::2], strict=True)]
    else:
        raise ConfigError(f"{flag} {text}: give paths alone, or a number before every path")
    paths = [part.path for part in parts]
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError(f"{flag} {text}: " + ("a data set is named twice" if paths else "it names no data"))
    for part in parts:
        if part.weight is not None and part.weight <= 0:
            raise ConfigError(f"{flag} {text}: the weight of {part.path} must be above 0")
    return parts


def _number(word: str) -> Fraction | None:
    """The number of a word; None: it is a path. Exponents have at most two digits: fractions are exact, and 1e999999999
    would fill the memory."""
    if re.search(r"e[+-]?\d{3}", word, re.IGNORECASE):
        return None
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def parse_split(split: str, flag: str = "--split") -> tuple[float, float, float]:
    """Fractions for training, validation and test, from relative sizes such as ``"969,30,1"``; missing ones are 0.

    Raises:
        ConfigError: not one to three non-negative numbers with a sum above zero.
    """
    parts = [part.strip() for part in split.split(",")]
    numbers = [float(part) for part in parts if re.fullmatch(r"\d+(\.\d*)?|\.\d+", part)]
    if not len(numbers) == len(parts) <= 3 or not 0 < sum(numbers) < math.inf:
        raise ConfigError(f"{flag} {split!r} is not one to three relative sizes with a sum above 0, such as 969,30,1")
    # Relative sizes: 969,30,1 and 96.9,3,0.1 are the same.
    train, validation, test = (number / sum(numbers) for number in [*numbers, 0.0, 0.0][:3])
    return train, validation, test


def data_parts(data: DataConfig) -> dict[str, list[BlendPart]]:
    """The data sets by the flag that names them; empty with mock data.

    Raises:
        ConfigError: as parse_blend, or --data-args-path cannot be read.
    """
    texts = {
        "--data-path": data.data_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    if data.data_args_path is not None:
        try:
            texts["--data-args-path"] = Path(data.data_args_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            # ValueError for bytes that are not UTF-8, which a binary file given by mistake has.
            raise ConfigError(f"--data-args-path {data.data_args_path}: {error}") from None
    return {flag: parse_blend(flag, text) for flag, text in texts.items() if text is not None}
