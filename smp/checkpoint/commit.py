"""The end of a save: the manifest makes the folder a checkpoint, and files that it does not name are removed. Imports
no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.entries import CheckpointError, Manifest
from smp.checkpoint.format.manifest import MANIFEST, read_manifest, write_manifest

SHARD_FILE = re.compile(r"shard_\d{5,}(?:\.(\d+))?\.safetensors")
OUR_FILES = re.compile(rf"({SHARD_FILE.pattern}(\.json)?|{re.escape(MANIFEST)})((\.[0-9a-f]+)?\.tmp)?")
"""Names that a save gives to files: data, reports of background writers, the manifest, and their temporary files."""


def commit(folder: Folder, manifest: Manifest) -> list[str]:
    """Write the manifest, with the sizes that the files have; then remove data files that it does not name.

    Returns:
        A line when they cannot be removed, which is no failure: the checkpoint is complete.

    Raises:
        CheckpointError: a file does not exist.
    """
    files: dict[str, int] = {}
    # The sizes that rank 0 sees: on a file system that is not shared the other ranks' files are missing here.
    for file in sorted({shard.file for entry in manifest.tensors.values() for shard in entry.shards}):
        if (size := folder.size(file)) is None:
            raise CheckpointError(f"rank 0 does not see {folder}/{file}: is the folder on a shared file system?")
        files[file] = size
    # Names of data files first: a manifest that survives a crash must find all files that it names.
    folder.sync()
    write_manifest(folder, replace(manifest, files=files))
    try:
        remove_unnamed(folder, files)
    except OSError as error:
        return [f"WARNING: {folder} is complete; files of the checkpoint before could not be removed: {error}"]
    return []


def remove_unnamed(folder: Folder, named: Mapping[str, int]) -> list[str]:
    """Delete the files of saves in a checkpoint folder that the manifest does not name; returns their names."""
    # Only names that a save gives: a user's own files stay.
    left = [n for n in folder.names() if OUR_FILES.fullmatch(n) and n not in named and n != MANIFEST]
    for name in left:
        folder.delete(name)
    return left


def discard_unfinished(folder: Folder) -> list[str]:
    """Delete what a save that never committed left in ``folder``, and the folder with it when nothing else is there.

    A checkpoint that was there before stays, and so does any file that no save would have written. Nobody may be saving
    into the folder. Returns the names of the files that were deleted.
    """
    # A manifest is a complete checkpoint: only what it does not name may go.
    if MANIFEST in folder.names():
        try:
            return remove_unnamed(folder, read_manifest(folder).files)
        except CheckpointError:
            return []  # a load will say what is wrong with it
    # Data files before the folder; the folder only if nothing else is in it.
    left = remove_unnamed(folder, {})
    if folder.exists() and not folder.names():
        folder.remove()
    return left
