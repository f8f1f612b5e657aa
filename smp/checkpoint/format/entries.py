"""The words of a manifest: tensors, their shards, and the two kinds of errors. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp.config.command_line.command import DamageError, exit_code

ELEMENT_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of an element by dtype: the names of safetensors headers, the same in the manifest."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read. The message is one line and names the file or the tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled for other ranks with its exit code: that is read from the cause, which a pickle loses."""
        return _from_elsewhere, (type(self), self.args, exit_code(self))


def _from_elsewhere(kind: type[CheckpointError], args: tuple[Any, ...], code: int) -> CheckpointError:
    error = kind(*args)
    # A pickle carries no cause. The exit code is read from it, so an error of the same code stands in.
    error.__cause__ = OSError("on another rank") if code == 1 else None
    return error


class DamagedError(CheckpointError, DamageError):
    """Stored data differ from what was saved: missing, cut off or changed. An older checkpoint may be whole."""


@dataclass(frozen=True)
class Shard:
    """One part of a tensor: tensor ``key`` of ``file``, at ``offsets`` of the whole, ``sizes`` large."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    xxh3_64: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its whole shape, its dtype's name in ``ELEMENT_SIZES``, and the shards that cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint: tensors by name, size in bytes of every data file, and the free ``extra`` dictionary."""

    tensors: dict[str, TensorEntry]
    files: dict[str, int]
    extra: dict[str, Any]
