"""Folders of object stores, by way of fsspec: ``s3://bucket/run``, ``gs://...``, ``memory://...``.

An object appears whole when its last part is uploaded, and a put replaces it in one step: what the format needs. There
is no rename, so a checkpoint is committed by its manifest, which is put last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from smp.checkpoint.folders.local import Sink, Source
from smp.checkpoint.format.entries import CheckpointError
from smp.config.command_line.commands import pip_install
from smp.config.command_line.credentials import without_credentials

_PART = 1 << 26  # bytes per upload: S3 allows 10,000 parts, so a file may have 640 GB
_RANGE = 1 << 24  # bytes per download: some are under way at a time, and each is held twice


class RemoteFolder:
    """A prefix in an object store: ``path`` as fsspec's ``files`` wants it, ``url`` as users write it."""

    local = None  # it is nowhere on a file system

    def __init__(self, files: Any, path: str, url: str) -> None:
        # Every error of the back-end becomes an OSError.
        self.files, self.path, self.url = _Calls(files), path.rstrip("/"), url.rstrip("/")

    @staticmethod
    def at(url: str) -> RemoteFolder:
        """The folder at a URL. Raises CheckpointError when nothing is installed that knows such a URL."""
        try:
            from fsspec.core import url_to_fs

            # listings change behind the back of this process: other ranks and writers put files
            files, path = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            hint = pip_install("s3fs") if url.startswith("s3://") else f"{pip_install('fsspec')} and its back-end"
            raise CheckpointError(without_credentials(f"{url}: {error} ({hint})")) from None
        return RemoteFolder(files, path, url)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return str(without_credentials(self.url))

    @property
    def address(self) -> str:
        return self.url

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.files.to, f"{self.path}/{name}", f"{self.url}/{name}")

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self) -> bool:
        return bool(self.names())

    def make(self) -> None:
        """Does nothing: a prefix exists once an object does."""

    def names(self) -> list[str]:
        try:
            found = self.files.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != self.path})

    def size(self, name: str) -> int | None:
        try:
            found = self.files.info(self._at(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def read(self, name: str) -> bytes:
        return bytes(self.files.cat_file(self._at(name)))

    def replace(self, name: str, data: bytes) -> None:
        self.files.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> bool:
        # Back-ends without exclusive creation ignore the mode, so the look before is all that they have.
        if self.size(name) is not None:
            return False
        try:
            self.files.pipe_file(self._at(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    @contextmanager
    def writer(self, name: str, size: int) -> Iterator[Sink]:
        file = _Calls(self.files.open(self._at(name), "wb", block_size=_PART))
        try:
            yield file
            # An upload is complete only with its last part, which closing sends.
            file.close()
        except BaseException:
            # The parts that were sent must not become an object, or stay and cost money.
            with suppress(OSError):
                file.discard()
            file.to.closed = True  # or its destructor tries to go on
            raise

    @contextmanager
    def reader(self, name: str) -> Iterator[Source]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"no object {self}/{name}")
        # back-ends that run in one event loop may be called from any thread; of others fsspec promises nothing
        yield _RemoteSource(self.files, self._at(name), size, 4 if self.files.to.async_impl else 1)

    def delete(self, name: str) -> None:
        if self.size(name) is not None:
            self.files.rm_file(self._at(name))

    def rename(self, name: str, new: str) -> None:
        """Copy all objects, then delete the old ones: killed in between, either the old folder is complete or, from the
        manifest's deletion on, the new one is."""
        old = self._at(name)
        # The manifest sorts first, so it is deleted first: from then on the old folder is no checkpoint.
        paths = sorted(self.files.find(old), key=lambda path: path.endswith(".safetensors"))
        for path in paths:
            self.files.copy(path, self._at(new) + path.removeprefix(old))
        for path in paths:
            self.files.rm_file(path)

    def remove(self) -> None:
        if self.exists():
            self.files.rm(self.path, recursive=True)

    def sync(self) -> None:
        """Does nothing: what was put is durable."""


class _Calls:
    """The methods of ``to``. Back-ends raise errors of their own; here each becomes an OSError."""

    def __init__(self, to: Any) -> None:
        self.to = to

    def __getattr__(self, name: str) -> Any:
        # Wrapped when it is asked for: which methods there are is known to the back-end alone.
        method = getattr(self.to, name)

        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except OSError:
                raise
            except Exception as error:
                raise OSError(f"{type(error).__name__}: {error}") from error

        return call


class _RemoteSource:
    """Ranges of an object. Requests are large, because each costs tens of milliseconds."""

    piece = _RANGE

    def __init__(self, files: _Calls, path: str, size: int, readers: int) -> None:
        self._files, self._path, self.size, self.readers = files, path, size, readers

    def read_into(self, offset: int, into: memoryview) -> None:
        if not len(into):
            return
        if offset >= self.size:
            raise EOFError(f"the object ends at {self.size}")
        # fsspec returns new memory for every range; there is no reading into memory that is there.
        data = self._files.cat_file(self._path, start=offset, end=offset + len(into))
        if len(data) != len(into):
            raise EOFError(f"the object ends at {offset + len(data)}")
        into[:] = data
