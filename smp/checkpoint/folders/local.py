"""Folders of a file system."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

PIECE = 1 << 22
"""Bytes per write: few calls, and the data are still in the cache when the checksum comes by."""
_READ_PIECE = 1 << 23
"""Bytes per read, half of it where they go by a buffer: more than that, so that the disk has something to do while what
was read is used."""
_NOT_KNOWN = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
"""errno of calls that a file system does not have."""


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
        """Size of the file in bytes."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset``. Raises EOFError when the file ends before."""


class LocalFolder:
    """A folder of a file system, which all ranks must share. Names are of files and folders directly inside of it."""

    def __init__(self, path: Path) -> None:
        self.local: Path = path

    @property
    def name(self) -> str:
        """The last part of its path, links resolved."""
        return self.local.resolve().name

    def __str__(self) -> str:
        return str(self.local)

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.local)!r})"

    @property
    def address(self) -> str:
        """A path for ``open_folder`` in another process, which may have another working directory."""
        return str(self.local.absolute())

    def child(self, name: str) -> LocalFolder:
        """A folder inside; nothing is made."""
        return LocalFolder(self.local / name)

    def exists(self) -> bool:
        """Whether there is such a folder (in an object store: anything under this name)."""
        return self.local.is_dir()

    def make(self) -> None:
        """Make it and its parents, if it does not exist."""
        # The entry of a new folder is in its parent: without these syncs a crash may lose the folder, files and all.
        # Outermost last: the syncs begin at the new folder's parent.
        made = [path for path in (self.local, *self.local.parents) if not path.is_dir()]
        self.local.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_to_disk(path.parent)

    def names(self) -> list[str]:
        """Names of the folder's entries, sorted; none when it does not exist."""
        return sorted(os.listdir(self.local)) if self.local.is_dir() else []

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is no such file."""
        try:
            # ``lstat``: a link has the size of a link and is none of our files.
            found = os.lstat(self.local / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""
        with os.fdopen(_open_plain(self.local / name), "rb") as file:
            return file.read()

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file: a crash leaves the old content or the new."""
        # A name by chance: two processes that write at the same time do not write into one file.
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        self._write(temporary, data)
        try:
            os.replace(self.local / temporary, self.local / name)
        # Also at Ctrl-C.
        except BaseException:
            with suppress(OSError):
                self.delete(temporary)
            raise
        # A rename is durable once its folder is.
        self.sync()

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists; returns whether it was written. Others see it complete or not at all,
        except on a file system without hard links."""
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        self._write(temporary, data)
        try:
            # A link fails if the name is taken, and shows the whole content at once; opening with O_EXCL
            # shows an empty file first.
            os.link(self.local / temporary, self.local / name)
        except FileExistsError:
            return False
        except OSError as error:
            # EMLINK: so many links that there can be no more. All else is an error of the storage.
            if error.errno not in (*_NOT_KNOWN, errno.EMLINK):
                raise
            # Without links: exclusive creation, which shows the file before its content.
            with suppress(FileExistsError):
                self._write(name, data)
                return True
            return False
        finally:
            with suppress(OSError):
                self.delete(temporary)
            self.sync()
        return True

    def _write(self, name: str, data: bytes) -> None:
        with self.writer(name, len(data)) as sink:
            sink.write(memoryview(data))

    @contextmanager
    def writer(self, name: str, size: int) -> Iterator[Sink]:
        """A context for writing a new data file of ``size`` bytes. At a clean end it is durable; after an error it is
        deleted."""
        path = self.local / name
        # O_EXCL: files of checkpoints have new names, so what already exists belongs to somebody else.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _reserve(descriptor, size)
            yield _LocalSink(descriptor)
            # Before the manifest may name it. A disk that is full or broken says so here at the latest.
            os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)

    @contextmanager
    def reader(self, name: str) -> Iterator[Source]:
        """An existing data file. Raises FileNotFoundError."""
        descriptor = _open_plain(self.local / name)
        try:
            yield _LocalSource(descriptor)
        finally:
            os.close(descriptor)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self.local / name).unlink(missing_ok=True)

    def rename(self, name: str, new: str) -> None:
        """Rename a folder inside of this one."""
        os.rename(self.local / name, self.local / new)
        sync_to_disk(self.local)

    def remove(self) -> None:
        """Delete the folder with everything inside. If its name is a link, the link alone goes."""
        if self.local.is_symlink():  # what it leads to belongs to another run
            self.local.unlink()
        else:
            shutil.rmtree(self.local)
        sync_to_disk(self.local.parent)

    def sync(self) -> None:
        """Make names of new files durable."""
        sync_to_disk(self.local)


class _LocalSink:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview) -> None:
        while data:
            # The system may take fewer bytes than it was given, on Linux 2 GiB at most.
            data = data[os.write(self._descriptor, data[:PIECE]) :]


class _LocalSource:
    # one reader: the kernel reads ahead of sequential reads, and a second thread costs more CPU
    # time than it gains
    piece, readers = _READ_PIECE, 1

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, into: memoryview) -> None:
        while into:
            # With an offset of its own: several threads read from one descriptor, whose position they would share.
            count = os.preadv(self._descriptor, [into], offset)
            if count == 0:
                raise EOFError(f"the file ends at {offset}")
            offset, into = offset + count, into[count:]


def _open_plain(path: Path) -> int:
    """A descriptor of a regular file. Links are not followed and pipes not waited for: neither is a file here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(f"{path} is not a plain file") from None
        raise
    # Of the open descriptor: between a look at the path and its opening somebody could exchange the file.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is not a plain file")
    return descriptor


def _reserve(descriptor: int, size: int) -> None:
    """Reserve ``size`` bytes for a file, so that a full disk is an error now. Only a hint where the system cannot."""
    allocate = getattr(os, "posix_fallocate", None)
    # macOS has none.
    if allocate is None or size == 0:
        return
    try:
        allocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NOT_KNOWN:
            raise


def sync_to_disk(path: Path) -> None:
    """fsync of a file or folder written before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
