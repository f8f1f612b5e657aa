"""Data in object stores and on web servers, by way of fsspec: ``s3://bucket/x.jsonl``, ``gs://...``, ``https://...``,
``memory://...``.

Text is streamed. Of a tokenized data set the index comes once per node; tokens are fetched when a sample needs them, so
nothing of the ``.bin`` file is kept on a disk.
"""

from __future__ import annotations

import errno
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash

from smp.config.blend import is_remote
from smp.config.command_line.command import DamageError
from smp.config.command_line.commands import pip_install
from smp.config.command_line.credentials import without_credentials
from smp.data.cache import NodeCache
from smp.data.contents import Contents
from smp.data.indexed_dataset import IndexedDataset

_MARKS = ("etag", "md5hash", "contentmd5", "digest", "lfs", "xethash", "blobid", "generation", "sha")
_TIMES = ("lastmodified", "modificationtime", "mtime", "updated", "modified", "modify", "created")
"""Keys under which stores give a hash and a time, in lower case without - and _."""


class RemoteError(OSError):
    """A store or a server failed a request. The text is one line with the URL."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def _system(url: str) -> tuple[Any, str]:
    """The fsspec file system for a URL, and the path in it. Raises ValueError when none is installed."""
    try:
        from fsspec.core import url_to_fs

        return cast(tuple[Any, str], url_to_fs(url))
    except (ImportError, ValueError) as error:
        kinds = {"s3": pip_install("s3fs"), "http": pip_install("fsspec", "aiohttp")}
        hint = kinds.get(url.split("://")[0].rstrip("s"), f"{pip_install('fsspec')} and its back-end")
        raise ValueError(without_credentials(f"{url}: {error} ({hint})")) from None


def expand(pattern: str) -> list[RemoteFile]:
    """The files of a URL, which may be a glob pattern, sorted by name. Raises ValueError when there is none."""
    (files, path), shown = _system(pattern), without_credentials(pattern)
    try:
        # Only a name that cannot be a pattern is taken for one file; others are matched.
        # "?" is not a pattern here: URLs have queries.
        is_one = not any(mark in path for mark in "*[") and files.exists(path)
        is_folder = is_one and files.isdir(path) and not files.isfile(path)
        found = [] if is_one else sorted(files.glob(path))
    except Exception as error:
        raise _named(error, pattern) from error
    if is_folder:
        raise ValueError(f"{shown} is a folder: name its files, as {shown.rstrip('/')}/*.jsonl")
    if is_one:
        return [RemoteFile(pattern)]
    if not found:
        raise ValueError(f"{shown}: {_why_none(files, path)}")
    # a name has lost what stands before it in the URL: the scheme, and of some stores the host
    before = pattern.removesuffix(path.lstrip("/"))
    urls = [name if "://" in name else f"{before}{name.lstrip('/')}" for name in found]
    # What was joined must lead back to the file that was found.
    if _system(urls[0]) != (files, found[0]):
        raise ValueError(f"{shown}: patterns cannot be told from names at this store: name each file")
    return [RemoteFile(url) for url in urls]


def _why_none(files: Any, path: str) -> str:
    """The store's error for a name that it does not find, which may be one of access."""
    try:
        files.info(path)
    # Stores raise what they like; all of it is an answer here.
    except Exception as error:
        return _said(error)
    return "no such file"


def local_or_remote(path: str) -> Path | RemoteFile:
    """What readers take for a path or a URL."""
    return RemoteFile(path) if is_remote(path) else Path(path)


def file_state(path: Path | RemoteFile) -> tuple[str, int, str]:
    """(name, size, a text that changes when the file does)."""
    if isinstance(path, RemoteFile):
        return path.url, path.size, path.state
    stat = path.stat()
    return str(path.resolve()), stat.st_size, str(stat.st_mtime_ns)


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, with the parts of Path's interface that readers of text use. ``str`` is for people: without
    credentials."""

    url: str

    def __str__(self) -> str:
        return str(without_credentials(self.url))

    @property
    def _in_store(self) -> PurePosixPath:
        return PurePosixPath(self.url.split("://", 1)[1].partition("?")[0])

    @property
    def name(self) -> str:
        return self._in_store.name

    @property
    def suffix(self) -> str:
        return self._in_store.suffix

    def with_suffix(self, suffix: str) -> PurePosixPath:
        """The file's path within the store, with another ending."""
        return self._in_store.with_suffix(suffix)

    def open(self, mode: str = "rb") -> BinaryIO:
        """A buffered reader. Raises OSError, with the URL, also while the file is read."""
        files, path = _system(self.url)
        try:
            file = files.open(path, mode)
        except Exception as error:
            raise _named(error, self.url) from error
        return cast(BinaryIO, io.BufferedReader(_Stream(file, self.url), 1 << 20))

    @property
    def info(self) -> dict[str, Any]:
        """The store's metadata of the file. Raises OSError, with the URL."""
        files, path = _system(self.url)
        try:
            return cast(dict[str, Any], files.info(path))
        except Exception as error:
            raise _named(error, self.url) from error

    @property
    def size(self) -> int:
        """Bytes; 0 where a server does not say."""
        return int(self.info.get("size") or 0)

    @property
    def state(self) -> str:
        """A text that changes with the file: a hash if the store has one, else a time, always with the size."""
        info = {key.lower().replace("-", "").replace("_", ""): value for key, value in self.info.items()}
        # Marks of contents first: a time may change without the file, and the file within the resolution of a time.
        known = next((str(info[key]) for key in (*_MARKS, *_TIMES) if info.get(key)), "")
        return f"{info.get('size')} {known}"


def of_size_only(states: Mapping[str, str]) -> list[str]:
    """A warning about files whose store gives only their size: one line for all, or nothing.

    Args:
        states: ``RemoteFile.state``, or what stands for it, of each file by name.
    """
    names = [name for name, state in states.items() if state.endswith(" ")]
    if not names:
        return []
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return [f"WARNING: {names[0]}{others} has no ETag or time: a change of the same size is not noticed"]


class _Stream(io.RawIOBase):
    """A file of fsspec's whose errors have the URL in them."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        try:
            read = self._file.read(len(buffer))
        except Exception as error:
            raise _named(error, self._url) from error
        buffer[: len(read)] = read
        return len(read)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _named(error: Exception, url: str) -> RemoteError:
    """The error with the URL in it. Stores raise errors of their own libraries, too; with an errno, readers can tell it
    from bad text."""
    return RemoteError(getattr(error, "errno", None) or errno.EIO, _said(error), without_credentials(url))


def _said(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):  # whose text is often but the name
        status = getattr(error.__cause__, "status", 404)  # fsspec's of a web server has but this one kind of error
        return "no such file" if status == 404 else f"the server answers {status}"
    said = " ".join(str(getattr(error, "strerror", None) or error).split())
    return str(without_credentials(said)) or type(error).__name__


class RemoteDataset(IndexedDataset):
    """A tokenized data set whose tokens stay in the store: one request for each piece of a document.

    Args:
        prefix: URL without ``.bin`` / ``.idx``.
        vocab_size: token ids from here on are refused when they are read.
        cache: keeps the index.

    Raises:
        ValueError: a file is missing, cannot be read, or is of another format.
        DamageError: one is truncated, or the two do not belong together.
    """

    def __init__(self, prefix: str, vocab_size: int, cache: NodeCache) -> None:
        self.bin, index = RemoteFile(f"{prefix}.bin"), RemoteFile(f"{prefix}.idx")
        self.vocab_size = vocab_size
        try:
            self._state, state = self.bin.state, index.state
            self.notes = of_size_only({str(self.bin): self._state, str(index): state})
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error

        # Called by the cache on one process of the node.
        def fetch(path: Path) -> None:
            try:
                with index.open() as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
            except RemoteError as error:  # which is not the cache folder's fault
                raise ValueError(str(error)) from error

        # By the state of the file: another index under the same URL is fetched anew.
        name = f"remote-{xxhash.xxh3_64_hexdigest(json.dumps([index.url, state]).encode())}.idx"
        self.idx_path = cache.file(name, fetch)
        self.bin_path = cast(Path, self.bin)  # for messages
        self.paths = (self.bin_path, self.idx_path)
        self._read_index()
        self._check_index()
        expected, size = self.num_tokens * self.dtype.itemsize, self.bin.size
        if size != expected:
            raise DamageError(f"{self.bin}: {size} bytes, {index.name} describes {expected}")

    def contents(self) -> Contents:
        """A hash of the index and of the store's mark of the tokens, which are not read beforehand; their ids are
        checked when they are read."""
        state = xxhash.xxh3_128(self.idx_path.read_bytes())
        state.update(self._state.encode())
        return Contents(state.hexdigest(), 0, -1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop).

        Raises:
            ValueError: there are fewer, or an id outside of the vocabulary.
            OSError: they cannot be read.
        """
        size = self.dtype.itemsize
        files, path = _system(self.bin.url)
        try:
            raw = files.cat_file(path, start=start * size, end=stop * size) if stop > start else b""
        except Exception as error:
            raise _named(error, self.bin.url) from error
        # A server without range requests sends the whole file.
        if len(raw) > (stop - start) * size:
            raise ValueError(
                f"{self.bin}: {len(raw)} bytes where {(stop - start) * size} were asked for: its server "
                "ignores ranges; copy the data set to a disk"
            )
        if len(raw) != (stop - start) * size:
            raise ValueError(f"{self.bin}: {len(raw)} bytes from token {start} to {stop}: it was cut while in use")
        tokens = np.frombuffer(raw, self.dtype)
        # Here and not beforehand: nobody reads all tokens of a remote data set before training.
        bad = np.flatnonzero((tokens < 0) | (tokens.astype(np.int64) >= self.vocab_size))
        if len(bad):
            at = start + int(bad[0])
            raise ValueError(f"{self.bin}: token {at} has the id {tokens[bad[0]]}, the vocabulary {self.vocab_size}")
        return tokens
