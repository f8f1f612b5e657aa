"""Reading slices of shards, each checked against its checksum; and behind torch's distributed checkpoint (DCP)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from smp.checkpoint.entries import DTYPES, CheckpointError, DamagedError, Manifest, Shard, TensorEntry
from smp.checkpoint.folder import Folder, Source
from smp.checkpoint.read_ahead import Block, Wanted, read_ahead
from smp.checkpoint.tensor_file import Slot, as_bits, read_header


@dataclass(frozen=True)
class Slice:
    """What is wanted of a shard: ``target`` takes its elements from ``offsets`` on."""

    offsets: tuple[int, ...]
    target: torch.Tensor


Slices = Mapping[tuple[str, Shard], Sequence[Slice]]
"""What is wanted of one file, by the name of the tensor and its shard."""


class ManifestReader(StorageReader):
    """Reads from one checkpoint folder, as its checked manifest says."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.shards = {(name, s.offsets): s for name, entry in manifest.tensors.items() for s in entry.shards}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a reader belongs to the folder of its manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None

    def read_metadata(self) -> Metadata:
        """The manifest in DCP's words."""
        return Metadata({name: _stored(entry) for name, entry in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan  # every rank reads what it needs

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill local storage, file by file; raises as :func:`read_slices`."""
        targets = [(item, planner.resolve_tensor(item)) for item in plan.items]
        by_file: dict[str, dict[tuple[str, Shard], list[Slice]]] = defaultdict(lambda: defaultdict(list))
        for item, target in targets:
            name = item.storage_index.fqn
            shard = self.shards[name, tuple(item.storage_index.offset or ())]
            by_file[shard.file][name, shard].append(Slice(tuple(item.storage_offsets), target))
        for file, slices in by_file.items():
            read_slices(self.folder, self.manifest, file, slices)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@torch.no_grad()
def read_slices(folder: Folder, manifest: Manifest, file: str, slices: Slices) -> None:
    """Fill the targets of ``slices`` from one file. Memory besides them: the buffers of :func:`read_ahead`.

    Raises:
        DamagedError: naming the file, and the tensor where one is known, for anything but what was saved.
        CheckpointError: for a file that cannot be read, which may be for a while only.
    """
    pinned = any(one.target.is_cuda for of_shard in slices.values() for one in of_shard)
    with opened_file(folder, manifest, file, (name for name, _ in slices)) as (source, slots):
        found = {key: check_slot(slots, *key, manifest) for key in slices}
        in_order = sorted(found, key=lambda key: found[key].start)
        wanted = [Wanted(found[key], _whole_target(found[key], slices[key])) for key in in_order]
        with closing(read_ahead(source, wanted, pinned)) as blocks:
            for block in blocks:
                key = in_order[block.number]
                if wanted[block.number].into is None:
                    for one in slices[key]:
                        _copy_rows(block, one)
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
    """Where a shard lies in its file. Raises DamagedError when the file says something else about it."""
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
    """The elements of a tensor from ``offsets`` on, ``sizes`` many in each dimension, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _whole_target(slot: Slot, slices: Sequence[Slice]) -> torch.Tensor | None:
    """The tensor that takes all of a shard in one piece, if there is one: the shard is read straight into it."""
    target = slices[0].target
    whole = len(slices) == 1 and tuple(target.shape) == slot.shape
    return target if whole and target.is_cpu and target.is_contiguous() else None


def _copy_rows(block: Block, wanted: Slice) -> None:
    """Copy what is wanted of some rows of the stored shard."""
    target = wanted.target if wanted.target.ndim else wanted.target.view(1)
    first, *others = wanted.offsets or (0,)
    begin, end = max(block.first, first), min(block.first + len(block.rows), first + len(target))
    if begin >= end:
        return
    target = target[begin - first : end - first]
    piece = narrow(block.rows, (begin - block.first, *others), target.shape)
    if target.is_cpu:  # on one thread: torch's others would take the processors from those that read
        np.copyto(as_bits(target).numpy(), as_bits(piece).numpy())
    else:
        target.copy_(piece)


def _stored(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in entry.shards]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)
