"""A folder that checkpoints live in: on a file system (``local``) or in an object store (``remote``).

What the format needs of storage is little: a data file appears whole or not at all, a small file is replaced in one
step, and both are durable when the call returns. Files are opened without following links and must be plain ones.
:class:`LocalFolder` says what each call does; :class:`RemoteFolder` does the same.
"""

from __future__ import annotations

from pathlib import Path

from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.folders.remote import RemoteFolder
from smp.checkpoint.format.entries import CheckpointError

Folder = LocalFolder | RemoteFolder


def open_folder(path: Path | str | Folder) -> Folder:
    """The folder at a path, or at a URL such as ``s3://bucket/run`` (needs fsspec and its back-end for that scheme).

    Raises:
        CheckpointError: no back-end is there; or a URL of the file system, which has paths.
    """
    if isinstance(path, LocalFolder | RemoteFolder):
        return path
    if isinstance(path, str) and path.startswith("file:"):
        raise CheckpointError(f"{path}: give the path alone, without file://")
    if isinstance(path, str) and "://" in path:
        return RemoteFolder.at(path)
    return LocalFolder(Path(path))


def same_folder(one: Folder, other: Folder) -> bool:
    """Whether two folders are the same, by whatever paths."""
    if one.local is not None and other.local is not None:
        return one.local.resolve() == other.local.resolve()
    return str(one) == str(other)
