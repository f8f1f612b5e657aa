"""Attention of 16-bit models on CPUs, computed in fp32.

torch's attention on CPUs takes several times as long backwards in bf16 as in fp32: three tenths of a training step of a
small Llama. Queries, keys and values are made fp32 before it, and its result 16-bit after it. Models in fp32
and fp64 run torch's attention as before, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from smp.hf.adapters import base_of
from smp.hf.context import FAMILIES
from smp.hf.state import state

NAME = "smp_sdpa_fp32"


def install(model: Any) -> str:
    """Register the function in transformers' table of attention functions for ``model``. Returns a note for the user,
    or ""."""
    base, _ = base_of(model)
    config = getattr(base, "config", None)
    if config is None or getattr(config, "model_type", None) not in FAMILIES:  # others ask whether it is "sdpa"
        return ""
    if state.device_type != "cpu" or state.cp_size > 1 or config._attn_implementation != "sdpa":
        return ""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    # The mask is made for sdpa: transformers chooses it by the same name.
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    # The internal field: the property's setter would set all sub-configs, too.
    config._attn_implementation_internal = NAME
    return "attention in 32 bits where the model is in 16"


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """(batch, heads or groups, length, head_dim) -> (batch, length, heads, head_dim), transformers' order of
    results."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.dtype not in (torch.bfloat16, torch.float16):
        return sdpa_attention_forward(module, query, key, value, mask, *args, **kwargs)
    # An additive mask must have the dtype of the scores.
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    out, scores = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, *args, **kwargs)
    return out.to(query.dtype), scores
