"""A folder that checkpoints live in: on a file system (``local``) or in an object store (``remote``).

What the format needs of storage is little: a data file appears whole or not at all, a small file is replaced in one
step, and both are durable when the call returns. Files are opened without following links and must be plain ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """A data file being written."""

    def write(self, data: memoryview) -> None:
        """Append ``data``."""


class Source(Protocol):
    """A data file being read."""

    piece: int
    """Bytes per read that are fastest here."""
    readers: int
    """How many threads may read at the same time, and are faster than one."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset``. Raises EOFError when the file ends before."""


class Folder(ABC):
    """One folder. Names are of files and folders directly inside of it."""

    local: Path | None = None
    """Where it is on a file system."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its own last name."""

    @abstractmethod
    def __str__(self) -> str:
        """The path, for messages."""

    @property
    @abstractmethod
    def address(self) -> str:
        """What ``open_folder`` finds it by in another process, whose working folder may be another."""

    @abstractmethod
    def child(self, name: str) -> Folder:
        """A folder inside; nothing is made."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is such a folder (in an object store: anything under this name)."""

    @abstractmethod
    def make(self) -> None:
        """Make it and its parents, if it is not there."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is inside, sorted; nothing when it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is no such file."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file: a crash leaves the old content or the new."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists; whether it was written."""

    @abstractmethod
    def writer(self, name: str, size: int) -> AbstractContextManager[Sink]:
        """A new data file of ``size`` bytes. At a clean end it is durable; after an error it is gone."""

    @abstractmethod
    def reader(self, name: str) -> AbstractContextManager[Source]:
        """An existing data file. Raises FileNotFoundError."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""

    @abstractmethod
    def rename(self, name: str, new: str) -> None:
        """Give a folder inside another name."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the folder with everything inside. If its name is a link, the link alone goes."""

    @abstractmethod
    def sync(self) -> None:
        """Make names of new files durable."""
