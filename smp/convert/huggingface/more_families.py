"""Families with scalings, caps, norm placements or layer choices of their own; and the table of all families.

See ``families``, whose words these rows are in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smp.convert.huggingface.falcon_h1 import FALCON_H1
from smp.convert.huggingface.families import (
    ATTENTION_BIAS,
    FIRST_FAMILIES,
    GELUS,
    LAYER_NORM,
    LLAMA_DEFAULTS,
    LLAMA_ENDS,
    LLAMA_FAMILY,
    LLAMA_FIELDS,
    LLAMA_FIXED,
    LLAMA_MODULES,
    NO_BIAS,
    QK_MODULES,
    SIZES,
)
from smp.convert.huggingface.family import ExpertKeys, Family
from smp.convert.huggingface.hybrids import HYBRID_FAMILIES
from smp.convert.huggingface.llama4 import LLAMA4
from smp.convert.huggingface.own import COHERE2, FALCON, GEMMA, GEMMA3, GPT_OSS, OLMO3, SMOLLM3
from smp.convert.huggingface.qwen3_next import QWEN3_NEXT_FAMILIES
from smp.convert.huggingface.sparse_attention import SPARSE_FAMILIES
from smp.convert.huggingface.state_space import STATE_SPACE_FAMILIES
from smp.convert.layout import Fused, Table


def _table(modules: dict[str, str | Fused], *left_out: str) -> Table:
    kept = {name: target for name, target in modules.items() if name not in left_out}
    return Table("model.layers.{}.", kept, LLAMA_ENDS)


def _fused(name: str) -> dict[str, str | Fused]:
    """Query, key and value of each group in one matrix, (groups, heads + 2, head_dim) rows."""
    return {
        "attention.query": Fused(name, "per_group", "query"),
        "attention.key": Fused(name, "per_group", "key"),
        "attention.value": Fused(name, "per_group", "value"),
    }


# All queries, then all keys, then all values.
_STACKED: dict[str, str | Fused] = {
    "attention.query": Fused("self_attn.qkv_proj", "stacked", "query"),
    "attention.key": Fused("self_attn.qkv_proj", "stacked", "key"),
    "attention.value": Fused("self_attn.qkv_proj", "stacked", "value"),
}
# Gate above up.
_GATE_UP: dict[str, str | Fused] = {
    "mlp.gate": Fused("mlp.gate_up_proj", "halves", "gate"),
    "mlp.up": Fused("mlp.gate_up_proj", "halves", "up"),
}
# Norms before and after both halves of a block; Llama's name of the MLP norm is attention's post
# norm here.
_SANDWICH: dict[str, str | Fused] = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
# Norms after both halves only.
_POST: dict[str, str | Fused] = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GLM4_NORMS: dict[str, str | Fused] = {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_FALCON: dict[str, str | Fused] = {
    "attention_norm": "ln_attn",
    **_fused("self_attention.query_key_value"),
    "attention.output": "self_attention.dense",
    "mlp_norm": "ln_mlp",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_BLOOM = _FALCON | {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
# BLOOM and Falcon share these names.
_ENDS_OF_H = {"embedding": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"}
_OPT: dict[str, str | Fused] = {
    "attention_norm": "self_attn_layer_norm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}
_OPT_ENDS = {
    "embedding": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}

# Gemma's GeGLU with the tanh approximation.
_TANH_GEGLU = {"geglu": True, "tanh_gelu": True}
_GEGLUS: dict[str, dict[str, Any]] = {
    "gelu_pytorch_tanh": _TANH_GEGLU,
    "gelu_new": _TANH_GEGLU,
    "gelu_fast": _TANH_GEGLU,
    "gelu": {"geglu": True, "tanh_gelu": False},
}
# query_pre_attn_scalar s: scores are divided by sqrt(s).
_CAPS: dict[str, Any] = {
    "attn_logit_softcapping": ("attn_logit_softcapping", "same"),
    "final_logit_softcapping": ("final_logit_softcapping", "same"),
    "query_pre_attn_scalar": ("softmax_scale", "inverse_root"),
}
# Gemma's norms multiply by 1 + weight.
_GEMMA_FIXED = LLAMA_FIXED | NO_BIAS | {"swiglu": False, "apply_layernorm_1p": True}
_GEMMA = replace(
    LLAMA_FAMILY,
    architecture="GemmaForCausalLM",
    model_type="gemma",
    fields=LLAMA_FIELDS | ATTENTION_BIAS,
    defaults=LLAMA_DEFAULTS
    | {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    | {"hidden_act": "gelu_pytorch_tanh"},
    fixed=_GEMMA_FIXED,
    activations=_GEGLUS | {"gelu": _TANH_GEGLU},  # the first files say gelu and mean the tanh approximation
    own=GEMMA,
)
_GEMMA2 = replace(
    _GEMMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    table=_table(LLAMA_MODULES | _SANDWICH),
    defaults=_GEMMA.defaults
    | {"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256},
    # Every second layer has the window.
    fixed=_GEMMA_FIXED | {"norm_placement": "sandwich"},
    activation_key="hidden_activation",
    activations=_GEGLUS,
    factors=_CAPS,
    window_key="sliding_window",
    window_period=2,
)
_OLMO2 = replace(
    LLAMA_FAMILY,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    table=_table(QK_MODULES | _POST, "attention_norm", "mlp_norm"),
    fields=LLAMA_FIELDS | ATTENTION_BIAS,
    defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
    # Query and key norms over all heads at once.
    fixed=LLAMA_FIXED
    | NO_BIAS
    | {"qk_layernorm": True, "qk_layernorm_across_heads": True, "norm_placement": "post", "window_size": None},
)
_COHERE = replace(
    LLAMA_FAMILY,
    architecture="CohereForCausalLM",
    model_type="cohere",
    table=_table(LLAMA_MODULES, "mlp_norm"),
    fields={key: name for key, name in LLAMA_FIELDS.items() if key != "rms_norm_eps"}
    | {"layer_norm_eps": "norm_epsilon", **ATTENTION_BIAS},
    defaults={key: value for key, value in LLAMA_DEFAULTS.items() if key != "rms_norm_eps"}
    | {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0, "logit_scale": 0.0625}
    | {"max_position_embeddings": 8192},
    fixed=LLAMA_FIXED
    | NO_BIAS
    # LayerNorm without bias; neighbouring channels are rotated as pairs.
    | {"normalization": "LayerNorm", "layernorm_bias": False, "rotary_interleaved": True, "window_size": None}
    # Attention and MLP read one norm's output, and both are added to the residual.
    | {"parallel_residual": True, "parallel_residual_shared_norm": True},
    required={"use_qk_norm": False},
    factors={"logit_scale": ("logit_scale", "same")},
)
_GLM = replace(
    LLAMA_FAMILY,
    architecture="GlmForCausalLM",
    model_type="glm",
    table=_table(LLAMA_MODULES | _GATE_UP),
    fields=LLAMA_FIELDS | {"attention_bias": "add_qkv_bias"},
    defaults=LLAMA_DEFAULTS
    | {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07}
    | {"attention_bias": True, "partial_rotary_factor": 0.5},
    fixed=LLAMA_FIXED | {"disable_bias_linear": True, "window_size": None, "rotary_interleaved": True},
)
_GPT_OSS = Table(
    "model.layers.{}.",
    {name: target for name, target in LLAMA_MODULES.items() if not name.startswith("mlp.")}
    | {
        # A learned logit for each head that takes part in the softmax only.
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        # Gate and up alternate along the output dimension.
        "mlp.experts.gate": Fused("mlp.experts.gate_up_proj", "interleaved", "gate"),
        "mlp.experts.up": Fused("mlp.experts.gate_up_proj", "interleaved", "up"),
        "mlp.experts.down": "mlp.experts.down_proj",
        "mlp.experts.gate.bias": Fused("mlp.experts.gate_up_proj_bias", "interleaved", "gate"),
        "mlp.experts.up.bias": Fused("mlp.experts.gate_up_proj_bias", "interleaved", "up"),
        "mlp.experts.down.bias": "mlp.experts.down_proj_bias",
    },
    LLAMA_ENDS,
    # (experts, in, out) in bf16 files.
    experts_transposed=True,
)
# In MXFP4 files a row is an output.
_GPT_OSS_MXFP4 = replace(
    _GPT_OSS,
    modules={
        **_GPT_OSS.modules,
        "mlp.experts.gate": Fused("mlp.experts.gate_up_proj_blocks", "interleaved", "gate"),
        "mlp.experts.up": Fused("mlp.experts.gate_up_proj_blocks", "interleaved", "up"),
        "mlp.experts.down": "mlp.experts.down_proj_blocks",
    },
    experts_transposed=False,
)
_LLAMA4_MLP: dict[str, str | Fused] = {
    **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "mlp.router": "feed_forward.router",
    "mlp.experts.gate": Fused("feed_forward.experts.gate_up_proj", "halves", "gate"),
    "mlp.experts.up": Fused("feed_forward.experts.gate_up_proj", "halves", "up"),
    "mlp.experts.down": "feed_forward.experts.down_proj",
    **{f"mlp.shared_experts.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_LLAMA4 = Table(
    "model.layers.{}.", LLAMA_MODULES | _LLAMA4_MLP, LLAMA_ENDS, experts_transposed=True, experts_in_peft=False
)
_MORE = (
    _GEMMA,
    _GEMMA2,
    replace(
        _GEMMA2,
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        table=_table(QK_MODULES | _SANDWICH),
        defaults=_GEMMA2.defaults
        | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        fixed=_GEMMA_FIXED | {"norm_placement": "sandwich", "qk_layernorm": True},
        required={"use_bidirectional_attention": False},
        # Five layers with the window, then one without.
        window_period=6,
        own=GEMMA3,
    ),
    _OLMO2,
    replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        defaults=_OLMO2.defaults | {"rope_theta": 500000.0, "sliding_window": 4096},
        fixed={name: value for name, value in _OLMO2.fixed.items() if name != "window_size"},
        window_key="sliding_window",
        window_period=4,
        own=OLMO3,
    ),
    replace(
        LLAMA_FAMILY,
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        table=_table(LLAMA_MODULES | _STACKED | _GATE_UP),
        fields=LLAMA_FIELDS,
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
        | {"sliding_window": None, "original_max_position_embeddings": 4096},
        fixed=LLAMA_FIXED | NO_BIAS,
        window_key="sliding_window",
    ),
    replace(
        LLAMA_FAMILY,
        architecture="GraniteForCausalLM",
        model_type="granite",
        factors={
            "embedding_multiplier": ("embedding_multiplier", "same"),
            "residual_multiplier": ("residual_multiplier", "same"),
            "attention_multiplier": ("softmax_scale", "same"),
            "logits_scaling": ("logit_scale", "inverse"),
        },
        defaults=LLAMA_DEFAULTS
        | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
        | {"logits_scaling": 1.0},
    ),
    _COHERE,
    replace(
        _COHERE,
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        fields={key: name for key, name in _COHERE.fields.items() if key != "head_dim"},
        defaults=_COHERE.defaults | {"sliding_window": 4096, "rope_theta": 10000.0},
        fixed={name: value for name, value in _COHERE.fixed.items() if name != "window_size"},
        window_key="sliding_window",
        window_period=4,
        own=COHERE2,
    ),
    replace(
        LLAMA_FAMILY,
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
        # Every fourth layer has no RoPE.
        | {"no_rope_layers": None, "no_rope_layer_interval": 4},
        required={"use_sliding_window": False},
        own=SMOLLM3,
    ),
    Family(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        table=_table(LLAMA_MODULES | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}, "mlp.gate"),
        fields={
            **SIZES,
            "num_key_value_heads": "num_query_groups",
            "head_dim": "kv_channels",
            "norm_epsilon": "norm_epsilon",
            "tie_word_embeddings": "tied",
            "use_bias": "all_biases",
        },
        defaults={
            **{"num_key_value_heads": 2, "head_dim": None, "norm_epsilon": 1e-5, "tie_word_embeddings": True},
            **{"use_bias": True, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096},
            **{"rope_theta": 10000.0, "sliding_window": None},
        },
        fixed={key: value for key, value in LAYER_NORM.items() if key not in ("disable_bias_linear", "window_size")}
        | {"position_embedding_type": "rope"},
        activations={"gelu_pytorch_tanh": {"tanh_gelu": True}, **GELUS},  # the first is what is written
        window_key="sliding_window",
    ),
    _GLM,
    replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        table=_table(LLAMA_MODULES | _GATE_UP | _GLM4_NORMS),
        fixed=_GLM.fixed | {"norm_placement": "sandwich"},
    ),
    Family(
        architecture="FalconForCausalLM",
        model_type="falcon",
        # With a norm shared by both halves it is called input_layernorm.
        table=Table("transformer.h.{}.", _FALCON, _ENDS_OF_H, shared_norm={"attention_norm": "input_layernorm"}),
        fields={key: name for key, name in SIZES.items() if key != "intermediate_size"}
        | {"ffn_hidden_size": "ffn_hidden_size", "layer_norm_epsilon": "norm_epsilon"}
        | {"tie_word_embeddings": "tied", "bias": "all_biases"},
        defaults={
            **{"ffn_hidden_size": None, "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "bias": False},
            **{"tie_word_embeddings": True, "activation": "gelu", "rope_theta": 10000.0, "num_kv_heads": None},
            **{"new_decoder_architecture": False, "multi_query": True, "num_ln_in_parallel_attn": None},
        },
        # Attention and MLP side by side.
        fixed={key: value for key, value in LAYER_NORM.items() if key != "disable_bias_linear"}
        | {"position_embedding_type": "rope", "parallel_residual": True},
        required={"alibi": False, "parallel_attn": True},
        activation_key="activation",
        activations=GELUS,
        aliases={"hidden_size": "n_embed"},
        own=FALCON,
    ),
    Family(
        architecture="OPTForCausalLM",
        model_type="opt",
        table=Table("model.decoder.layers.{}.", _OPT, _OPT_ENDS),
        fields={key: name for key, name in SIZES.items() if key != "intermediate_size"}
        | {"ffn_dim": "ffn_hidden_size", "tie_word_embeddings": "tied", "enable_bias": "all_biases"},
        defaults={
            **{"max_position_embeddings": 2048, "tie_word_embeddings": True, "enable_bias": True},
            **{"activation_function": "relu"},
        },
        fixed={key: value for key, value in LAYER_NORM.items() if key != "disable_bias_linear"}
        # OPT's table of positions has two unused rows in front.
        | {"position_embedding_type": "learned_absolute", "position_embedding_offset": 2, "norm_epsilon": 1e-5},
        required={
            **{"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        },
        activation_key="activation_function",
        activations={"relu": {"relu": True}} | {key: {"relu": False, **means} for key, means in GELUS.items()},
        rope_keys=None,
        # OPT-350m projects embeddings to another width, which is not supported.
        same_as={"word_embed_proj_dim": "hidden_size"},
    ),
    Family(
        architecture="BloomForCausalLM",
        model_type="bloom",
        table=Table(
            "transformer.h.{}.", _BLOOM, _ENDS_OF_H | {"embedding_norm": "transformer.word_embeddings_layernorm"}
        ),
        fields={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_attention_heads",
            "seq_length": "max_position_embeddings",
            "layer_norm_epsilon": "norm_epsilon",
            "tie_word_embeddings": "tied",
        },
        defaults={
            **{"seq_length": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        },
        # A norm right after the embedding.
        fixed=LAYER_NORM | {"position_embedding_type": "alibi", "embedding_layernorm": True, "tanh_gelu": True},
        required={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
        activation_key=None,
        rope_keys=None,
        aliases={"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    ),
    replace(
        LLAMA_FAMILY,
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        table=_GPT_OSS,
        quantized=_GPT_OSS_MXFP4,
        fields=LLAMA_FIELDS | ATTENTION_BIAS,
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
        | {"rope_theta": 150000.0, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True, "mlp_bias": True},
        fixed=LLAMA_FIXED
        # x * sigmoid(1.702 x), clamped at swiglu_limit, and up + 1 (GPT-OSS).
        | {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "softmax_type": "learnable"}
        | {"disable_bias_linear": False, "qk_layernorm": False},
        required={"swiglu_alpha": 1.702},
        activation_key=None,
        factors={"swiglu_limit": ("activation_func_clamp_value", "same")},
        window_key="sliding_window",
        # Every second layer has the window.
        window_period=2,
        aliases={"num_local_experts": "num_experts"},
        experts=ExpertKeys("num_local_experts"),
        own=GPT_OSS,
    ),
    replace(
        LLAMA_FAMILY,
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        table=_LLAMA4,
        # intermediate_size is the experts' width there, intermediate_size_mlp that of dense layers.
        fields={key: name for key, name in LLAMA_FIELDS.items() if key != "intermediate_size"}
        | {"intermediate_size_mlp": "ffn_hidden_size", **ATTENTION_BIAS},
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
        | {"intermediate_size_mlp": 16384, "rope_theta": 500000.0, "attention_chunk_size": 8192, "use_qk_norm": True}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4, "attn_temperature_tuning": True}
        | {"attn_scale": 0.1, "floor_scale": 8192, "num_local_experts": 16, "num_experts_per_tok": 1}
        | {"moe_layers": None, "interleave_moe_layer_step": 1},
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_layernorm": False, "window_size": None, "rotary_interleaved": True},
        own=LLAMA4,
    ),
)
_ALL = (
    *FIRST_FAMILIES,
    *QWEN3_NEXT_FAMILIES,
    *_MORE,
    *SPARSE_FAMILIES,
    *STATE_SPACE_FAMILIES,
    FALCON_H1,
    *HYBRID_FAMILIES,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Families by ``model_type``, which tells them apart in a config.json."""
