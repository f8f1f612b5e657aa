"""Refuses models of transformers in which a token sees those after it: a run would learn to copy the answers.

transformers lists them as causal language models too, and builds them with a warning at most: BERT whose config.json
does not say ``is_decoder`` (which is every folder of an encoder), Gemma as EmbeddingGemma and PaliGemma have it.
"""

from __future__ import annotations

from typing import Any

from smp.config import ConfigError
from smp.hf.sources import source_of
from smp.models.foreign import blocks_of, reads_apart

_CROSS = ("cross", "encoder")
"""Words in the names of attention to something else, which is whole."""
_OTHERS = ("cpmant", "xlm", "xlnet", "git")
"""Types that say so neither in a module nor in their configuration."""


def refuse_two_sided(module: Any) -> None:
    """Raise ConfigError where tokens see those after them."""
    if reads_apart(module):  # the encoder's do, and answers are the decoder's
        return
    config, kind = module.config, type(module).__name__
    said = f"--model-implementation transformers: in {kind} a token sees those after it"
    learns = "so a run would learn to copy answers instead of writing them"
    if getattr(config, "is_decoder", True) is False and _chooses_by_decoder(module):
        raise ConfigError(f"{said}, as config.json does not set is_decoder to true, {learns}")
    found = (
        f"{name}.{inside}".strip(".")
        for name, block in blocks_of(module)
        for inside, part in block.named_modules()
        if getattr(part, "is_causal", True) is False and not any(word in inside for word in _CROSS)
    )
    if (first := next(found, None)) is not None:
        raise ConfigError(f"{said} ({first}.is_causal is False), {learns}")
    if config.model_type in _OTHERS:
        raise ConfigError(f"{said}, {learns}")


def _chooses_by_decoder(module: Any) -> bool:
    """Whether its masks depend on ``is_decoder``. Many configurations have that, and few classes read it."""
    source = source_of(type(module.base_model))
    return "create_bidirectional_mask" in source and "config.is_decoder" in source
