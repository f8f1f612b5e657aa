"""Reading behind torch's distributed checkpoint (DCP): any rank reads the shards that it needs, and checks them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from smp.checkpoint.entries import DTYPES, CheckpointError, DamagedError, Manifest, Shard, TensorEntry
from smp.checkpoint.folder import Folder, Source
from smp.checkpoint.read_ahead import Block, Wanted, read_ahead
from smp.checkpoint.tensor_file import Slot, as_bits, raw_bytes, read_header
from smp.checkpoint.verify import check_slot

Place = tuple[str, tuple[int, ...]]
"""A shard, by the name of its tensor and its offsets."""
Parts = Sequence[tuple[ReadItem, torch.Tensor]]
"""What is wanted of a shard, and where it belongs."""


class ManifestReader(StorageReader):
    """Reads from one checkpoint folder and verifies the checksum of every shard that it reads.

    Args:
        folder: the checkpoint's own folder.
        manifest: its checked manifest (:func:`smp.checkpoint.read_manifest`).
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.shards: dict[Place, Shard] = {(n, s.offsets): s for n, e in manifest.tensors.items() for s in e.shards}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A reader belongs to the folder of its manifest."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader belongs to the folder of its manifest."""
        assert checkpoint_id is None

    def read_metadata(self) -> Metadata:
        """The manifest in DCP's words."""
        return Metadata({name: _stored(entry) for name, entry in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it needs."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill local storage, file by file. Memory besides it: the buffers of :func:`read_ahead`.

        Raises:
            DamagedError: naming the file, and the tensor where one is known, for anything but what was saved.
            CheckpointError: for a file that cannot be read, which may be for a while only.
        """
        wanted: dict[str, dict[Place, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            place = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            wanted[self.shards[place].file][place].append(item)
        for file, by_place in wanted.items():
            self._read_file(file, by_place, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def _read_file(self, file: str, by_place: Mapping[Place, list[ReadItem]], planner: LoadPlanner) -> None:
        parts = {place: [(i, planner.resolve_tensor(i)) for i in items] for place, items in by_place.items()}
        pinned = any(target.is_cuda for of_one in parts.values() for _, target in of_one)
        names = {name for name, _ in by_place}
        with opened_file(self.folder, self.manifest, file, names) as (source, slots):
            found = {place: check_slot(slots, *self._named(place)) for place in by_place}
            in_order = sorted(found, key=lambda place: found[place].start)
            wanted = [Wanted(found[place], _whole_target(found[place], parts[place])) for place in in_order]
            hashed = xxhash.xxh3_64()
            with closing(read_ahead(source, wanted, pinned)) as blocks:
                for block in blocks:
                    place = in_order[block.number]
                    hashed.update(raw_bytes(block.rows))
                    if wanted[block.number].into is None:
                        for item, target in parts[place]:
                            _copy_rows(block, item, target)
                    if block.last:
                        require_checksum(place[0], self.shards[place], hashed.hexdigest())
                        hashed.reset()
                        for item, target in parts[place]:
                            planner.commit_tensor(item, target)

    def _named(self, place: Place) -> tuple[str, Shard, str]:
        """Name, shard and dtype of a tensor."""
        return place[0], self.shards[place], self.manifest.tensors[place[0]].dtype


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
    path, held = f"{folder}/{file}", ", ".join(sorted(names)[:3])
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


def require_checksum(name: str, shard: Shard, found: str) -> None:
    """Raise DamagedError when what was read of a shard is not what was saved."""
    if found != shard.xxh3_64:
        raise DamagedError(f"the data of tensor {name} do not match their checksum: the file is damaged")


def _whole_target(slot: Slot, parts: Parts) -> torch.Tensor | None:
    """The tensor that takes all of a shard in one piece, if there is one: the shard is read straight into it."""
    target = parts[0][1]
    whole = len(parts) == 1 and tuple(target.shape) == slot.shape
    return target if whole and target.is_cpu and target.is_contiguous() else None


def _copy_rows(block: Block, item: ReadItem, target: torch.Tensor) -> None:
    """Copy what ``item`` wants of some rows of the stored shard."""
    offsets, lengths = tuple(item.storage_offsets) or (0,), tuple(item.lengths) or (1,)
    begin, end = max(block.first, offsets[0]), min(block.first + len(block.rows), offsets[0] + lengths[0])
    if begin >= end:
        return
    piece = block.rows.narrow(0, begin - block.first, end - begin)
    for dim in range(1, len(offsets)):
        piece = piece.narrow(dim, offsets[dim], lengths[dim])
    part = target.view(lengths).narrow(0, begin - offsets[0], end - begin)
    if part.is_cpu:  # on one thread: torch's others would take the processors from those that read
        np.copyto(as_bits(part).numpy(), as_bits(piece).numpy())
    else:
        part.copy_(piece)


def _stored(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in entry.shards]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)
