"""Read a whole checkpoint against its checksums, in a few megabytes of memory and without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.format.entries import DamagedError, Manifest, Shard
from smp.checkpoint.format.manifest import read_manifest
from smp.checkpoint.format.tensor_file import Slot
from smp.checkpoint.read_ahead import Wanted, read_ahead
from smp.checkpoint.reader import check_slot, opened_file, require_checksum


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
    wrong: list[str] = []
    found: list[tuple[Slot, str, Shard]] = []
    try:
        with opened_file(folder, manifest, file, (name for name, _ in shards)) as (source, slots):
            for name, shard in shards:
                # One damaged tensor does not hide the others: all that is wrong is listed.
                try:
                    found.append((check_slot(slots, name, shard, manifest), name, shard))
                except DamagedError as error:
                    wrong.append(f"{folder}/{file}: {error}")
            # In the order of the file.
            found.sort(key=lambda one: one[0].start)
            for block in read_ahead(source, [Wanted(slot) for slot, _, _ in found]):
                progress(block.rows.nbytes)
                try:
                    require_checksum(*found[block.number][1:], block)
                except DamagedError as error:
                    wrong.append(f"{folder}/{file}: {error}")
    except DamagedError as error:
        wrong.append(str(error))
    return wrong
