"""Safetensors files and a manifest behind torch's distributed checkpoint (DCP).

Every rank that has something to write writes one file. The coordinator (rank 0) writes the manifest after all of them
are on disk; until then the folder is not a checkpoint. A save over an existing checkpoint takes new file names and the
manifest is replaced in one step, so that the folder is readable at every moment: as the old one, then as the new.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from smp.checkpoint.manifest import (
    DTYPES,
    CheckpointError,
    Manifest,
    Shard,
    TensorEntry,
    check_extra,
    sync_to_disk,
    write_manifest,
)

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Place = tuple[str, tuple[int, ...]]
"""A shard, by the name of its tensor and its offsets."""
_SHARD_FILE = re.compile(r"shard_\d{5,}(?:\.(\d+))?\.safetensors")


def checksum(tensor: torch.Tensor) -> str:
    """xxh3_64 of the raw bytes of a contiguous CPU tensor, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


class ManifestWriter(StorageWriter):
    """Writes one checkpoint folder.

    Args:
        folder: the checkpoint's own folder, on a file system that all ranks share. Made when it does not exist.
        extra: plain JSON; rank 0's is written.
    """

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        self.folder, self.extra = folder, extra

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Refuse an unwritable ``extra`` before anything is written."""
        check_extra(self.extra)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Files are named centrally."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder and give every rank a file name that nothing in it has, committed or left by a crash."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_to_disk(self.folder.parent)
        used = [match for path in self.folder.iterdir() if (match := _SHARD_FILE.fullmatch(path.name))]
        generation = max((int(match[1] or 0) + 1 for match in used), default=0)
        suffix = f".{generation}" if generation else ""
        return [replace(p, storage_data=f"shard_{rank:05d}{suffix}.safetensors") for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if there is anything in its plan, and bring it to disk."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors: dict[str, torch.Tensor] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor) and item.index.fqn not in tensors
            tensors[item.index.fqn] = data.detach().cpu().contiguous()
        save_file(tensors, self.folder / plan.storage_data)
        sync_to_disk(self.folder / plan.storage_data)
        results = []
        for item in plan.items:
            data, offsets = tensors[item.index.fqn], tuple(item.index.offset or ())
            shard = Shard(plan.storage_data, item.index.fqn, offsets, tuple(data.shape), checksum(data))
            results.append(WriteResult(item.index, data.nbytes, shard))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit with the manifest, then remove data files that it does not name."""
        shards: dict[str, list[Shard]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            shards[result.index.fqn].append(result.storage_data)
        tensors = {}
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            parts = tuple(sorted(shards[name], key=lambda shard: shard.offsets))
            tensors[name] = TensorEntry(tuple(stored.size), _DTYPE_NAMES[stored.properties.dtype], parts)
        files = {file: self._size(file) for file in sorted({s.file for parts in shards.values() for s in parts})}
        sync_to_disk(self.folder)
        write_manifest(self.folder, Manifest(tensors, files, check_extra(self.extra)))
        self._remove_all_but(files)

    def _size(self, file: str) -> int:
        try:
            return (self.folder / file).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"rank 0 does not see {self.folder / file}: is the folder on a shared file system?"
            ) from None

    def _remove_all_but(self, files: Mapping[str, int]) -> None:
        for path in self.folder.iterdir():
            if _SHARD_FILE.fullmatch(path.name) and path.name not in files:
                path.unlink()


class ManifestReader(StorageReader):
    """Reads from one checkpoint folder and verifies the checksum of every shard before any of it is used.

    Args:
        folder: the checkpoint's own folder.
        manifest: its checked manifest (:func:`smp.checkpoint.read_manifest`).
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
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

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill local storage, file by file and shard by shard; only one shard is in memory at a time.

        Raises:
            CheckpointError: naming the file, and the tensor where one is known, for anything but what was saved.
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

    def _read_file(self, file: str, by_place: Mapping[Place, list[ReadItem]], planner: LoadPlanner) -> None:
        path = self.folder / file
        try:
            size = path.stat().st_size
            if size != self.manifest.files[file]:
                raise CheckpointError(f"{path} has {size} bytes instead of {self.manifest.files[file]}")
            with safe_open(path, framework="pt") as opened:
                for place, items in by_place.items():
                    stored = self._verified(path, place, opened.get_tensor(self.shards[place].key))
                    for item in items:
                        _copy_piece(stored, item, planner)
        except (OSError, SafetensorError) as error:
            names = ", ".join(sorted({name for name, _ in by_place})[:3])
            raise CheckpointError(f"{path} cannot be read ({error}); it should hold {names}, ...") from error

    def _verified(self, path: Path, place: Place, stored: torch.Tensor) -> torch.Tensor:
        name, shard = place[0], self.shards[place]
        dtype = DTYPES[self.manifest.tensors[name].dtype]
        if tuple(stored.shape) != shard.sizes or stored.dtype != dtype:
            found = f"{stored.dtype} {tuple(stored.shape)}"
            raise CheckpointError(f"{path}: tensor {name} is {found}, not {dtype} {shard.sizes}")
        if checksum(stored) != shard.xxh3_64:
            raise CheckpointError(f"{path}: the data of tensor {name} do not match their checksum: the file is damaged")
        return stored


def _copy_piece(stored: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    piece = stored
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        piece = piece.narrow(dim, start, length)
    target = planner.resolve_tensor(item)
    target.copy_(piece)
    planner.commit_tensor(item, target)


def _stored(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in entry.shards]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)
