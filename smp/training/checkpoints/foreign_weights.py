"""Weights of a model that transformers computes, from a Hugging Face folder or from checkpoints of this project."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from smp.convert.huggingface.config import is_hf_folder
from smp.convert.load import load_hf, load_weights
from smp.convert.weights import Weights
from smp.layers.adapters.lora import adapters_of
from smp.models.protocol import Model


def fill_from_folder(model: Model, folder: str) -> list[str]:
    """Fill a model, which has memory, with the weights of a Hugging Face folder; returns what the user should hear.
    Adapters stay as they are.

    Raises:
        CheckpointError: on all ranks, when they cannot be read or are of another model.
    """
    if not model.config.is_foreign:
        return load_hf(model, folder)
    # Here, because a model of this project's own needs none of that room.
    from smp.hf.loading.delayed import load_weights as load_module
    from smp.hf.run.model import TransformersModel

    load_module(cast(TransformersModel, model).module, folder, _of_adapters(model))
    return []


def fill_foreign(model: Model, load: str, opened: Callable[[], Weights]) -> list[str]:
    """The same from what --load names, a folder of either kind; ``opened`` opens one of this project."""
    if is_hf_folder(load):
        return fill_from_folder(model, load)
    return load_weights(model, opened, leave=_of_adapters(model))


def begin_foreign_magnitudes(model: Model) -> None:
    """Of adapters with DoRA, when there are weights."""
    from smp.hf.run.lora import begin_norms

    begin_norms(model)


def _of_adapters(model: Model) -> set[str]:
    return {f"{layer}.lora.{name}" for layer, m in adapters_of(model).items() for name, _ in m.named_parameters()}
