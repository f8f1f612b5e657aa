"""This project's own checkpoints: opened as weights, and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from smp import __version__
from smp.checkpoint import CheckpointError, Manifest, Shard, TensorEntry, read_manifest
from smp.checkpoint.box import read_box_into
from smp.checkpoint.entries import DTYPE_NAMES, DTYPES
from smp.checkpoint.folder import Folder
from smp.checkpoint.local import LocalFolder, open_folder
from smp.checkpoint.manifest import MANIFEST
from smp.checkpoint.rewrite import Box, write_shards
from smp.checkpoint.storage import commit
from smp.checkpoint.tensor_file import rows_of_a_shard, shard_keys
from smp.config import ModelConfig
from smp.convert.hf import carry
from smp.convert.layout import Link, all_rows
from smp.convert.pieces import Feed, Planned, in_files
from smp.convert.store import Stored
from smp.convert.weights import Weights
from smp.models.inventory import inventory

_MODEL = "model."


class SmpWeights(Weights):
    """The model in a checkpoint; optimizer state is left alone.

    Args:
        folder: one checkpoint's own folder.
        manifest: its manifest, when it was read before.
        config: the model that is to be filled; by default the one that the checkpoint describes.

    Raises:
        CheckpointError: it is not a checkpoint of a training run, or not of the model that its settings describe.
    """

    def __init__(
        self, folder: str | Path | Folder, manifest: Manifest | None = None, config: ModelConfig | None = None
    ) -> None:
        self.folder, self.notes = open_folder(folder), []
        self.manifest = manifest or read_manifest(self.folder)
        self.config = config or saved_config(self.manifest, self.folder)
        entries = {n.removeprefix(_MODEL): e for n, e in self.manifest.tensors.items() if n.startswith(_MODEL)}
        if self.manifest.extra.get("adapters"):
            raise CheckpointError(
                f"{self.folder} holds adapters without their model: tools/merge_lora.py adds them to it"
            )
        wanted = {p.name: p.shape for p in inventory(self.config)}
        for name in [*wanted, *entries]:
            there, should = entries[name].shape if name in entries else None, wanted.get(name)
            if there != should:
                said = f"is {_shown(there)}; the model's is {_shown(should)}"
                raise CheckpointError(f"{self.folder}/{MANIFEST}: tensor {_MODEL}{name} {said}")
        self.tensors = {name: Stored(entries[name].shape, DTYPES[entries[name].dtype]) for name in wanted}
        if left := len(self.manifest.tensors) - len(entries):
            self.notes.append(f"{left} tensors of optimizer state are left out")

    def stretches(self, name: str, first: int, count: int, step: int) -> Iterator[tuple[int, int]]:
        """Every read verifies whole shards: cut where no shard is cut, so that none is read twice."""
        begin, last = first, first + count
        for end in self._cuts(name):
            if end > begin and (end - begin >= step or end >= last):
                yield begin, min(end, last) - begin
                begin = end
            if begin >= last:
                return

    def _cuts(self, name: str) -> list[int]:
        """Rows at which shards end and none goes on."""
        shards = self.manifest.tensors[_MODEL + name].shards
        ends: list[int] = []
        for begin, end in sorted((s.offsets[0], s.offsets[0] + s.sizes[0]) for s in shards):
            if ends and begin < ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                ends.append(end)
        return ends

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        read_box_into(self.folder, self.manifest, _MODEL + name, offsets, target)
        if target is not out:
            out.copy_(target)

    def fingerprint(self) -> Any:
        return self.folder.read(MANIFEST)[:64].decode(errors="replace")  # its own checksum, which covers all others


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def saved_config(manifest: Manifest, folder: Folder) -> ModelConfig:
    """The settings of the model that a checkpoint's ``extra`` holds.

    Raises:
        CheckpointError: it holds none.
    """
    saved = manifest.extra.get("config")
    names = [f.name for f in fields(ModelConfig)]
    if not isinstance(saved, dict) or not all(name in saved for name in names):
        raise CheckpointError(f"{folder}/{MANIFEST} holds no settings of a model: it is not of a training run")
    return ModelConfig(**{name: saved[name] for name in names})


class SmpTarget:
    """What a checkpoint with these weights is made of: weights only, at iteration 0. See ``formats.make_target``."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype | None, reference: Path | None, shard_size: int = 10**9
    ) -> None:
        self.weights, self.reference = weights, reference
        tensors = [
            Planned(_MODEL + name, Stored(t.shape, dtype or t.dtype), (Link(name, name, t.shape, all_rows(t.shape)),))
            for name, t in weights.tensors.items()
        ]
        grouped = in_files(tensors, shard_size)
        self.files = {f"shard_{i:05d}.safetensors": group for i, group in enumerate(grouped)}

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """One file; what the manifest needs to know of it: (tensor, shard) of each."""
        pieces = []
        for tensor in self.files[file]:
            rows = tensor.stored.shape[0]
            step = rows_of_a_shard(tensor.stored.nbytes // max(rows, 1))
            pieces += [(tensor, first, min(step, rows - first)) for first in range(0, max(rows, 1), step)]
        keys = shard_keys([(tensor.name, first, count) for tensor, first, count in pieces])
        by_key = dict(zip(keys, pieces, strict=True))
        boxes: dict[str, Box] = {}
        for key, (tensor, first, count) in by_key.items():
            rest = tensor.stored.shape[1:]
            boxes[key] = (first, *(0 for _ in rest)), (count, *rest)
        dtypes = {key: tensor.stored.dtype for key, (tensor, _, _) in by_key.items()}
        shards = write_shards(LocalFolder(folder), file, boxes, dtypes, lambda key: feed.rows(*by_key[key]))
        return [[by_key[shard.key][0].name, asdict(shard)] for shard in shards]

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """The manifest, and what goes along."""
        carry(self.reference, folder)
        stored = {t.name: t.stored for tensors in self.files.values() for t in tensors}
        shards: dict[str, list[Shard]] = {}
        for name, shard in (found for record in records.values() for found in record):
            shard |= {"offsets": tuple(shard["offsets"]), "sizes": tuple(shard["sizes"])}
            shards.setdefault(name, []).append(Shard(**shard))
        entries = {
            name: TensorEntry(stored[name].shape, DTYPE_NAMES[stored[name].dtype], tuple(found))
            for name, found in sorted(shards.items())
        }
        extra = {
            "progress": {"iteration": 0, "consumed_samples": 0, "skipped_iterations": 0, "nan_iterations": 0},
            "config": asdict(self.weights.config),
            "smp_version": __version__,
        }
        commit(LocalFolder(folder), Manifest(entries, {}, extra))
