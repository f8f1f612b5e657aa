"""Data in object stores and on web servers, by way of fsspec: ``s3://bucket/x.jsonl``, ``gs://...``, ``https://...``,
``memory://...``.

Text is streamed. Of a tokenized data set the index comes once per node; tokens are fetched when a sample needs them, so
nothing of the ``.bin`` file is kept on a disk.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash

from smp.config.blend import is_remote
from smp.config.command import DamageError
from smp.config.commands import pip_install
from smp.data.cache import NodeCache
from smp.data.contents import Contents
from smp.data.indexed_dataset import IndexedDataset

_MARKS = ("ETag", "md5Hash", "content_md5", "Content-MD5", "Digest")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")


def _system(url: str) -> tuple[Any, str]:
    """What speaks to the store of a URL, and the path in it. Raises ValueError when nothing is installed that does."""
    try:
        from fsspec.core import url_to_fs

        return cast(tuple[Any, str], url_to_fs(url))
    except (ImportError, ValueError) as error:
        kinds = {"s3": pip_install("s3fs"), "http": pip_install("fsspec", "aiohttp")}
        hint = kinds.get(url.split("://")[0].rstrip("s"), f"{pip_install('fsspec')} and its back-end")
        raise ValueError(f"{url}: {error} ({hint})") from None


def expand(pattern: str) -> list[RemoteFile]:
    """The files of a URL, which may be a glob pattern, sorted by name. Raises ValueError when there is none."""
    files, path = _system(pattern)
    scheme = pattern.split("://")[0]
    try:
        if not any(mark in path for mark in "*[") and files.exists(path):
            if files.isdir(path) and not files.isfile(path):
                raise ValueError(f"{pattern} is a folder: name its files, as {pattern.rstrip('/')}/*.jsonl")
            return [RemoteFile(pattern)]
        found = sorted(files.glob(path))
    except OSError as error:
        raise _named(error, pattern) from error
    if not found:
        raise ValueError(f"{pattern}: no such file")
    return [RemoteFile(name if "://" in name else f"{scheme}://{name.lstrip('/')}") for name in found]


def local_or_remote(path: str) -> Path | RemoteFile:
    """What readers take for a path or a URL."""
    return RemoteFile(path) if is_remote(path) else Path(path)


def file_state(path: Path | RemoteFile) -> tuple[str, int, str]:
    """Name, size and what changes when the file does."""
    if isinstance(path, RemoteFile):
        return str(path), path.size, path.state
    stat = path.stat()
    return str(path.resolve()), stat.st_size, str(stat.st_mtime_ns)


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, with what readers of text ask a path for."""

    url: str

    def __str__(self) -> str:
        return self.url

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
        """Its path within the store, with another ending."""
        return self._in_store.with_suffix(suffix)

    def open(self, mode: str = "rb") -> BinaryIO:
        """Read it, some megabytes ahead. Raises OSError, with the URL."""
        files, path = _system(self.url)
        try:
            return cast(BinaryIO, files.open(path, mode))
        except OSError as error:
            raise _named(error, self.url) from error

    @property
    def info(self) -> dict[str, Any]:
        """What the store knows of it. Raises OSError, with the URL."""
        files, path = _system(self.url)
        try:
            return cast(dict[str, Any], files.info(path))
        except OSError as error:
            raise _named(error, self.url) from error

    @property
    def size(self) -> int:
        """Bytes; 0 where a server does not say."""
        return int(self.info.get("size") or 0)

    @property
    def state(self) -> str:
        """A mark of its contents, or else the time of their last change, or else their size."""
        info = self.info
        known = next((str(info[key]) for key in (*_MARKS, *_TIMES) if info.get(key)), "")
        return f"{info.get('size')} {known}"


def _named(error: OSError, url: str) -> OSError:
    return OSError(error.errno, " ".join(str(error.strerror or error).split()) or type(error).__name__, url)


class RemoteDataset(IndexedDataset):
    """A tokenized data set whose tokens stay where they are: a request for each piece of a document.

    Args:
        prefix: URL without ``.bin`` / ``.idx``.
        vocab_size: token ids from here on are refused when they are read.
        cache: keeps the index.

    Raises:
        ValueError: a file is missing or of another format.
        DamageError: one is truncated, or the two do not belong together.
    """

    def __init__(self, prefix: str, vocab_size: int, cache: NodeCache) -> None:
        self.bin, index = RemoteFile(f"{prefix}.bin"), RemoteFile(f"{prefix}.idx")
        self.vocab_size = vocab_size
        try:
            self._state, state = self.bin.state, index.state
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error

        def fetch(path: Path) -> None:
            with index.open() as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)

        name = f"remote-{xxhash.xxh3_64_hexdigest(json.dumps([str(index), state]).encode())}.idx"
        self.idx_path = cache.file(name, fetch)
        self.bin_path = cast(Path, self.bin)  # for messages
        self.paths = (self.bin_path, self.idx_path)
        self._read_index()
        self._check_index()
        expected, size = self.num_tokens * self.dtype.itemsize, self.bin.size
        if size != expected:
            raise DamageError(f"{self.bin}: {size} bytes, {index.name} describes {expected}")

    def contents(self) -> Contents:
        """A hash of the index and of what the store says of the tokens, which nobody reads beforehand; their ids are
        compared with the vocabulary when they are read."""
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
        except OSError as error:
            raise _named(error, self.bin.url) from error
        if len(raw) != (stop - start) * size:
            raise ValueError(f"{self.bin}: {len(raw)} bytes from token {start} to {stop}: it was cut while in use")
        tokens = np.frombuffer(raw, self.dtype)
        bad = np.flatnonzero((tokens < 0) | (tokens.astype(np.int64) >= self.vocab_size))
        if len(bad):
            at = start + int(bad[0])
            raise ValueError(f"{self.bin}: token {at} has the id {tokens[bad[0]]}, the vocabulary {self.vocab_size}")
        return tokens
