"""Parts of a copy in memory: what each rank says of its file as soon as that is written, and keeps beside each copy of
it. All parts together are the manifest.
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


def part_of(rank: int) -> str:
    """The name of a rank's part."""
    return f"part_{rank:05d}.json"


def is_part(name: str) -> bool:
    """Whether a file is a part by its name."""
    return name.startswith("part_") and name.endswith(".json")


def write_part(folder: Path, rank: int, ranks: int, manifest: Manifest) -> None:
    """Write the manifest of this rank's own file; ``ranks`` is the number of all."""
    path = folder / part_of(rank)
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
    """The manifest of the copy with these parts, of which there may be several of a rank; None: some rank's part is
    missing."""
    parts = list({part["rank"]: part for part in parts}.values())
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
