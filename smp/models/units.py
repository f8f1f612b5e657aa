"""FSDP units: which modules of the decoder are gathered and freed together."""

from __future__ import annotations

from typing import Any

from torch import nn

from smp.config.rules.mtp import mtp_layers
from smp.models.part import ModelPart

GPT = Any
"""The decoder, whose file imports this one."""


def fsdp_units(model: GPT) -> list[nn.Module | list[nn.Module]]:
    """FSDP's units: each block, and what comes before and after the blocks.

    A tied matrix is used at both ends: in a whole model it stays in the root unit, with the small rest. So do, with
    multi-token prediction, all that it uses more than once. A part of a model leaves the root nothing: FSDP gathers the
    root around every forward, also of stages that need none of it.
    """
    blocks: list[nn.Module | list[nn.Module]] = list(model.layers.values())
    # In the root: FSDP's root unit is gathered around the whole forward pass, so both ends find it.
    if model.is_whole and model.embeds_at_the_end:
        return blocks
    ends: list[nn.Module | None] = [model.embedding]
    # Positions and the embedding's norm are small: in a whole model the root unit takes them.
    if not model.is_whole:
        ends += [model.positions, model.embedding_norm]
    units = [*blocks, *(module for module in ends if module is not None), *model.predictions.values()]
    # The predictions use the head again, long after the final norm has run: no unit together.
    if len(model.predictions) and model.head is not None and model.final_norm is not None:
        return [*units, model.final_norm, *([] if model.tied else [model.head])]
    if model.head is not None and model.final_norm is not None:
        # The head runs right after the norm: one gather for both.
        units.append(model.final_norm if model.tied else [model.final_norm, model.head])
    return units


def stage_units(model: GPT, part: ModelPart) -> list[nn.Module]:
    """Modules that hold the parameters of a part, in the order of their use."""
    first = [model.embedding, model.positions, model.embedding_norm] if part.embedding else []
    last: list[nn.Module | None] = []
    if part.head:
        last = [*model.predictions.values(), model.final_norm]  # the norm's is the head's, but with predictions
        last += [model.embedding if model.embeds_at_the_end else None]
        last += [model.head if len(model.predictions) and not model.tied else None]
    layers = (*part.layers, *(mtp_layers(model.config) if part.head else ()))
    modules = (*first, *(model.layers[str(i)] for i in layers), *last)
    # Each once, in order: a tied matrix is in both ends of a rank that has both.
    return list(dict.fromkeys(module for module in modules if module is not None))
