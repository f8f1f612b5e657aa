"""Weights into a sharded model: every rank reads its own shards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from smp.checkpoint import CheckpointError, collect_logical_rows, training_state
from smp.checkpoint.all_ranks import on_all_ranks
from smp.checkpoint.dcp_planner import local_shards
from smp.convert.huggingface.folder import open_hf
from smp.convert.weights import Weights
from smp.parallel.dtensor_region import local_part


def load_hf(model: nn.Module, folder: str | Path) -> list[str]:
    """Fill a model with the weights of a Hugging Face folder: see :func:`load_weights`. Multi-token prediction layers
    are read if the model has any; both must have equally many."""
    asked = getattr(getattr(model, "config", None), "mtp_num_layers", None)

    def opened() -> Weights:
        weights = open_hf(folder, predictions=asked is not None)
        if weights.config.mtp_num_layers != asked:
            there = weights.config.mtp_num_layers or "no"
            raise CheckpointError(f"--mtp-num-layers {asked}: {folder} has {there} such layers")
        return weights

    return load_weights(model, opened)


def load_weights(
    model: nn.Module, open_weights: Callable[[], Weights], *, leave: Collection[str] = frozenset()
) -> list[str]:
    """Fill a model with weights, in any layout. Every rank calls it. Parameters keep their dtype.

    Args:
        model: of the weights' configuration, sharded or not.
        open_weights: from files that all ranks see.
        leave: names of parameters that keep their values.

    Returns:
        What the user should hear.

    Raises:
        CheckpointError: they are damaged, of another architecture, or cannot be read, which an OSError as its cause
            says; all ranks raise it.
        DamagedError: a CheckpointError, when damage is all that any rank met.
    """

    def fill() -> list[str]:
        with open_weights() as weights:
            _fill(model, weights, leave)
            return list(weights.notes)

    # Each rank has read its own shards; a note that all have is reported once.
    return on_all_ranks("", fill, lambda notes: list(dict.fromkeys(chain.from_iterable(notes))))


@torch.no_grad()
def _fill(model: nn.Module, weights: Weights, leave: Collection[str]) -> None:
    # By the names and regions of checkpoints, so any layout fills itself.
    tensors, _ = training_state(model)
    converted = set()
    for full_name, shard in local_shards(tensors, collect_logical_rows(model)).items():
        name = full_name.removeprefix("model.")
        if name in leave:
            continue
        stored, data = weights.tensors.get(name), shard.data
        # Global shapes, without padding.
        if stored is None or stored.shape != shard.shape:
            there = "absent" if stored is None else f"of shape {list(stored.shape)}"
            raise CheckpointError(
                f"tensor {name} is {there} in the files and of shape {list(shard.shape)} in the model"
            )
        if stored.dtype != data.dtype:
            converted.add(f"weights are {stored.dtype} in the files and {data.dtype} here".replace("torch.", ""))
        local_part(tensors[full_name])[len(data) :].zero_()  # padded rows of the vocabulary
        if data.numel() == 0:
            continue
        # Read into the parameter itself where nothing has to be converted.
        straight = data.dtype == stored.dtype and data.is_cpu
        read = data if straight else torch.empty(data.shape, dtype=stored.dtype)
        weights.read_into(name, shard.region.offsets, read)
        if not straight:
            data.copy_(read)
    weights.notes += sorted(converted)
