"""Files of ``torch.save``, read without running what they hold.

Such a file is a zip archive: a pickle that describes objects and, uncompressed, the bytes of each tensor's storage. The
pickle is a program; here it may only build dictionaries, lists, numbers, texts, ``argparse.Namespace`` and descriptions
of tensors. Whatever else it names is refused, but for Megatron's own classes and the like, which become inert records:
nothing is ever imported or called by a name that a file gives.
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.entries import DTYPE_NAMES, DTYPES
from smp.checkpoint.folder import Source
from smp.checkpoint.tensor_file import Slot
from smp.convert.store import unreadable

_LOCAL_HEADER = 30  # bytes of a file's header in a zip archive, before its name
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
Storage = tuple[torch.dtype, int, int]
"""dtype, first byte in the file, number of elements."""


class Record:
    """What stands for an object of a class that is not known: its class's name, arguments and state."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a dictionary of a known kind of somebody else: not needed."""

    def append(self, value: Any) -> None:
        """As ``__setitem__``."""

    extend = append

    def __reduce__(self) -> Any:
        raise TypeError("a stand-in is never written")


def record_class(name: str) -> type[Record]:
    """A class of records of one kind."""
    return type("Record", (Record,), {"kind": name})


class _RefusedError(Exception):
    """A pickle names something that it may not."""


class RestrictedUnpickler(pickle.Unpickler):
    """Builds plain objects only.

    Args:
        file: the pickle.
        storage: (type of storage, key, number of elements) -> where it is.
        known: names that may be built besides, and what stands for them.
        inert: beginnings of names whose objects become records.
    """

    def __init__(
        self,
        file: io.BufferedIOBase | io.BytesIO,
        storage: Callable[[Any, str, int], Storage],
        known: Mapping[str, Any],
        inert: tuple[str, ...],
    ) -> None:
        super().__init__(file)
        self._storage, self._inert = storage, inert
        self._known = {**_KNOWN, **known}

    def find_class(self, module: str, name: str) -> Any:
        """Never imports: looks into a table."""
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full.startswith(self._inert):
            return record_class(full)
        raise _RefusedError(full)

    def persistent_load(self, pid: Any) -> Storage:
        """A tensor's storage: ("storage", type, key, device, number of elements)."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or type(count) is not int or count < 0:
            raise _RefusedError(f"storage {key}")
        return self._storage(dtype, str(key), count)


def _rebuild_tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> Slot:
    dtype, start, count = storage
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(stride):
        raise _RefusedError(f"a tensor of shape {shape}")
    size, expected = math.prod(shape), 1
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and step != expected:
            raise _RefusedError(f"a tensor of shape {shape} that does not lie row by row, with strides {stride}")
        expected *= n
    if offset + size > count:
        raise _RefusedError(f"a tensor of shape {shape} in a storage of {count} elements")
    return Slot("", DTYPE_NAMES[dtype], shape, start + offset * dtype.itemsize, size * dtype.itemsize)


def _member(owner: Any, name: str) -> Record:
    """A member of an enumeration: Python 3.11.0 to 3.11.3 write ``getattr(class, name)``. Of records only."""
    if not (isinstance(owner, type) and issubclass(owner, Record)):
        raise _RefusedError("builtins.getattr")
    return owner(name)


_KNOWN: dict[str, Any] = {
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,  # in the pickle protocol of torch.save
    "argparse.Namespace": argparse.Namespace,
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}


class _Window(io.RawIOBase):
    """A part of a file as a file. ``failed`` is an error of the system: zipfile tells it as damage."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self._source, self._start, self._size, self._at = source, start, size, 0
        self.failed: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), max(0, self._size - self._at))
        if count:
            try:
                self._source.read_into(self._start + self._at, view[:count])
            except OSError as error:
                self.failed = error
                raise
            self._at += count
        return count


def read_torch_file(
    source: Source,
    path: Path,
    *,
    start: int = 0,
    size: int | None = None,
    known: Mapping[str, Any] | None = None,
    inert: tuple[str, ...] = (),
) -> Any:
    """What ``torch.save`` wrote, with tensors as :class:`Slot` of the file.

    Args:
        source: the open file.
        path: of it, for messages.
        start, size: bytes of the file that the archive is in; by default all.
        known, inert: as of :class:`RestrictedUnpickler`.

    Raises:
        DamagedError: it is cut off, or no such file.
        CheckpointError: it cannot be read, holds something that may not be built, or is of the format before torch 1.6.
    """
    size = source.size - start if size is None else size
    part = _Window(source, start, size)
    window = io.BufferedReader(part)
    try:
        if window.peek(2)[:2] != b"PK":
            raise CheckpointError(f"{path} is not a zip archive of torch.save (torch 1.6 or later)")
        archive = zipfile.ZipFile(window)
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise DamagedError(f"{path} holds no data.pkl: it is not a file of torch.save")
        root = names[0].removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError(f"{path} was written on a big-endian machine")

        def storage(dtype: Any, key: str, count: int) -> Storage:
            if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
                raise _RefusedError(f"a tensor of type {dtype}")
            info = archive.getinfo(f"{root}data/{key}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != count * dtype.itemsize:
                raise DamagedError(f"{path}: storage {key} has {info.file_size} bytes, not {count} {dtype}")
            return dtype, start + _data_offset(window, info, size), count

        pickled = io.BytesIO(archive.read(names[0]))
        return RestrictedUnpickler(pickled, storage, known or {}, inert).load()
    except _RefusedError as refused:
        raise CheckpointError(f"{path} asks for {refused}, which is not a tensor or plain data: refused") from None
    except CheckpointError:
        raise
    except Exception as error:  # what a broken pickle can raise is without end
        if part.failed is not None:
            raise unreadable(path, part.failed) from part.failed
        raise DamagedError(f"{path} is damaged or cut off ({type(error).__name__}: {error})"[:500]) from None


def _data_offset(window: Any, info: zipfile.ZipInfo, size: int) -> int:
    """Where the bytes of an entry begin in its archive: behind a header whose size only the header itself says."""
    window.seek(info.header_offset)
    header = window.read(_LOCAL_HEADER)
    name, extra = struct.unpack("<HH", header[26:30])
    offset = int(info.header_offset) + _LOCAL_HEADER + name + extra
    if offset + info.file_size > size:
        raise DamagedError("its data lie outside of the file")
    return offset
