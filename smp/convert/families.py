"""Architectures of Hugging Face's transformers that smp expresses, as tables read in both directions.

A family is added by adding its row to ``FAMILIES``; what its layers compute must be something ``ModelConfig`` can say.
Sources: the configuration and modeling files of each architecture in transformers 5, and config.json of the authors'
repositories. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from smp.convert.layout import Fused, Table


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture, model_type: its names in config.json.
        table: names of its tensors.
        fields: key in config.json -> the setting of ``ModelConfig``, the same value in both.
        defaults: what a key means that config.json leaves out; keys that have none must be there.
        fixed: settings that the architecture implies.
        required: keys that must have this value, or be absent.
        activations: value of ``activation_key`` -> settings.
        rope_keys: under which keys RoPE's base and rotated fraction were before transformers 5; None: no RoPE.
        window_key: the key of the sliding window.
        ignored: ends of names of tensors that hold no weights (tables that old versions saved).
        renamed: modules that have another name in some files.
        aliases: keys of config.json and the other name that transformers takes for them.
    """

    architecture: str
    model_type: str
    table: Table
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    activations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rope_keys: tuple[str, str] | None = ("rope_theta", "partial_rotary_factor")
    window_key: str | None = None
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


_LLAMA_MODULES: dict[str, str | Fused] = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_QK_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_LLAMA_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LLAMA = Table("model.layers.{}.", _LLAMA_MODULES, _LLAMA_ENDS)
_QWEN3 = Table("model.layers.{}.", _LLAMA_MODULES | _QK_NORMS, _LLAMA_ENDS)
_GPT2 = Table(
    "transformer.h.{}.",
    {
        "attention_norm": "ln_1",
        "attention.query": Fused("attn.c_attn", "thirds", "query"),
        "attention.key": Fused("attn.c_attn", "thirds", "key"),
        "attention.value": Fused("attn.c_attn", "thirds", "value"),
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=True,
)
_NEOX = Table(
    "gpt_neox.layers.{}.",
    {
        "attention_norm": "input_layernorm",
        "attention.query": Fused("attention.query_key_value", "per_group", "query"),
        "attention.key": Fused("attention.query_key_value", "per_group", "key"),
        "attention.value": Fused("attention.query_key_value", "per_group", "value"),
        "attention.output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    {"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
)

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}
_LLAMA_FIELDS = {
    **_SIZES,
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
_LLAMA_FIXED: dict[str, Any] = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"}
_NO_BIAS: dict[str, Any] = {"disable_bias_linear": True, "add_qkv_bias": False}
_LLAMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_LAYER_NORM: dict[str, Any] = {
    **{"swiglu": False, "squared_relu": False, "normalization": "LayerNorm", "qk_layernorm": False},
    **{"disable_bias_linear": False, "add_qkv_bias": False, "window_size": None},
}
_GELUS: dict[str, dict[str, Any]] = {
    "gelu": {"tanh_gelu": False},
    "gelu_new": {"tanh_gelu": True},
    "gelu_pytorch_tanh": {"tanh_gelu": True},
    "gelu_fast": {"tanh_gelu": True},
}

_LLAMA_FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    table=_LLAMA,
    fields={**_LLAMA_FIELDS, "attention_bias": "bias", "mlp_bias": "bias"},
    defaults=_LLAMA_DEFAULTS,
    fixed=_LLAMA_FIXED | {"add_qkv_bias": False, "qk_layernorm": False, "window_size": None},
    activations={"silu": {}, "swish": {}},
    ignored=(".self_attn.rotary_emb.inv_freq",),
)
_WINDOWED = replace(_LLAMA_FAMILY, fields=_LLAMA_FIELDS, window_key="sliding_window")
_WINDOW_DEFAULTS = _LLAMA_DEFAULTS | {
    **{"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
}
_FAMILIES = (
    _LLAMA_FAMILY,
    replace(
        _WINDOWED,
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults=_WINDOW_DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        fixed=_LLAMA_FIXED | _NO_BIAS | {"qk_layernorm": False},
    ),
    replace(
        _WINDOWED,
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults=_WINDOW_DEFAULTS,
        fixed=_LLAMA_FIXED | {"disable_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": False},
    ),
    replace(
        _WINDOWED,
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        table=_QWEN3,
        defaults=_WINDOW_DEFAULTS | {"head_dim": 128},
        fixed=_LLAMA_FIXED | _NO_BIAS | {"qk_layernorm": True},
        required={"attention_bias": False},
        ignored=(),
    ),
    Family(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        table=_GPT2,
        fields={
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_attention_heads",
            "n_inner": "ffn_hidden_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "norm_epsilon",
            "tie_word_embeddings": "tied",
        },
        defaults={
            **{"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024},
            **{"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"},
        },
        fixed=_LAYER_NORM | {"position_embedding_type": "learned_absolute", "parallel_residual": False},
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        activation_key="activation_function",
        activations=_GELUS,
        rope_keys=None,
        ignored=(".attn.bias", ".attn.masked_bias"),
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
    ),
    Family(
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        table=_NEOX,
        fields={
            **_SIZES,
            "layer_norm_eps": "norm_epsilon",
            "tie_word_embeddings": "tied",
            "use_parallel_residual": "parallel_residual",
        },
        defaults={
            **{"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False},
            **{"use_parallel_residual": True, "hidden_act": "gelu", "rotary_emb_base": 10000.0, "rotary_pct": 0.25},
        },
        fixed=_LAYER_NORM | {"position_embedding_type": "rope"},
        required={"attention_bias": True},
        activations=_GELUS,
        rope_keys=("rotary_emb_base", "rotary_pct"),
        ignored=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
        renamed={"embed_out": "lm_head"},
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""By ``model_type``."""

REASONS: dict[str, str] = {
    "mixtral": "mixture-of-experts layers",
    "moe": "mixture-of-experts layers",
    "deepseek": "latent attention and mixture-of-experts layers",
    "gemma": "norm weights counted from 1, scaled embeddings and norms behind its layers",
    "phi": "fused and partly rotated layers of its own",
    "falcon": "fused multi-query layers of its own",
    "bloom": "ALiBi positions",
    "mpt": "ALiBi positions",
    "opt": "position offsets and post-norms",
    "t5": "encoder layers",
    "bert": "encoder layers",
    "mamba": "state-space layers",
    "vl": "layers for images",
    "gpt_oss": "mixture-of-experts layers and attention sinks",
    "gptj": "interleaved rotary positions",
    "gpt_neo": "local attention layers",
}
"""Part of a ``model_type`` -> what of it smp's decoder does not have, or cannot be converted."""
