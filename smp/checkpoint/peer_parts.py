"""Parts of a copy in memory: what each rank says of its file as soon as that is written.

A copy counts by its manifest, which is written when all ranks have heard from each other. Where a process is lost
before that, all files may be there all the same; then the parts together are the manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from smp.checkpoint.format.entries import Manifest, TensorEntry
from smp.checkpoint.format.manifest import parse_tensor


def write_part(folder: Path, rank: int, ranks: int, manifest: Manifest) -> None:
    """Write the manifest of this rank's own file; ``ranks`` is the number of all."""
    path = folder / f"part_{rank:05d}.json"
    # Renamed when it is complete: the process may be killed at any time.
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"rank": rank, "ranks": ranks, **asdict(manifest)}))
    os.replace(temporary, path)


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """The parts on this node, as JSON."""
    found = []
    # A part that was being written has another suffix, or is no JSON: left out.
    for path in folder.glob("part_*.json"):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def manifest_of(parts: Sequence[Mapping[str, Any]]) -> Manifest | None:
    """The manifest of the copy with these parts; None: some rank's part is missing."""
    if not parts or {part["rank"] for part in parts} != set(range(parts[0]["ranks"])):
        return None
    entries: dict[str, list[TensorEntry]] = {}
    for part in parts:
        for name, entry in part["tensors"].items():
            entries.setdefault(name, []).append(parse_tensor(entry))
    tensors = {}
    for name, found in sorted(entries.items()):
        shards = sorted(chain.from_iterable(entry.shards for entry in found), key=lambda shard: shard.offsets)
        tensors[name] = TensorEntry(found[0].shape, found[0].dtype, tuple(shards))
    files = {file: size for part in parts for file, size in part["files"].items()}
    return Manifest(tensors, files, dict(parts[0]["extra"]))
