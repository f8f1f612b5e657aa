"""Weights of a model that transformers computes, from a Hugging Face folder or from checkpoints of this project."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from smp.checkpoint import CheckpointError
from smp.convert.huggingface.config import is_hf_folder
from smp.convert.load import load_hf, load_weights
from smp.convert.weights import Weights
from smp.layers.adapters.lora import adapters_of
from smp.models.protocol import Model

Form = tuple[tuple[int, ...], torch.dtype]
Matrices = tuple[Callable[[str], Form], Callable[[str, Sequence[int], torch.Tensor], None]]


def fill_from_folder(model: Model, folder: str, leave: Collection[str] = ()) -> list[str]:
    """Fill a model, which has memory, with the weights of a Hugging Face folder; returns notes for the user. Adapters
    stay as they are, and so do the tensors in ``leave``, if transformers computes the model.

    Raises:
        CheckpointError: on all ranks, when they cannot be read or are of another model.
    """
    if not model.config.is_foreign:
        return load_hf(model, folder)
    # Here, because a model of this project's own needs none of that room.
    from smp.hf.loading.delayed import load_weights as load_module
    from smp.hf.run.model import TransformersModel

    load_module(cast(TransformersModel, model).module, folder, {*_of_adapters(model), *leave})
    return []


def fill_foreign(model: Model, load: str, opened: Callable[[], Weights], leave: Collection[str] = ()) -> list[str]:
    """Fill a model from what --load names: a Hugging Face folder, or a checkpoint, which ``opened`` opens. Returns
    notes for the user."""
    if is_hf_folder(load):
        return fill_from_folder(model, load, leave)
    return load_weights(model, opened, leave={*_of_adapters(model), *leave})


@contextmanager
def stored_matrices(model: Model, load: str, opened: Callable[[], Weights]) -> Iterator[Matrices]:
    """(shape and dtype by a tensor's name, reads a slice of one tensor) of what --load names, for weights that are
    quantized while they are loaded. Both raise CheckpointError for a tensor that does not exist."""
    if model.config.is_foreign and is_hf_folder(load):
        from smp.hf.loading.stored_tensors import StoredTensors
        from smp.hf.run.model import TransformersModel

        with StoredTensors(cast(TransformersModel, model).module, load) as stored:
            yield stored.form, stored.read_into
        return
    with opened() as weights:

        def form(name: str) -> Form:
            if (tensor := weights.tensors.get(name)) is None:
                raise CheckpointError(f"tensor {name} is not in the files")
            return tuple(tensor.shape), tensor.dtype

        yield form, weights.read_into


def begin_foreign_magnitudes(model: Model) -> None:
    """Initialize the DoRA magnitudes of a model's adapters. They are norms of rows of the weights, which have to be
    loaded before."""
    from smp.hf.run.lora import begin_norms

    begin_norms(model)


def begin_foreign_scores(model: Model, seed: int) -> None:
    """Initialize the scalar output layer of a reward model made of a language model."""
    from smp.hf.run.model import TransformersModel

    cast(TransformersModel, model).draw_scores(seed)


def _of_adapters(model: Model) -> set[str]:
    return {f"{layer}.lora.{name}" for layer, m in adapters_of(model).items() for name, _ in m.named_parameters()}
