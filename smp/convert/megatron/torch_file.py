"""Files of ``torch.save``, read without running what they hold.

torch's own restricted unpickler builds tensors, numbers, texts, lists and dictionaries. Here it builds
``argparse.Namespace`` too, and an inert stand-in for whatever else Megatron names. Nothing is imported or called by a
name that a file gives. Under ``FakeTensorMode`` no data are read: a tensor only says where they lie.
"""

from __future__ import annotations

import io
import struct
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.folders.local import Source
from smp.checkpoint.format.tensor_bytes import DTYPE_NAMES
from smp.checkpoint.format.tensor_file import Slot
from smp.convert.store import unreadable

GETATTR = "builtins.getattr"
"""Python 3.11.0 to 3.11.3 pickle members of enumerations as a call of it. Nothing is looked up here."""


class Inert:
    """Stands for an object of any class: accepts what a pickle gives it and ignores it."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """The state is ignored."""


def refusal(name: str) -> str:
    """The error for a name that a pickle may not use."""
    return f"asks for {name}, which is not a tensor or plain data: refused"


def read_torch_file(
    source: Source, path: Path, *, start: int = 0, size: int | None = None, inert: tuple[str, ...] = ()
) -> Any:
    """What ``torch.save`` wrote, a tensor or a dictionary, with a :class:`Slot` of the file for each tensor.

    Args:
        source: the open file.
        path: of it, for messages.
        start, size: bytes of the file that the archive is in; by default all.
        inert: beginnings of names that get a stand-in.

    Raises:
        DamagedError: it is cut off, or no such file.
        CheckpointError: it cannot be read, holds something that may not be built, or is of the format before torch 1.6.
    """
    window = _Window(source, start, source.size - start if size is None else size)
    try:
        content, ends = _load(io.BufferedReader(window), path, inert)
        if isinstance(content, dict):
            return {k: _slot(v, ends, start, path) if isinstance(v, torch.Tensor) else v for k, v in content.items()}
        return _slot(content, ends, start, path) if isinstance(content, torch.Tensor) else content
    except CheckpointError:
        raise
    except Exception as error:  # what a broken pickle can raise is without end
        if window.failed is not None:
            raise unreadable(path, window.failed) from window.failed
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DamagedError(f"{path} is damaged or cut off ({problem})"[:500]) from None


def _load(file: io.BufferedReader, path: Path, inert: tuple[str, ...]) -> tuple[Any, dict[int, int]]:
    """(the content, sizes of the archive's entries by the position of their data)."""
    if file.peek(2)[:2] != b"PK":
        raise CheckpointError(f"{path} is not a zip archive of torch.save (torch 1.6 or later)")
    archive = zipfile.ZipFile(file)
    orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
    if orders not in ([], [b"little"]):  # torch would swap the bytes of a tensor that has none, and crash
        raise CheckpointError(f"{path} was written on a big-endian machine")
    # Data are read at their place in the file, so they must lie there as they are.
    # Directly readable: a slot points into the file itself.
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise DamagedError(f"{path} is compressed: it is not a file of torch.save")
    file.seek(0)
    # Names in the pickle, found by torch without running it.
    names = set(get_unsafe_globals_in_checkpoint(file)) - {"argparse.Namespace"}
    # All names of the pickle before it is loaded: nothing is built of a file that asks for something else.
    for name in sorted(names):
        if name != GETATTR and not name.startswith(inert):
            raise CheckpointError(f"{path} {refusal(name)}")
    file.seek(0)
    # No data are read: the tensors only tell where their data are in the file.
    with FakeTensorMode(), safe_globals([Namespace, *((Inert, name) for name in names)]):
        content = torch.load(file, weights_only=True)
    sizes = {}
    # From each entry's own header, which may be longer than the list at the end of the archive says.
    for entry in archive.infolist():
        file.seek(entry.header_offset)
        # Local file header of zip: 30 bytes, of which the last two numbers are the lengths of name
        # and extra field.
        name_size, extra_size = struct.unpack("<26x2H", file.read(30))
        sizes[entry.header_offset + 30 + name_size + extra_size] = entry.file_size
    return content, sizes


def _slot(tensor: torch.Tensor, sizes: Mapping[int, int], start: int, path: Path) -> Slot:
    """Position of a tensor's data, in an archive that begins at byte ``start`` of the file."""
    shape, begin = tuple(tensor.shape), int(tensor.storage_offset()) * tensor.itemsize
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{path} holds a tensor of type {tensor.dtype}: refused")
    if not tensor.is_contiguous():
        text = f"a tensor of shape {shape} that does not lie row by row, with strides {tensor.stride()}"
        raise CheckpointError(f"{path} holds {text}: refused")
    # torch sets this offset instead of reading, under FakeTensorMode.
    storage = tensor.untyped_storage()._checkpoint_offset
    assert storage is not None, "set under FakeTensorMode"
    if (size := sizes.get(storage)) is None:  # torch computes where the next one is, by its own padding
        raise CheckpointError(f"{path} was packed again by another program: save it with torch.save")
    # Views of a larger storage are fine, as far as it goes.
    if begin + tensor.nbytes > size:  # a storage without data grows to what a pickle says
        count = size // tensor.itemsize
        raise CheckpointError(f"{path} holds a tensor of shape {shape} in a storage of {count} elements: refused")
    return Slot("", DTYPE_NAMES[tensor.dtype], shape, start + storage + begin, tensor.nbytes)


class _Window(io.RawIOBase):
    """A part of a file as a file object. ``failed`` keeps an error of the system, which torch would report as a damaged
    file."""

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
        try:
            self._source.read_into(self._start + self._at, view[:count])
        except OSError as error:
            self.failed = error
            raise
        self._at += count
        return count
