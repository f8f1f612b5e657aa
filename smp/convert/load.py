"""Weights into a sharded model: every rank reads its own boxes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn

from smp.checkpoint import CheckpointError, DamagedError, collect_logical_rows, training_state
from smp.config.command import DamageError, exit_code, in_one_line
from smp.convert.hf import open_hf
from smp.convert.weights import Weights
from smp.parallel.agree import gather
from smp.parallel.boxes import local_box

_ROWS = 1 << 24  # bytes that are read at a time when they have to be converted or lie on another device


def load_hf(model: nn.Module, folder: str | Path) -> list[str]:
    """Fill a model with the weights of a Hugging Face folder, in any layout. Every rank calls it.

    Args:
        model: of the folder's configuration (:func:`smp.convert.hf_config.read_architecture`), sharded or not.
        folder: which all ranks see.

    Returns:
        What the user should hear.

    Raises:
        CheckpointError: the folder is damaged, of another architecture, or cannot be read, which an OSError as its
            cause says; all ranks raise it.
        DamagedError: a CheckpointError, when damage is all that any rank met.
    """
    return load_weights(model, lambda: open_hf(folder))


def load_weights(
    model: nn.Module, open_weights: Callable[[], Weights], *, leave: Collection[str] = frozenset()
) -> list[str]:
    """Fill a model with weights from anywhere; see :func:`load_hf`. Parameters keep their dtype; those that ``leave``
    names keep their values too."""
    problem: tuple[str, bool, int] | None = None
    notes: list[str] = []
    try:
        with open_weights() as weights:
            _fill(model, weights, leave)
            notes = list(weights.notes)
    except (ValueError, OSError) as error:  # the other ranks are waiting
        problem = in_one_line(error), isinstance(error, DamageError), exit_code(error)
    problems = list(dict.fromkeys(found for found in gather(problem) if found is not None))
    if problems:
        kind = DamagedError if all(damage for _, damage, _ in problems) else CheckpointError
        failed = [text for text, _, code in problems if code == 1]
        # what another rank met counts here too
        raise kind("; ".join(text for text, _, _ in problems)) from (OSError(failed[0]) if failed else None)
    return notes


@torch.no_grad()
def _fill(model: nn.Module, weights: Weights, leave: Collection[str]) -> None:
    tensors, _ = training_state(model)
    rows = collect_logical_rows(model)
    converted = set()
    for full_name, parameter in tensors.items():
        name = full_name.removeprefix("model.")
        if name in leave:
            continue
        stored = weights.tensors.get(name)
        shape = (rows.get(full_name, parameter.shape[0]), *parameter.shape[1:])
        if stored is None or stored.shape != shape:
            there = "absent" if stored is None else f"of shape {list(stored.shape)}"
            raise CheckpointError(f"tensor {name} is {there} in the files and of shape {list(shape)} in the model")
        if stored.dtype != parameter.dtype:
            converted.add(f"weights are {stored.dtype} in the files and {parameter.dtype} here".replace("torch.", ""))
        box = local_box(parameter)
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.numel() == 0:
            continue
        real = min(max(shape[0] - box.offsets[0], 0), box.sizes[0])
        local[real:].zero_()  # padding of the vocabulary
        _read(weights, name, box.offsets, local[:real])
    weights.notes += sorted(converted)


def _read(weights: Weights, name: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
    """A box, converted to what ``out`` is; a few rows at a time where that costs no more."""
    dtype = weights.tensors[name].dtype
    if out.shape[0] == 0:
        return
    if out.dtype == dtype and out.is_cpu:
        weights.read_into(name, offsets, out)
        return
    row = max(1, out[0].numel() * dtype.itemsize)
    for first, count in weights.stretches(name, offsets[0], out.shape[0], max(1, _ROWS // row)):
        target = out[first - offsets[0] :][:count]
        block = torch.empty(target.shape, dtype=dtype)
        weights.read_into(name, (first, *offsets[1:]), block)
        target.copy_(block)
