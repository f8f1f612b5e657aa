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

from smp.checkpoint.entries import CheckpointError
from smp.checkpoint.folder import Folder, Sink, Source

PIECE = 1 << 22
"""Bytes per write: few calls, and the data are still in the cache when the checksum comes by."""
_READ_PIECE = 1 << 23
"""Bytes per read, half of it where they go by a buffer: more than that, so that the disk has something to do while what
was read is used."""
_NOT_KNOWN = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
"""What file systems answer to a call that they do not have."""


class LocalFolder(Folder):
    """A folder of a file system, which all ranks must share."""

    def __init__(self, path: Path) -> None:
        self.local: Path = path

    @property
    def name(self) -> str:
        return self.local.resolve().name

    def __str__(self) -> str:
        return str(self.local)

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.local)!r})"

    @property
    def address(self) -> str:
        return str(self.local.absolute())

    def child(self, name: str) -> Folder:
        return LocalFolder(self.local / name)

    def exists(self) -> bool:
        return self.local.is_dir()

    def make(self) -> None:
        made = [path for path in (self.local, *self.local.parents) if not path.is_dir()]
        self.local.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_to_disk(path.parent)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.local)) if self.local.is_dir() else []

    def size(self, name: str) -> int | None:
        try:
            found = os.lstat(self.local / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str) -> bytes:
        with os.fdopen(_open_plain(self.local / name), "rb") as file:
            return file.read()

    def replace(self, name: str, data: bytes) -> None:
        write_durably(self.local / name, data)

    def create(self, name: str, data: bytes) -> bool:
        path = self.local / name
        try:
            with _written_beside(path, data) as temporary:
                _give_name(temporary, path)
        except FileExistsError:
            return False
        sync_to_disk(self.local)
        return True

    @contextmanager
    def writer(self, name: str, size: int) -> Iterator[Sink]:
        path = self.local / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _reserve(descriptor, size)
            yield _LocalSink(descriptor)
            os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)

    @contextmanager
    def reader(self, name: str) -> Iterator[Source]:
        descriptor = _open_plain(self.local / name)
        try:
            yield _LocalSource(descriptor)
        finally:
            os.close(descriptor)

    def delete(self, name: str) -> None:
        (self.local / name).unlink(missing_ok=True)

    def rename(self, name: str, new: str) -> None:
        os.rename(self.local / name, self.local / new)
        sync_to_disk(self.local)

    def remove(self) -> None:
        if self.local.is_symlink():  # what it leads to belongs to another run
            self.local.unlink()
        else:
            shutil.rmtree(self.local)
        sync_to_disk(self.local.parent)

    def sync(self) -> None:
        sync_to_disk(self.local)


class _LocalSink:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data[:PIECE]) :]


class _LocalSource:
    # one: the system itself reads ahead of who reads in order, and two cost more of the processor than they win
    piece, readers = _READ_PIECE, 1

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self._descriptor, [into], offset)
            if count == 0:
                raise EOFError(f"the file ends at {offset}")
            offset, into = offset + count, into[count:]


def _open_plain(path: Path) -> int:
    """A descriptor of a regular file. Neither a link is followed nor a pipe waited for: they are no files here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(f"{path} is not a plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is not a plain file")
    return descriptor


def write_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` so that a crash leaves the old content or the new, on disk when this returns."""
    with _written_beside(path, data) as temporary:
        os.replace(temporary, path)
    sync_to_disk(path.parent)


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A file with ``data``, on disk, under a name that nobody else uses, to be renamed; after an error it is gone."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            _LocalSink(descriptor).write(memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _give_name(temporary: Path, path: Path) -> None:
    """Let a whole file appear as ``path``. Raises FileExistsError when there is one."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NOT_KNOWN:
            raise
        # a file system without links: a reader that looks between the two calls sees an empty file
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.replace(temporary, path)
    else:
        with suppress(OSError):  # the next start cleans up
            temporary.unlink()


def _reserve(descriptor: int, size: int) -> None:
    """Room for ``size`` bytes in one piece, and a disk too full says so now. A hint: not every system can."""
    allocate = getattr(os, "posix_fallocate", None)
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


def open_folder(path: Path | str | Folder) -> Folder:
    """The folder at a path, or at a URL such as ``s3://bucket/run`` (needs fsspec and its back-end for that scheme).

    Raises:
        CheckpointError: no back-end is there; or a URL of the file system, which has paths.
    """
    if isinstance(path, Folder):
        return path
    if isinstance(path, str) and path.startswith("file:"):
        raise CheckpointError(f"{path}: give the path alone, without file://")
    if isinstance(path, str) and "://" in path:
        from smp.checkpoint.remote import RemoteFolder  # fsspec is an extra

        return RemoteFolder.at(path)
    return LocalFolder(Path(path))


def same_folder(one: Folder, other: Folder) -> bool:
    """Whether two folders are one, by whatever path."""
    if one.local is not None and other.local is not None:
        return one.local.resolve() == other.local.resolve()
    return str(one) == str(other)
