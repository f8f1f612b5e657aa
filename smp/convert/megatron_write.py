"""Megatron's ``torch_dist`` checkpoints, written: all layers of a kind in one tensor, as megatron-core saves them.

The format is torch's distributed checkpoint (DCP): data files in which each item is a file of ``torch.save``, and a
pickle ``.metadata`` that says where each is. Megatron adds ``metadata.json``, and ``common.pt`` with the arguments.
"""

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from smp.checkpoint import CheckpointError
from smp.checkpoint.local import sync_to_disk, write_durably
from smp.convert.hf import carry
from smp.convert.layout import Link, by_external_name, links
from smp.convert.megatron_read import BACKEND, COMMON, METADATA, TRACKER
from smp.convert.megatron_table import megatron_table, padded_vocab, to_args
from smp.convert.pieces import Feed, Planned, in_files, plan
from smp.convert.weights import Weights

RELEASE = "release"
"""The name that Megatron gives to a checkpoint of weights alone."""
_LAYER_MODULES = ("linear_qkv", "linear_proj", "core_attention"), ("linear_fc1", "linear_fc2")


class MegatronTarget:
    """What a ``torch_dist`` checkpoint with these weights is made of.

    Args:
        weights: under our names.
        dtype: of the tensors to write; None: as they are.
        reference: a Hugging Face folder whose config.json, tokenizer and so on are to go along; None: there is none.
        tp: tensor-parallel ranks that the padding of the vocabulary is to suit. Any number loads the rest.
        shard_size: most bytes of a file.

    Raises:
        ConfigError: Megatron's GPT does not compute what this model does.
        CheckpointError: a fused tensor of theirs would have parts of different dtypes.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype | None,
        reference: Path | None,
        tp: int = 1,
        shard_size: int = 2 * 10**9,
    ) -> None:
        self.weights, self.reference, self.layers = weights, reference, weights.config.num_layers
        self.args: Namespace = to_args(weights.config, tp)
        rows = padded_vocab(weights.config, tp)
        found = {n: _padded(link, rows) for n, link in links(megatron_table(weights.config), weights.config).items()}
        tensors = [plan(weights, name, parts, dtype) for name, parts in by_external_name(found).items()]
        kinds: dict[str, torch.dtype] = {}
        for tensor in tensors:
            full, kind = self._stacked(tensor)[0], tensor.stored.dtype
            if kinds.setdefault(full, kind) != kind:
                raise CheckpointError(f"{tensor.name} has another dtype than in other layers, {full}: give a --dtype")
        self.files = {f"{RELEASE}/__{i}_0.distcp": group for i, group in enumerate(in_files(tensors, shard_size))}

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """One data file; where each item is in it."""
        places = {}
        (folder / RELEASE).mkdir(exist_ok=True)
        with (folder / file).open("wb") as out:
            for planned in self.files[file]:
                start = out.tell()
                with feed.whole(planned) as tensor:
                    single = planned.name.startswith("decoder.layers.")
                    torch.save(tensor.unsqueeze(0) if single else tensor, out)
                places[planned.name] = [start, out.tell() - start]
            if file == next(iter(self.files)):
                for name in self._extra_states():
                    start = out.tell()
                    torch.save([None], out)
                    places[name] = [start, out.tell() - start]
            out.flush()
            os.fsync(out.fileno())
        return places

    def _extra_states(self) -> list[str]:
        """Names of the objects that Transformer Engine keeps beside weights, empty here: Megatron asks for them."""
        attention, mlp = _LAYER_MODULES
        normed = ("q_layernorm", "k_layernorm") if self.weights.config.qk_layernorm else ()
        modules = [f"self_attention.{m}" for m in (*attention, *normed)] + [f"mlp.{m}" for m in mlp]
        names = [
            f"decoder.layers.{module}._extra_state/shard_{layer}_{self.layers}"
            for module in modules
            for layer in range(self.layers)
        ]
        return [*names, "decoder.final_layernorm._extra_state/shard_0_1", "output_layer._extra_state/shard_0_1"]

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """``.metadata``, ``common.pt``, ``metadata.json`` and the name of the checkpoint."""
        one = folder / RELEASE
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        planned = {t.name: t for group in self.files.values() for t in group}
        for file, record in records.items():
            for name, (start, length) in record.items():
                info = _StorageInfo(Path(file).name, start, length)
                if name not in planned:
                    tensors[name] = BytesStorageMetadata()
                    places[MetadataIndex(name)] = info
                    continue
                full, chunk, shape = self._stacked(planned[name])
                known = tensors.setdefault(
                    full, TensorStorageMetadata(TensorProperties(planned[name].stored.dtype), shape, [])
                )
                known.chunks.append(chunk)
                places[MetadataIndex(full, chunk.offsets)] = info
        metadata = Metadata(tensors, planner_data={}, storage_data=places, storage_meta=StorageMeta())
        write_durably(one / METADATA, pickle.dumps(metadata))
        with (one / COMMON).open("wb") as out:
            torch.save({"args": self.args, "checkpoint_version": 3.0, "iteration": 0}, out)
        sync_to_disk(one / COMMON)
        versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        versions |= {"common_backend": "torch", "common_backend_version": 1}
        write_durably(one / BACKEND, json.dumps(versions).encode())
        carry(self.reference, folder)
        write_durably(folder / TRACKER, RELEASE.encode())

    def _stacked(self, planned: Planned) -> tuple[str, ChunkStorageMetadata, torch.Size]:
        """Name, place and shape of the tensor of all layers that one of a layer is an entry of."""
        shape = planned.stored.shape
        parts = planned.name.split(".", 3)
        if parts[:2] != ["decoder", "layers"]:
            return (
                planned.name,
                ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape)),
                torch.Size(shape),
            )
        offsets = torch.Size([int(parts[2]), *(0 for _ in shape)])
        chunk = ChunkStorageMetadata(offsets, torch.Size([1, *shape]))
        return f"decoder.layers.{parts[3]}", chunk, torch.Size([self.layers, *shape])


def _padded(link: Link, rows: int) -> Link:
    return replace(link, padded=rows) if link.smp_name in ("embedding.weight", "head.weight") else link
