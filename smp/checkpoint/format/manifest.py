"""The manifest: what a checkpoint folder holds, and the file whose appearance commits it.

The format is written down in ``docs/checkpoint-format.md``. Here is only JSON; no tensor is touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.format.entries import CheckpointError, DamagedError, Manifest, Shard, TensorEntry
from smp.checkpoint.format.validate_manifest import check_manifest, require

MANIFEST = "manifest.json"
FORMAT, VERSION = "smp-checkpoint", 1
# At the beginning of the file only, whatever the white space.
_CHECKSUM = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"checksum"[ \t\r\n]*:[ \t\r\n]*"([0-9a-f]{16})"')


def read_manifest(folder: Path | str | Folder) -> Manifest:
    """The checked manifest of a checkpoint folder.

    Raises:
        CheckpointError: when the folder or its manifest does not exist, or is of another version of the format.
        DamagedError: when the manifest does not match its own checksum, or says something impossible (a file outside
            the folder, shards that do not cover their tensor exactly once, ...).
    """
    opened = open_folder(folder)
    data = _bytes(opened)
    try:
        content = parse_unique(data)
        require(isinstance(content, dict) and content.get("format") == FORMAT, f"format is not {FORMAT!r}")
        # The checksum before the version: of a damaged file the version is as uncertain as everything else.
        require(_is_signed(data), "content does not match its checksum: it was damaged or edited")
        if content.get("version") != VERSION:  # after the checksum: it is whole, and not damaged
            raise CheckpointError(f"version {content.get('version')!r} is not the known one, {VERSION}")
        manifest = _parse_manifest(content)
        check_manifest(manifest, opened.local)
    except CheckpointError as error:
        raise type(error)(f"{opened}/{MANIFEST}: {error}") from None
    # JSON of any shape may come: whatever reading it as a manifest leads to is damage.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        text = f"not a readable manifest ({type(error).__name__}: {error})"
        raise DamagedError(f"{opened}/{MANIFEST}: {text[:500]}") from error
    return manifest


def check_files(folder: Folder, manifest: Manifest, files: Iterable[str]) -> None:
    """Raise for data files whose size is not that in the manifest, which bounds what it may say about tensors.

    Raises:
        DamagedError: one of ``files`` is missing or has another size.
    """
    for file in files:
        size = folder.size(file)
        if size != manifest.files[file]:
            found = "is missing" if size is None else f"has {size} bytes instead of {manifest.files[file]}"
            raise DamagedError(f"{folder}/{file}: {found}")


def _bytes(folder: Folder) -> bytes:
    try:
        return folder.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise CheckpointError(f"no checkpoint folder {folder}") from None
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is not a checkpoint, or one whose save did not finish"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder}/{MANIFEST} cannot be read: {error}") from error


def parse_unique(data: bytes) -> Any:
    """JSON whose objects name every key once, without NaN and infinity. Raises ValueError for anything else."""
    return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one JSON object")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def write_manifest(folder: Path | str | Folder, manifest: Manifest) -> None:
    """Commit: after this returns, the checkpoint is complete and on disk. The data files must be on disk before."""
    opened = open_folder(folder)
    check_manifest(manifest, opened.local)
    # The checksum is the first key and has zeros for a place, so the first 16 zeros are the ones to replace, and a
    # reader can put them back.
    body = {"checksum": "0" * 16, "format": FORMAT, "version": VERSION, **asdict(manifest)}
    data = json.dumps(body, allow_nan=False).encode()
    opened.replace(MANIFEST, data.replace(b"0" * 16, xxhash.xxh3_64_hexdigest(data).encode(), 1))


def check_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` as it will come back from the file.

    Raises:
        TypeError: for anything that JSON would change or cannot hold (tuples, non-string keys, NaN, objects).
    """
    try:
        copy = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra is not plain JSON: {error}") from None
    # JSON turns tuples into lists and keys into strings: comparing with what comes back finds all
    # such cases.
    if copy != extra:
        raise TypeError("extra would change in JSON: use only dict with str keys, list, str, int, float, bool and None")
    assert isinstance(copy, dict)
    return copy


def _is_signed(data: bytes) -> bool:
    """Whether the file begins with its checksum: that of its bytes with zeros in the place of the digits."""
    found = _CHECKSUM.match(data)
    if found is None:
        return False
    zeroed = data[: found.start(1)] + b"0" * 16 + data[found.end(1) :]
    return xxhash.xxh3_64_hexdigest(zeroed).encode() == found[1]


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    """A manifest from its JSON, unchecked. Raises whatever a wrong shape of it leads to."""
    tensors = {name: parse_tensor(entry) for name, entry in content["tensors"].items()}
    require(isinstance(content["extra"], dict), "extra is not a dictionary")
    return Manifest(tensors, dict(content["files"]), content["extra"])


def parse_tensor(entry: Mapping[str, Any]) -> TensorEntry:
    """A tensor of a manifest from its JSON, unchecked."""
    shards = [Shard(**{**s, "offsets": tuple(s["offsets"]), "sizes": tuple(s["sizes"])}) for s in entry["shards"]]
    return TensorEntry(tuple(entry["shape"]), entry["dtype"], tuple(shards))
