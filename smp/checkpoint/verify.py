"""Read a whole checkpoint against its checksums, in a few megabytes of memory and without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from smp.checkpoint.entries import CheckpointError, DamagedError, Manifest, Shard
from smp.checkpoint.folder import Folder, Source
from smp.checkpoint.local import open_folder
from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.tensor_file import Slot, read_header


def verify(
    folder: Path | str | Folder,
    manifest: Manifest | None = None,
    progress: Callable[[int], None] = lambda count: None,
    workers: int = 1,
) -> list[str]:
    """Everything that is wrong with the data files of a checkpoint, one line each; nothing when it is whole.

    Args:
        folder: the checkpoint's own folder.
        manifest: its manifest, if it was read before.
        progress: told the number of bytes after each piece, from any thread.
        workers: files that are read at the same time.

    Raises:
        CheckpointError: there is no manifest, or it is damaged itself; or a file cannot be read.
    """
    opened = open_folder(folder)
    manifest = read_manifest(opened) if manifest is None else manifest
    by_file: dict[str, list[tuple[str, Shard]]] = defaultdict(list)
    for name, entry in manifest.tensors.items():
        for shard in entry.shards:
            by_file[shard.file].append((name, shard))
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda file: _file(opened, file, manifest, by_file[file], progress), sorted(manifest.files))
        return [line for lines in found for line in lines]


def _file(
    folder: Folder, file: str, manifest: Manifest, shards: list[tuple[str, Shard]], progress: Callable[[int], None]
) -> list[str]:
    path = f"{folder}/{file}"
    try:
        with folder.reader(file) as source:
            if source.size != manifest.files[file]:
                return [f"{path}: has {source.size} bytes instead of {manifest.files[file]}"]
            slots = read_header(source)
            wrong = []
            for name, shard in sorted(shards, key=lambda pair: slots[pair[1].key].start if pair[1].key in slots else 0):
                try:
                    check_slot(slots, name, shard, manifest.tensors[name].dtype)
                    if _hash(source, slots[shard.key], progress) != shard.xxh3_64:
                        wrong.append(f"{path}: the data of tensor {name} do not match their checksum")
                except DamagedError as error:
                    wrong.append(f"{path}: {error}")
            return wrong
    except (FileNotFoundError, EOFError) as error:
        return [f"{path} is missing or cut off ({error})"]
    except DamagedError as error:
        return [f"{path}: {error}"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def check_slot(slots: dict[str, Slot], name: str, shard: Shard, dtype: str) -> Slot:
    """The place of a shard in its file. Raises DamagedError when the file says something else about it."""
    if shard.key not in slots:
        raise DamagedError(f"has no tensor {shard.key!r}, the data of {name}")
    slot = slots[shard.key]
    if slot.shape != shard.sizes or slot.dtype != dtype:
        raise DamagedError(f"tensor {name} is {slot.dtype} {slot.shape}, not {dtype} {shard.sizes}")
    return slot


def _hash(source: Source, slot: Slot, progress: Callable[[int], None]) -> str:
    hashed, memory = xxhash.xxh3_64(), memoryview(bytearray(min(source.piece, slot.size)))
    for start in range(0, slot.size, source.piece):
        piece = memory[: min(len(memory), slot.size - start)]
        source.read_into(slot.start + start, piece)
        hashed.update(piece)
        progress(len(piece))
    return hashed.hexdigest()
