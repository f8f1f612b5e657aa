"""Reading slices of shards, each checked against its checksum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.folders.local import Source
from smp.checkpoint.format.entries import CheckpointError, DamagedError, Manifest, Shard
from smp.checkpoint.format.tensor_bytes import as_bits
from smp.checkpoint.format.tensor_file import Slot, read_header
from smp.checkpoint.read_ahead import Block, Wanted, read_ahead


@dataclass(frozen=True)
class Slice:
    """A part of a shard: ``target`` takes its elements from ``offsets`` on."""

    offsets: tuple[int, ...]
    target: torch.Tensor


Slices = Mapping[tuple[str, Shard], Slice]
"""Wanted parts of one file, by the name of the tensor and its shard."""


@torch.no_grad()
def read_slices(folder: Folder, manifest: Manifest, file: str, slices: Slices) -> None:
    """Fill the targets of ``slices`` from one file. Memory besides them: the buffers of :func:`read_ahead`.

    Raises:
        DamagedError: naming the file, and the tensor where one is known, for anything but what was saved.
        CheckpointError: for a file that cannot be read, which may be for a while only.
    """
    # Only page-locked memory is copied to a GPU at the full speed of the bus.
    pinned = any(one.target.is_cuda for one in slices.values())
    with opened_file(folder, manifest, file, (name for name, _ in slices)) as (source, slots):
        found = {key: check_slot(slots, *key, manifest) for key in slices}
        # By position in the file: reading goes forward, which disks and the system's read-ahead are made for.
        in_order = sorted(found, key=lambda key: found[key].start)
        wanted = [Wanted(found[key], _whole_target(found[key], slices[key])) for key in in_order]
        with closing(read_ahead(source, wanted, pinned)) as blocks:
            for block in blocks:
                key = in_order[block.number]
                if wanted[block.number].into is None:
                    # Copied before the checksum is known: it covers the whole shard, which no buffer holds. After an
                    # error the content of what is loaded is undefined, and ``load`` says so.
                    _copy_rows(block, slices[key])
                require_checksum(*key, block)


@contextmanager
def opened_file(
    folder: Folder, manifest: Manifest, file: str, names: Iterable[str]
) -> Iterator[tuple[Source, dict[str, Slot]]]:
    """A data file that is as large as the manifest says, and the tensors in it by key.

    Raises:
        DamagedError: it is missing, has another size or no header that can be; or one from inside of the ``with``, with
            the file's name in front.
        CheckpointError: it cannot be read. What it should hold, ``names``, is in the message.
    """
    path, held = f"{folder}/{file}", ", ".join(sorted(set(names))[:3])
    try:
        with folder.reader(file) as source:
            # Before the header is read: what it says is bounded by the size.
            if source.size != manifest.files[file]:
                raise DamagedError(f"has {source.size} bytes instead of {manifest.files[file]}")
            yield source, read_header(source)
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from None
    except (FileNotFoundError, EOFError) as error:
        raise DamagedError(f"{path} is missing or cut off ({error}); it should hold {held}, ...") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it should hold {held}, ...") from error


def check_slot(slots: Mapping[str, Slot], name: str, shard: Shard, manifest: Manifest) -> Slot:
    """Place of a shard in its file. Raises DamagedError when the file says something else about it."""
    if shard.key not in slots:
        raise DamagedError(f"has no tensor {shard.key!r}, the data of {name}")
    slot, dtype = slots[shard.key], manifest.tensors[name].dtype
    if slot.shape != shard.sizes or slot.dtype != dtype:
        raise DamagedError(f"tensor {name} is {slot.dtype} {slot.shape}, not {dtype} {shard.sizes}")
    return slot


def require_checksum(name: str, shard: Shard, block: Block) -> None:
    """Raise DamagedError when a shard ends with this block and is not what was saved."""
    if block.checksum not in (None, shard.xxh3_64):
        raise DamagedError(f"the data of tensor {name} do not match their checksum: the file is damaged")


def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of ``sizes`` elements in each dimension, from ``offsets`` on."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _whole_target(slot: Slot, wanted: Slice) -> torch.Tensor | None:
    """The tensor that takes a whole shard as it lies in the file, if there is one: the shard is read straight into
    it."""
    # Only memory that lies as the file does can be read into. A GPU's cannot.
    target = wanted.target
    return target if tuple(target.shape) == slot.shape and target.is_cpu and target.is_contiguous() else None


def _copy_rows(block: Block, wanted: Slice) -> None:
    """Copy the wanted part of some rows of the stored shard."""
    target = wanted.target if wanted.target.ndim else wanted.target.view(1)
    first, *others = wanted.offsets or (0,)
    # Rows of the shard: the overlap of this block with the wanted part.
    begin, end = max(block.first, first), min(block.first + len(block.rows), first + len(target))
    if begin >= end:
        return
    target = target[begin - first : end - first]
    piece = narrow(block.rows, (begin - block.first, *others), target.shape)
    if target.is_cpu:  # on one thread: torch's others would take the processors from those that read
        np.copyto(as_bits(target).numpy(), as_bits(piece).numpy())
    else:
        target.copy_(piece)
