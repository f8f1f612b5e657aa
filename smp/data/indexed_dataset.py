"""Megatron's indexed dataset (MMIDIDX version 1): tokens on disk, read through a memory map.

Two little-endian files make a dataset, named by their common prefix. ``PREFIX.bin`` holds the tokens and nothing else.
``PREFIX.idx`` says where sequences and documents begin (S sequences, D = documents + 1):

    offset      type        content
    0           9 bytes     b"MMIDIDX" and two zero bytes
    9           uint64      version, 1
    17          uint8       token type, see DTYPES
    18          uint64      S
    26          uint64      D
    34          S x int32   tokens of each sequence
    34 + 4 S    S x int64   byte offset of each sequence in PREFIX.bin: the lengths' exclusive prefix sum
    34 + 12 S   D x int64   first sequence of each document, then S

A document is one or more sequences, or none when it is empty. Training reads documents.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from smp.config.command_line.command import DamageError, refuse_existing

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {
    code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
# Little-endian, without padding: 34 bytes.
_HEADER = struct.Struct("<9sQBQQ")


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """The narrowest type Megatron stores tokens of this vocabulary in: uint16 below 65500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def dataset_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The .bin and .idx files of a prefix (which may itself contain dots)."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def check_new(*prefixes: str | Path) -> None:
    """Raise FileExistsError when one of these datasets is there."""
    refuse_existing(*(path for prefix in prefixes for path in dataset_paths(prefix)))


class IndexedDataset:
    """Read-only view of a dataset; tokens stay on disk until they are used.

    Args:
        prefix: path without ``.bin`` / ``.idx``.

    Raises:
        ValueError: a file is missing or of another format.
        DamageError: one is truncated, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self.idx_path = self.paths = dataset_paths(prefix)
        for path in self.paths:
            if not path.is_file():
                raise ValueError(f"{path}: no such file (a data path is the prefix, without .bin or .idx)")
        self._read_index()
        self._check_index()
        self._file = self.bin_path.open("rb")
        self.tokens = self._map_tokens()  # (num_tokens,), every sequence back to back

    def _read_index(self) -> None:
        size = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise ValueError(f"{self.idx_path}: not an indexed dataset (bad magic)")
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != VERSION or code not in DTYPES:
            raise ValueError(f"{self.idx_path}: version {version} with token type {code} is not supported")
        # The size follows from the header: a file that was cut off is found before anything is mapped.
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            said = f"{self.idx_path}: {size} bytes, its header says {expected}"
            # Multimodal ones have one more byte per sequence.
            if size == expected + sequences:
                raise ValueError(f"{said} (multimodal datasets are not supported)")
            raise DamageError(f"{said} (truncated or damaged)")
        self.dtype = DTYPES[code]
        # Memory-mapped: indices of billions of documents.
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        at = _HEADER.size
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(raw, "<i4", sequences, at)
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(raw, "<i8", boundaries, at + 12 * sequences)

    def _check_index(self) -> None:
        # int64: the lengths are int32, whose sums overflow.
        ends = np.zeros(len(self.lengths) + 1, dtype=np.int64)  # tokens before each sequence, then all of them
        np.cumsum(self.lengths, dtype=np.int64, out=ends[1:])
        documents = self.document_indices
        # Whatever the index says is compared with what follows from its lengths, so that no pointer leads astray.
        if (self.lengths < 0).any() or not np.array_equal(self.pointers, ends[:-1] * self.dtype.itemsize):
            raise DamageError(f"{self.idx_path}: sequence offsets do not follow from the sequence lengths (damaged)")
        if not len(documents) or documents[0] or documents[-1] != len(self) or (np.diff(documents) < 0).any():
            raise DamageError(f"{self.idx_path}: document boundaries do not run from 0 to {len(self)} (damaged)")
        self.document_offsets: npt.NDArray[np.int64] = ends[documents]  # (documents + 1,), in tokens

    def _map_tokens(self) -> np.ndarray:
        expected, size = self.num_tokens * self.dtype.itemsize, self.bin_path.stat().st_size
        if size != expected:
            raise DamageError(f"{self.bin_path}: {size} bytes, {self.idx_path.name} describes {expected}")
        if size == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop): a view of the file.

        Raises:
            ValueError: the file has become shorter. Touching the map beyond its end would kill the process.
        """
        # Looked at for each read: a page after the end of a mapped file kills the process with a signal.
        size = os.fstat(self._file.fileno()).st_size
        if size < stop * self.dtype.itemsize:
            raise ValueError(
                f"{self.bin_path}: was cut to {size} bytes while in use; tokens {start} to {stop} end at byte "
                f"{stop * self.dtype.itemsize}"
            )
        return self.tokens[start:stop]

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one sequence: a read-only view of the file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.document_offsets[-1])

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, its sequences back to back: a read-only view of the file."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.document_offsets[index] : self.document_offsets[index + 1]]


class IndexedDatasetWriter:
    """Context manager that writes a dataset, byte for byte what Megatron writes.

    Both files get their names only when the block ends without an exception, ``.idx`` last, so a reader never sees
    half a dataset; after an exception nothing is left behind and an older dataset of the same name is untouched.

    Args:
        prefix: path without ``.bin`` / ``.idx``.
        dtype: type of a stored token, one of DTYPES' values.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.bin_path, _ = dataset_paths(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"{self.bin_path}: tokens cannot be stored as {self.dtype}")
        self._lengths = array("i")  # array: 4 bytes per sequence, of which corpora have billions
        self._documents = array("q", [0])
        self._prefix = prefix
        self._temporary = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in dataset_paths(prefix)]

    def __enter__(self) -> IndexedDatasetWriter:
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._temporary[0].open("wb")
        return self

    def add_document(self, tokens: npt.ArrayLike, sequence_lengths: Sequence[int] | None = None) -> None:
        """Append a document, split into sequences of the given lengths (default: one, or none when it is empty).

        Raises:
            ValueError: a token does not fit the dataset's type, or the lengths do not add up to the document.
        """
        given = np.asarray(tokens)
        stored = given.astype(self.dtype)
        # Compared with what was given: a cast wraps silently.
        if not np.array_equal(stored, given, equal_nan=True):
            raise ValueError(f"{self.bin_path}: a token of document {len(self._documents) - 1} is not a {self.dtype}")
        if sequence_lengths is None:
            sequence_lengths = [len(stored)] if len(stored) else []
        if sum(sequence_lengths) != len(stored) or not all(0 <= length < 2**31 for length in sequence_lengths):
            total = f"{len(sequence_lengths)} sequences of {sum(sequence_lengths)} tokens"
            raise ValueError(f"{self.bin_path}: {total} in a document of {len(stored)} (at most 2^31 - 1 in each)")
        with naming(self.bin_path):
            self._bin.write(stored.tobytes())
        self._lengths.extend(sequence_lengths)
        self._documents.append(len(self._lengths))

    def add_documents(self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.int32]) -> None:
        """Append documents of ``lengths`` (a sequence each, or none when empty), whose ``tokens`` follow each other in
        the dataset's type."""
        assert tokens.dtype == self.dtype and lengths.sum(dtype=np.int64) == len(tokens)
        with naming(self.bin_path):
            self._bin.write(tokens.tobytes())
        # First sequence of the next document: empty documents add none.
        self._documents.frombytes((len(self._lengths) + np.cumsum(lengths > 0)).astype(np.int64).tobytes())
        self._lengths.frombytes(lengths[lengths > 0].astype(np.int32).tobytes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with naming(self.bin_path):
                with self._bin:
                    if kind is None:
                        # On the disk before the index gives it its meaning.
                        sync(self._bin)
                if kind is None:
                    self._commit()
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)

    def _commit(self) -> None:
        lengths, documents = np.array(self._lengths, dtype="<i4"), np.array(self._documents, dtype="<i8")
        write_index(self._temporary[1], self.dtype, lengths, documents)
        publish(self._temporary[0], self._temporary[1], self._prefix)


def write_index(path: Path, dtype: np.dtype, lengths: npt.NDArray[np.int32], documents: npt.NDArray[np.int64]) -> None:
    """Write an .idx file durably. ``documents`` has the first sequence of each document, then the number of
    sequences."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    with path.open("wb") as file:
        file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
        file.write(lengths.astype("<i4").tobytes())
        # In 64 bits: lengths are 32-bit numbers, and their sums are not.
        ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
        file.write((ends - lengths.astype("<i8") * dtype.itemsize).tobytes())
        file.write(documents.astype("<i8").tobytes())
        sync(file)


def publish(bin_file: Path, idx_file: Path, prefix: str | Path) -> None:
    """Give finished files, already on the disk, the names of the dataset ``prefix``.

    Without an index there is no dataset: at no moment does an old .idx stand next to a new .bin. After a kill it can be
    called again: a file that is not where it was has its name already.
    """
    bin_path, idx_path = dataset_paths(prefix)
    if bin_file.exists():
        # In this order: without an index the old dataset is gone before the new tokens have its
        # name.
        idx_path.unlink(missing_ok=True)
        bin_file.replace(bin_path)
    if idx_file.exists():
        idx_file.replace(idx_path)
    _sync_folder(bin_path.parent)


def sync(file: IO[Any]) -> None:
    """Wait until everything that was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def naming(path: Path, more: str = "") -> Iterator[None]:
    """Add the path, and ``more``, to an error of the file system inside (a full disk does not name its file)."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error}{more}", str(path)) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
