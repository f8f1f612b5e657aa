"""Checks of runs on vision-language models."""

from __future__ import annotations

import json

from smp.config.command_line.fields import flag_of, given, require
from smp.config.schema import Config

_NOT_HERE = "--load is a vision-language model, and {}; {}"


def check_vision(config: Config) -> None:
    """Raise ConfigError for settings that do not fit a model that sees images, or one that does not."""
    vision = config.vision
    if not config.model.sees_images:
        flags = [] if vision is None else given(vision, *vars(vision))
        require(not flags, f"{', '.join(flags)}: the model in --load is trained without images; leave it out")
        return
    require(
        config.objective is not None,
        "--model-config of a vision-language model: pretrain_gpt.py has no images; take the config.json of its "
        "language model, or fine-tune",
    )
    assert vision is not None and config.objective is not None
    name = config.objective.objective
    require(name == "sft", f"--objective {name}: {_NOT_HERE.format('images go with --objective sft', 'leave it out')}")
    packing = config.data.packing == "best-fit"
    require(not packing or packs(config), "--packing best-fit: " + _NOT_HERE.format(_MASKS, "give --packing off"))
    require(
        not config.parallel.compile,
        "--compile: " + _NOT_HERE.format("every batch of images has other shapes", "leave it out"),
    )
    frozen = [flag_of(f"freeze_{part}") for part in vision.frozen]
    require(
        not (config.has_adapters and frozen),
        f"{', '.join(frozen)}: with adapters, which are in the language model, all of it is frozen; leave it out",
    )
    require(len(frozen) < 3, f"{', '.join(frozen)}: nothing is left to train; leave one out")


_MASKS = "this type counts positions, or makes masks, over whole sequences"


PACKED = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"),
    *("llava", "llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm", "mistral3"),
)
"""Model types whose masks follow from positions, and whose positions can be those of each sample."""


def packs(config: Config) -> bool:
    """Whether samples of this model type can share a sequence."""
    return _kind(config) in PACKED


def _kind(config: Config) -> str | None:
    """transformers' ``model_type``."""
    kind: str | None = json.loads(config.model.transformers_config or "{}").get("model_type")
    return kind
