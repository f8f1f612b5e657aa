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
from pathlib import Path
from typing import Any, BinaryIO

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
from smp.convert.huggingface.folder import carry
from smp.convert.layout import by_external_name
from smp.convert.megatron.read import BACKEND, COMMON, METADATA, TRACKER
from smp.convert.megatron.table import megatron_links, padded_vocab, to_args
from smp.convert.pieces import Feed, Planned, in_files, plan
from smp.convert.weights import Weights

RELEASE = "release"
"""Megatron's name for a checkpoint of weights alone."""
_BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_BACKENDS |= {"common_backend": "torch", "common_backend_version": 1}
# Modules for which Transformer Engine keeps an _extra_state.
_ATTENTION = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
_SHARED = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
_EXPERTS = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")


class MegatronTarget:
    """A ``torch_dist`` checkpoint to be written. See ``formats.make_target``."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype | None,
        reference: Path | None,
        tp: int = 1,
        shard_size: int = 2 * 10**9,
    ) -> None:
        self.config, self.reference = weights.config, reference
        self.args: Namespace = to_args(weights.config, tp)
        found = megatron_links(weights.config, padded_vocab(weights.config, tp))
        tensors = [plan(weights, name, parts, dtype) for name, parts in by_external_name(found).items()]
        kinds: dict[str, torch.dtype] = {}
        for tensor in tensors:
            # All layers are chunks of one DCP tensor, which has one dtype.
            full, kind = _stacked(tensor.name)[0], tensor.stored.dtype
            if kinds.setdefault(full, kind) != kind:
                raise CheckpointError(f"{tensor.name} has another dtype than in other layers, {full}: give a --dtype")
        self.files = {f"{RELEASE}/__{i}_0.distcp": group for i, group in enumerate(in_files(tensors, shard_size))}

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """Write one data file; returns (position, size) of each item by name."""
        written = {}
        (folder / RELEASE).mkdir(exist_ok=True)
        with (folder / file).open("wb") as out:
            for planned in self.files[file]:
                with feed.whole(planned) as tensor:
                    single = _stacked(planned.name)[1] is None
                    # As megatron-core saves it: a layer is one entry of a tensor of all layers.
                    written[planned.name] = _append(out, tensor if single else tensor.unsqueeze(0))
            # Once, in the first file: readers of that format ask for these objects, whatever is in them.
            if file == next(iter(self.files)):
                written |= {name: _append(out, [None]) for name in self._extra_states()}
            out.flush()
            os.fsync(out.fileno())
        return written

    def _extra_states(self) -> list[str]:
        """Names of the (empty) objects that Transformer Engine keeps next to weights, and that Megatron expects to
        find."""
        layers, experts = self.config.num_layers, self.config.num_experts
        mlp = _MLP if experts is None else _SHARED if self.config.moe_shared_expert_intermediate_size else ()
        modules = (*_ATTENTION, *mlp, *(_NORMS if self.config.qk_layernorm else ()))
        names = [f"decoder.layers.{m}._extra_state/shard_{i}_{layers}" for m in modules for i in range(layers)]
        names += [
            # Experts of the grouped GEMM have one for each layer and expert.
            f"decoder.layers.{m}._extra_state/shard_{i}.{e}_{layers}.{experts}"
            for m in _EXPERTS
            for i in range(layers)
            for e in range(experts or 0)
        ]
        return [*names, "decoder.final_layernorm._extra_state/shard_0_1", "output_layer._extra_state/shard_0_1"]

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write ``.metadata``, ``common.pt``, ``metadata.json`` and the name of the checkpoint."""
        one = folder / RELEASE
        (one / METADATA).write_bytes(pickle.dumps(self._metadata(records)))
        torch.save({"args": self.args, "checkpoint_version": 3.0, "iteration": 0}, one / COMMON)
        (one / BACKEND).write_text(json.dumps(_BACKENDS))
        carry(self.reference, folder)
        # Last: without it there is no checkpoint for Megatron.
        (folder / TRACKER).write_text(RELEASE)

    def _metadata(self, records: Mapping[str, Any]) -> Metadata:
        tensors: dict[str, Any] = {}
        written: dict[MetadataIndex, Any] = {}
        planned = {t.name: t for group in self.files.values() for t in group}
        for file, record in records.items():
            for name, (start, length) in record.items():
                index = MetadataIndex(name)
                if name in planned:
                    index = self._add(tensors, planned[name])
                else:
                    tensors[name] = BytesStorageMetadata()
                # Where an item's torch.save file begins and how long it is.
                written[index] = _StorageInfo(Path(file).name, start, length)
        return Metadata(tensors, planner_data={}, storage_data=written, storage_meta=StorageMeta())

    def _add(self, tensors: dict[str, Any], planned: Planned) -> MetadataIndex:
        """Add a tensor, or one layer's chunk of a tensor; returns its index."""
        name, layer = _stacked(planned.name)
        offsets, sizes, whole = [0] * len(planned.stored.shape), planned.stored.shape, planned.stored.shape
        if layer is not None:
            # (layers, ...): the chunk is at the layer's index.
            offsets, sizes, whole = [layer, *offsets], (1, *sizes), (self.config.num_layers, *whole)
        properties = TensorProperties(planned.stored.dtype)
        known = tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(whole), []))
        known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return MetadataIndex(name, offsets)


def _append(file: BinaryIO, value: Any) -> list[int]:
    """Append an item to a data file; returns its position and size."""
    start = file.tell()
    torch.save(value, file)
    return [start, file.tell() - start]


def _stacked(name: str) -> tuple[str, int | None]:
    """(name of the DCP tensor that a tensor is part of, index of its layer; None: it is a tensor of its own)."""
    parts = name.split(".", 3)
    return (f"decoder.layers.{parts[3]}", int(parts[2])) if parts[:2] == ["decoder", "layers"] else (name, None)
