"""Files that are built once per node and then memory-mapped by all of its processes.

A file gets its name only when it is whole, so to exist is to be whole. The first process of a node builds it behind a
lock that the system releases when its holder dies; the others wait and find it. Processes of another node never wait:
the lock bears the node's name, and two nodes that build the same file in a shared folder make equal ones.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smp.config.command_line.command import DamageError


class CacheFolderError(ValueError):
    """The cache folder cannot be written. Its cause is the system's error."""


class DamagedCacheError(CacheFolderError, DamageError):
    """A file of the cache is not what was written there."""


class NodeCache:
    """Built files in one folder.

    Args:
        folder: made when it is needed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def file(self, name: str, build: Callable[[Path], None]) -> Path:
        """The file ``name``, which ``build`` writes to the path that it is given if it is not there yet.

        Raises:
            CacheFolderError: the folder cannot be written, or the disk is full.
        """
        # Without the lock: a file that has its name is whole.
        path = self.folder / name
        if path.exists():
            return path
        with self.locked():
            # Looked at again, because another process may have built it while this one waited.
            if not path.exists():
                self._build(path, build)
        return path

    def array(self, name: str, build: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The array that ``build`` returns, read-only and memory-mapped from the file ``name``.

        Raises:
            CacheFolderError: as ``file``.
            DamagedCacheError: the file is not what was written there.
        """

        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.save(file, build(), allow_pickle=False)

        path = self.file(name, write)
        try:
            # view(np.ndarray): the memmap class would only slow down each slice.
            return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except (ValueError, EOFError):
            raise DamagedCacheError(f"{path}: damaged; delete it, and it is made again") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context in which this process is alone among those of its node."""
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                # One lock for each node: locks of shared file systems are not to be relied on.
                descriptor = os.open(self.folder / f".lock-{socket.gethostname()}", os.O_RDWR | os.O_CREAT, 0o666)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise CacheFolderError(f"{self.folder}: {error.strerror}; another --data-cache-path may do") from error
            yield

    def _build(self, path: Path, build: Callable[[Path], None]) -> None:
        part = f".{path.name}.{socket.gethostname()}."
        for left in self.folder.glob(f"{part}*"):  # left by a killed build, whose lock this process holds now
            left.unlink(missing_ok=True)
        temporary = self.folder / f"{part}{os.getpid()}"
        try:
            build(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            # Durable before it has its name: after a crash a file is whole or not there.
            temporary.replace(path)
        except OSError as error:
            raise CacheFolderError(f"{path}: {error.strerror}; another --data-cache-path may do") from error
        finally:
            temporary.unlink(missing_ok=True)
