"""Models that transformers computes: the module on the meta device, and an inventory of its parameters and blocks. How
such a module is cut and runs as a :class:`smp.models.protocol.Model` is in :mod:`smp.hf.run.model`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from smp.config import ConfigError
from smp.config.rules.foreign import transformers_config
from smp.models.inventory import Parameter
from smp.models.part import ModelPart


@dataclass(frozen=True)
class Parts:
    """Parameters and buffers of a model. Names are Hugging Face's, shapes are global, without placements.

    Attributes:
        ends: parameters outside of the blocks.
        blocks: those of each block, in order.
        buffers: persistent ones, which no gradient trains.
        architecture: name of the model's class in transformers.
    """

    ends: tuple[Parameter, ...]
    blocks: tuple[tuple[Parameter, ...], ...]
    buffers: tuple[Parameter, ...]
    architecture: str

    def of(self, parts: Sequence[ModelPart]) -> Iterator[Parameter]:
        """Parameters of some parts of the model."""
        if any(part.embedding or part.head for part in parts):
            yield from self.ends
        for part in parts:
            for layer in part.layers:
                yield from self.blocks[layer]


def new_module(content: str, *, scores: bool = False) -> Any:
    """The language model of a config.json's ``content``, with its part for images if it has one, on the meta device, in
    fp32; with ``scores`` the one that gives a text a number instead of logits.

    Raises:
        ConfigError: transformers has none of this type, or it cannot be built without memory.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    config = transformers_config(json.loads(content), "config.json")
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    if getattr(config, "is_encoder_decoder", False):
        kind = AutoModelForSeq2SeqLM
    if scores:
        config.num_labels, kind = 1, AutoModelForSequenceClassification
    try:
        with torch.device("meta"):
            module = kind.from_config(config, dtype=torch.float32)
    except Exception as error:  # of any kind: each class checks its own configuration
        raise ConfigError(f"--model-implementation transformers: {config.model_type}: {_one_line(error)}") from None
    if output_matrix(module) is None:
        raise ConfigError(f"--model-implementation transformers: {type(module).__name__} has no output matrix")
    return module.requires_grad_(True)


def output_matrix(module: Any) -> nn.Module | None:
    """The module that makes logits of hidden states, or the row that makes scores; None: there is neither."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return getattr(module, SCORE, None) if head is None else head


SCORE = "score"
"""The head of transformers' ...ForSequenceClassification."""


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def reads_apart(module: Any) -> bool:
    """Whether it is an encoder, which reads a prompt, with a decoder for the answer."""
    return bool(getattr(module.config, "is_encoder_decoder", False))


def blocks_of(module: Any) -> list[tuple[str, nn.Module]]:
    """The decoder's layers by their names, in order, and in front of them those of an encoder of texts."""
    tops = [decoder_of(module)]
    if reads_apart(module):
        tops = [name_of(module, part) for part in (module.get_encoder(), module.get_decoder())]
    return [block for top in tops for block in _blocks_in(module, top)]


def _blocks_in(module: Any, top: str) -> list[tuple[str, nn.Module]]:
    """(name, module) of each block: the elements of the longest list of modules that lies in no other list."""
    lists = {name: child for name, child in module.get_submodule(top).named_modules(prefix=top) if _is_list(child)}
    # Not the lists inside of layers, such as a layer's experts.
    outer = {n: c for n, c in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise ConfigError(f"--model-implementation transformers: {type(module).__name__} has no list of layers")
    # A model may have other lists (of heads, of layers of multi-token prediction): the decoder is the largest.
    name = max(outer, key=lambda name: sum(p.numel() for p in outer[name].parameters()))
    return [(f"{name}.{i}", layer) for i, layer in enumerate(outer[name])]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def decoder_of(module: Any) -> str:
    """The name of the decoder in a vision-language model; empty for other models, which are the decoder themselves."""
    if getattr(module.config, "vision_config", None) is None:
        return ""
    return name_of(module, module.get_decoder())


def name_of(module: nn.Module, part: Any) -> str:
    """The name of ``part`` in ``module``."""
    return next(name for name, child in module.named_modules() if child is part)


def tower_blocks(module: Any) -> list[nn.Module]:
    """Layers of the vision tower, in order; empty for a model without images."""
    top = decoder_of(module)
    if not top:
        return []
    lists = [c for n, c in module.named_modules() if _is_list(c) and not f"{n}.".startswith(f"{top}.") and len(c)]
    # By its name: the layers of every tower of transformers derive from it, and where it is
    # imported from differs between versions.
    layers = [c for c in lists if all("GradientCheckpointingLayer" in map(_name, type(m).__mro__) for m in c)]
    return [layer for layers in layers for layer in layers]


def _name(kind: type) -> str:
    return kind.__name__


PARTS = ("vision_model", "projector", "language_model")
_LANGUAGE = ("language_model", "text_model", "text_decoder")
_TOWERS = ("visual", "vision", "image_encoder", "image_tower", "video_tower", "vit")
_PROJECTORS = (
    *("projector", "connector", "merger", "projection", "vision_adapter", "aligner", "resampler", "qformer"),
    *("query_tokens", "image_newline", "view_separator"),
)


def vision_part(name: str) -> str:
    """Which of :data:`PARTS` a parameter of a vision-language model belongs to, by its name.

    A projector often lies in the module that is called visual (Qwen's merger), right below it. Further inside of a
    tower are projections of its own, those of its patches and of its attention (InternVL); and experts for images in a
    language model (Ernie 4.5 VL) are the language model's.
    """
    words = name.split(".")
    if any(word in _LANGUAGE for word in words):
        return "language_model"
    tower = next((i for i, word in enumerate(words) if word.startswith(_TOWERS)), None)
    outside = words if tower is None else words[: tower + 2]
    if any(part in word for word in outside for part in _PROJECTORS):
        return "projector"
    return "language_model" if tower is None else "vision_model"


def freeze_parts(model: nn.Module, parts: Sequence[str]) -> None:
    """Stop training some of :data:`PARTS`.

    Raises:
        ConfigError: the model has no parameter of one of them.
    """
    of: dict[str, list[nn.Parameter]] = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        of[vision_part(name)].append(parameter)
    for part in parts:
        if not of[part]:
            raise ConfigError(f"--freeze-{part.replace('_', '-')}: this model has no such part; leave it out")
        for parameter in of[part]:
            parameter.requires_grad_(False)


@cache
def parts_of(content: str, *, scores: bool = False) -> Parts:
    """The parts of the model that a config.json's ``content`` describes; arguments as of :func:`new_module`."""
    # On the meta device: no weights, so this runs on a login node too.
    module = new_module(content, scores=scores)
    chosen = _experts_of_a_token(module.config.get_text_config(decoder=True))
    named, images = dict(module.named_parameters()), bool(decoder_of(module))
    matrices = {id(p) for m in module.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    head, tables = output_matrix(module), {id(module.get_input_embeddings().weight)}
    share = 2 if reads_apart(module) else 1  # each token is in one of two parts: half of them, for want of more
    assert head is not None, "checked by new_module"

    def made(name: str, p: torch.Tensor) -> Parameter:
        shape = tuple(p.shape)
        # transformers keeps a projection of all experts in one parameter, with the experts as dimension 0.
        experts = chosen if p.ndim == 3 and chosen is not None and ".experts" in name else None
        linear = id(p) in matrices and p.ndim == 2
        used = math.prod(shape[1:]) * experts if experts is not None else math.prod(shape)
        # A lookup costs no FLOPs. A tied table is also the output matrix, whose product does.
        counts = p.ndim > 1 and (id(p) not in tables or p is head.weight)
        if images and vision_part(name) != "language_model":  # of images, of which the text does not tell how many
            counts = False
        return Parameter(name, shape, linear=linear, flops=2 * used * counts // share, chosen=experts)

    blocks = []
    for prefix, _ in blocks_of(module):
        blocks.append(tuple(made(n, p) for n, p in named.items() if n.startswith(f"{prefix}.")))
    inside = {parameter.name for block in blocks for parameter in block}
    # Adapters go into blocks only.
    ends = tuple(replace(made(n, p), linear=False) for n, p in named.items() if n not in inside)
    state = module.state_dict(keep_vars=True)
    # With duplicates: a tied matrix has two names in the state, and neither is a buffer.
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = tuple(Parameter(n, tuple(b.shape)) for n, b in state.items() if n not in known)
    return Parts(ends, tuple(blocks), buffers, type(module).__name__)


def matrices_of(content: str) -> dict[str, tuple[int, ...]]:
    """(out, in) of the linear layers in the blocks, by their names."""
    linear = (parameter for block in parts_of(content).blocks for parameter in block if parameter.linear)
    return {p.name.removesuffix(".weight"): p.shape for p in linear if p.name.endswith(".weight")}


def _experts_of_a_token(text: Any) -> int | None:
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "num_experts_per_token")
    return next((n for name in names if isinstance(n := getattr(text, name, None), int)), None)
