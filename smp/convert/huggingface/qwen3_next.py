"""Qwen3-Next and Qwen3.5: three layers of four are gated delta nets, the fourth has attention with a gate.

See ``families``, whose words these rows are in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from smp.convert.huggingface.families import (
    LLAMA_DEFAULTS,
    LLAMA_ENDS,
    LLAMA_FAMILY,
    LLAMA_FIELDS,
    LLAMA_FIXED,
    NO_BIAS,
    QK_MODULES,
    QWEN2_MOE_MODULES,
    SPARSE_STEP,
    STACKED_EXPERTS,
)
from smp.convert.huggingface.family import ExpertKeys
from smp.convert.huggingface.own import QWEN3_NEXT
from smp.convert.layout import Fused, Table

_CONVOLVED: tuple[Literal["query", "key", "value"], ...] = ("query", "key", "value")
_WIDE: tuple[Literal["query", "key", "value", "gate"], ...] = (*_CONVOLVED, "gate")
_RATES: tuple[Literal["beta", "decay"], ...] = ("beta", "decay")
# Qwen3-Next: the query projection makes a gate for each head as well.
_GATED: dict[str, str | Fused] = {
    "attention.query": Fused("self_attn.q_proj", "gated", "query"),
    "attention.gate": Fused("self_attn.q_proj", "gated", "gate"),
}
# One convolution over queries, keys and values.
_DELTA_NET: dict[str, str | Fused] = {
    **{f"attention.{name}_conv": Fused("linear_attn.conv1d.weight", "recurrent", name) for name in _CONVOLVED},
    "attention.decay_log": "linear_attn.A_log",
    "attention.decay_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm",
    "attention.output": "linear_attn.out_proj",
}
_TABLE = Table(
    "model.layers.{}.",
    QK_MODULES | QWEN2_MOE_MODULES | _GATED,
    LLAMA_ENDS,
    stacked=STACKED_EXPERTS,
    recurrent=_DELTA_NET
    # Rows are ordered by key head: its queries, keys, values and gates.
    | {f"attention.{name}": Fused("linear_attn.in_proj_qkvz", "per_key_head", name) for name in _WIDE}
    | {f"attention.{name}": Fused("linear_attn.in_proj_ba", "per_key_head", name) for name in _RATES},
)
_QWEN35 = replace(
    # Qwen3.5: separate projections.
    _TABLE,
    recurrent=_DELTA_NET
    | {f"attention.{name}": Fused("linear_attn.in_proj_qkv", "recurrent", name) for name in _CONVOLVED}
    | {"attention.gate": "linear_attn.in_proj_z"}
    | {"attention.beta": "linear_attn.in_proj_b", "attention.decay": "linear_attn.in_proj_a"},
)
_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    **{"num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "layer_types": None, "full_attention_interval": 4},
}
_EXPERTS: dict[str, Any] = {
    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
    "shared_expert_intermediate_size": 512,
}
_FAMILY = replace(
    LLAMA_FAMILY,
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    table=_TABLE,
    fields=LLAMA_FIELDS,
    defaults=_DEFAULTS | _EXPERTS | SPARSE_STEP | {"norm_topk_prob": True},
    fixed=LLAMA_FIXED
    | NO_BIAS
    # Zero-centred norm weights, as Gemma's.
    | {"qk_layernorm": True, "apply_layernorm_1p": True, "attention_output_gate": True, "window_size": None},
    required={"attention_bias": False},
    skipped=("mtp.",),
    experts=ExpertKeys("num_experts", "sparse_step", "gated", "norm_topk_prob", own_width=True),
    own=QWEN3_NEXT,
)
QWEN3_NEXT_FAMILIES = (
    _FAMILY,
    replace(
        _FAMILY,
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        table=_QWEN35,
        defaults=_DEFAULTS | {"num_key_value_heads": 4},
        experts=None,
    ),
    replace(
        _FAMILY,
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        table=_QWEN35,
        fields={key: name for key, name in LLAMA_FIELDS.items() if key != "intermediate_size"},
        defaults=_DEFAULTS | _EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        experts=ExpertKeys("num_experts", shared="gated", own_width=True),
    ),
)
