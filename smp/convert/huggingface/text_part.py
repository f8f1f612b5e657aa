"""The text part of a ``config.json`` of a model that also sees images. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class _Part:
    """The text part of one ``model_type``: its family, and transformers' defaults for absent keys of
    ``text_config``."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Defaults of the outer configuration differ from those of the family's own class.
_GEMMA3 = {
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "max_position_embeddings": 131072},
}
_QWEN35 = {
    **{"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
    "num_attention_heads": 16,
}
_QWEN35_MOE = {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
_PARTS = {
    "llama4": _Part("Llama4ForCausalLM", "llama4_text"),
    "gemma3": _Part("Gemma3ForCausalLM", "gemma3_text", _GEMMA3),
    "qwen3_5": _Part("Qwen3_5ForCausalLM", "qwen3_5_text", _QWEN35),
    "qwen3_5_moe": _Part("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _QWEN35_MOE),
}
_OUTER_KEYS = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the outer config.json that hold for its parts, too."""


def text_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json, or that of its text part if the model type has a known one."""
    part, text = _PARTS.get(str(content.get("model_type"))), content.get("text_config")
    if part is None or not isinstance(text, dict):
        return dict(content)
    outer = {key: content[key] for key in _OUTER_KEYS if key in content}
    named = {"architectures": [part.architecture], "model_type": part.model_type}
    # The later wins: keys of text_config, and then the family's names.
    return {**part.defaults, **outer, **text, **named}
