"""This project's own checkpoints: opened as weights, and written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from smp import __version__
from smp.checkpoint import CheckpointError, Manifest, read_manifest
from smp.checkpoint.commit import commit
from smp.checkpoint.dcp_planner import Item
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.format.manifest import MANIFEST, parse_tensor
from smp.checkpoint.format.tensor_bytes import DTYPE_NAMES, DTYPES
from smp.checkpoint.rewrite import write_shards
from smp.checkpoint.tensor_slices import read_region_into
from smp.config import ModelConfig
from smp.config.command_line.commands import tool
from smp.convert.huggingface.folder import carry
from smp.convert.layout import Link, all_rows
from smp.convert.pieces import Feed, in_files, plan
from smp.convert.store import Stored
from smp.convert.weights import Weights
from smp.models.inventory import weights_of

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
                f"{self.folder} holds adapters without their model: {tool('merge-lora')} adds them to it"
            )
        wanted = {p.name: p.shape for p in weights_of(self.config)}
        # Both ways: missing and additional tensors.
        for name in [*wanted, *entries]:
            there, should = entries[name].shape if name in entries else None, wanted.get(name)
            if there != should:
                said = f"is {_shown(there)}; the model's is {_shown(should)}"
                raise CheckpointError(f"{self.folder}/{MANIFEST}: tensor {_MODEL}{name} {said}")
        self.tensors = {name: Stored(entries[name].shape, DTYPES[entries[name].dtype]) for name in wanted}
        if left := len(self.manifest.tensors) - len(entries):
            self.notes.append(f"{left} tensors of optimizer state are left out")

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        read_region_into(self.folder, self.manifest, _MODEL + name, offsets, out)

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
    if not isinstance(saved, dict) or "num_layers" not in saved:
        raise CheckpointError(f"{folder}/{MANIFEST} holds no settings of a model: it is not of a training run")
    # a checkpoint of an older version lacks settings that came later: they are at their default
    return ModelConfig(**{f.name: saved[f.name] for f in fields(ModelConfig) if f.name in saved})


class SmpTarget:
    """A checkpoint to be written: weights only, at iteration 0. See ``formats.make_target``."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype | None, reference: Path | None, shard_size: int = 10**9
    ) -> None:
        self.weights, self.reference = weights, reference
        tensors = [
            replace(plan(weights, name, [Link(name, name, t.shape, all_rows(t.shape))], dtype), name=_MODEL + name)
            for name, t in weights.tensors.items()
        ]
        grouped = in_files(tensors, shard_size)
        self.files = {f"shard_{i:05d}.safetensors": group for i, group in enumerate(grouped)}

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """Write one file; returns (tensor, shard) of each shard, for the manifest."""
        planned = {tensor.name: tensor for tensor in self.files[file]}
        wholes = [Item.whole(n, t.stored.shape, DTYPE_NAMES[t.stored.dtype]) for n, t in planned.items()]
        # In shards of limited size: a checksum covers a shard, so a reader of a part reads less.
        items = [item for whole in wholes for item in whole.cut()]
        data = lambda item: feed.rows(planned[item.name], item.first, item.count)  # noqa: E731
        return [[item.name, asdict(shard)] for item, shard in write_shards(LocalFolder(folder), file, items, data)]

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write the manifest and the companion files."""
        carry(self.reference, folder)
        stored = {t.name: t.stored for tensors in self.files.values() for t in tensors}
        shards: dict[str, list[Any]] = defaultdict(list)
        for name, shard in chain.from_iterable(records.values()):
            shards[name].append(shard)
        entries = {
            name: parse_tensor({"shape": one.shape, "dtype": DTYPE_NAMES[one.dtype], "shards": shards[name]})
            for name, one in sorted(stored.items())
        }
        extra = {
            "progress": {"iteration": 0, "consumed_samples": 0, "skipped_iterations": 0, "nan_iterations": 0},
            "config": asdict(self.weights.config),
            "smp_version": __version__,
        }
        commit(LocalFolder(folder), Manifest(entries, {}, extra))
