"""Architectures of Hugging Face's transformers that smp expresses, as tables read in both directions.

A family is added by adding its row here, or in ``more_families``; what its layers compute must be something
``ModelConfig`` can say.
Sources: the configuration and modeling files of each architecture in transformers 5, and config.json of the authors'
repositories. No torch here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smp.convert.huggingface.family import ExpertKeys, Family
from smp.convert.layout import Fused, Table

LLAMA_MODULES: dict[str, str | Fused] = {
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
LLAMA_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LLAMA = Table("model.layers.{}.", LLAMA_MODULES, LLAMA_ENDS)
QK_MODULES = LLAMA_MODULES | _QK_NORMS
_QWEN3 = Table("model.layers.{}.", QK_MODULES, LLAMA_ENDS)
# One tensor for each expert, with its number for {}.
_EXPERTS: dict[str, str | Fused] = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
}
# transformers 5 stacks the experts of a layer in one tensor, gate and up as halves.
STACKED_EXPERTS: dict[str, str | Fused] = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": Fused("mlp.experts.gate_up_proj", "halves", "gate"),
    "mlp.experts.up": Fused("mlp.experts.gate_up_proj", "halves", "up"),
    "mlp.experts.down": "mlp.experts.down_proj",
}


def _shared_experts(name: str) -> dict[str, str | Fused]:
    return {f"mlp.shared_experts.{part}": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}


# Mixtral's w1, w3 and w2 are gate, up and down.
_MIXTRAL = Table(
    "model.layers.{}.",
    LLAMA_MODULES
    | {
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    LLAMA_ENDS,
    stacked=STACKED_EXPERTS,
)
QWEN2_MOE_MODULES = _EXPERTS | _shared_experts("shared_expert") | {"mlp.shared_expert_gate": "mlp.shared_expert_gate"}
_QWEN2_MOE = Table(
    "model.layers.{}.",
    LLAMA_MODULES | QWEN2_MOE_MODULES,
    LLAMA_ENDS,
    stacked=STACKED_EXPERTS,
)
_QWEN3_MOE = Table("model.layers.{}.", QK_MODULES | _EXPERTS, LLAMA_ENDS, stacked=STACKED_EXPERTS)
_GLM4_MOE = Table(
    "model.layers.{}.",
    QK_MODULES
    | _EXPERTS
    | _shared_experts("shared_experts")
    # The bias that only decides the choice (auxiliary-loss-free balancing, arXiv 2408.15664).
    | {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    LLAMA_ENDS,
    stacked=STACKED_EXPERTS,
)
# Low-rank projections of multi-head latent attention; the ``kv_a`` one also makes the shared
# rotated key.
LATENT_MODULES: dict[str, str | Fused] = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
_DEEPSEEK = Table(
    "model.layers.{}.",
    LLAMA_MODULES
    | LATENT_MODULES
    | _EXPERTS
    | _shared_experts("shared_experts")
    | {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    LLAMA_ENDS,
    stacked=STACKED_EXPERTS,
)
# Conv1D of GPT-2 stores (in, out): ``transposed``.
_GPT2 = Table(
    "transformer.h.{}.",
    {
        "attention_norm": "ln_1",
        "attention.query": Fused("attn.c_attn", "stacked", "query"),
        "attention.key": Fused("attn.c_attn", "stacked", "key"),
        "attention.value": Fused("attn.c_attn", "stacked", "value"),
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
# Query, key and value of each head are neighbours in one matrix.
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

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}
LLAMA_FIELDS = {
    **SIZES,
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
}
LLAMA_FIXED: dict[str, Any] = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"}
ATTENTION_BIAS = {"attention_bias": "bias"}
"""The key of families whose attention may have biases on all four projections."""
NO_BIAS: dict[str, Any] = {"disable_bias_linear": True, "add_qkv_bias": False}
LLAMA_DEFAULTS: dict[str, Any] = {
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
LAYER_NORM: dict[str, Any] = {
    **{"swiglu": False, "squared_relu": False, "normalization": "LayerNorm", "qk_layernorm": False},
    **{"disable_bias_linear": False, "add_qkv_bias": False, "window_size": None},
}
GELUS: dict[str, dict[str, Any]] = {
    "gelu": {"tanh_gelu": False},
    "gelu_new": {"tanh_gelu": True},
    "gelu_pytorch_tanh": {"tanh_gelu": True},
    "gelu_fast": {"tanh_gelu": True},
}

LLAMA_FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    table=_LLAMA,
    fields={**LLAMA_FIELDS, **ATTENTION_BIAS, "mlp_bias": "bias"},
    defaults=LLAMA_DEFAULTS,
    fixed=LLAMA_FIXED | {"add_qkv_bias": False, "qk_layernorm": False, "window_size": None},
    activations={"silu": {}, "swish": {}},
    # Old files have RoPE's inverse frequencies as a buffer.
    ignored=(".self_attn.rotary_emb.inv_freq",),
)
# A window in some or all layers.
_WINDOWED = replace(LLAMA_FAMILY, fields=LLAMA_FIELDS, window_key="sliding_window")
_WINDOW_DEFAULTS = LLAMA_DEFAULTS | {
    **{"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
}
LATENT_FIELDS = {name: name for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")}
LATENT_FIELDS |= {"qk_nope_head_dim": "qk_head_dim", "qk_rope_head_dim": "qk_pos_emb_head_dim"}
DEEPSEEK_FAMILY = replace(
    LLAMA_FAMILY,
    table=_DEEPSEEK,
    fields={key: name for key, name in LLAMA_FIELDS.items() if key != "head_dim"} | LATENT_FIELDS,
    fixed=LLAMA_FIXED | NO_BIAS | {"multi_latent_attention": True, "qk_layernorm": True, "window_size": None},
    # transformers gives the norms of latents this epsilon, whatever the config says
    required={"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6, "moe_layer_freq": 1},
)
DEEPSEEK_DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in LLAMA_DEFAULTS.items() if name not in ("head_dim", "mlp_bias")},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
SPARSE_STEP: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
FIRST_FAMILIES = (
    LLAMA_FAMILY,
    replace(
        _WINDOWED,
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults=_WINDOW_DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        # No biases on projections.
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_layernorm": False},
    ),
    replace(
        _WINDOWED,
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults=_WINDOW_DEFAULTS,
        # Qwen2: biases on query, key and value only.
        fixed=LLAMA_FIXED | {"disable_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": False},
    ),
    replace(
        _WINDOWED,
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        table=_QWEN3,
        fields=LLAMA_FIELDS | ATTENTION_BIAS,
        defaults=_WINDOW_DEFAULTS | {"head_dim": 128},
        # Qwen3 has norms of queries and keys instead of biases.
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_layernorm": True},
        ignored=(),
    ),
    replace(
        _WINDOWED,
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        table=_MIXTRAL,
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_layernorm": False},
        aliases={"num_local_experts": "num_experts"},
        experts=ExpertKeys("num_local_experts"),
    ),
    replace(
        LLAMA_FAMILY,
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        table=_QWEN2_MOE,
        fields=LLAMA_FIELDS | {"qkv_bias": "add_qkv_bias"},
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 16, "max_position_embeddings": 32768, "qkv_bias": True}
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 5632, **SPARSE_STEP},
        fixed=LLAMA_FIXED | {"disable_bias_linear": True, "qk_layernorm": False, "window_size": None},
        required={"use_sliding_window": False},
        experts=ExpertKeys("num_experts", "sparse_step", "gated", "norm_topk_prob", own_width=True),
    ),
    replace(
        LLAMA_FAMILY,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        table=_QWEN3_MOE,
        fields=LLAMA_FIELDS | ATTENTION_BIAS,
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "norm_topk_prob": False}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **SPARSE_STEP},
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_layernorm": True, "window_size": None},
        required={"use_sliding_window": False},
        aliases={"num_experts": "num_local_experts"},
        experts=ExpertKeys("num_experts", "sparse_step", router="norm_topk_prob", own_width=True),
    ),
    replace(
        LLAMA_FAMILY,
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        table=_QWEN3_MOE,
        fields=LLAMA_FIELDS | ATTENTION_BIAS,
        defaults=LLAMA_DEFAULTS
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False}
        | {"num_experts": 64, "num_experts_per_tok": 8},
        # OLMoE: query and key norms over all heads at once.
        fixed=LLAMA_FIXED | NO_BIAS | {"qk_layernorm": True, "qk_layernorm_across_heads": True, "window_size": None},
        required={"clip_qkv": None},
        aliases={"num_experts": "num_local_experts"},
        experts=ExpertKeys("num_experts", router="norm_topk_prob"),
    ),
    replace(
        LLAMA_FAMILY,
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        table=_GLM4_MOE,
        # GLM-4 MoE: optional query and key norms.
        fields=LLAMA_FIELDS | {"attention_bias": "add_qkv_bias", "use_qk_norm": "qk_layernorm"},
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "use_qk_norm": False}
        | {"partial_rotary_factor": 0.5, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        fixed=LLAMA_FIXED | {"disable_bias_linear": True, "window_size": None},
        aliases={"n_routed_experts": "num_local_experts"},
        experts=ExpertKeys("n_routed_experts", "first_k", "multiple", "sigmoid", own_width=True),
        predicts=True,
    ),
    replace(
        DEEPSEEK_FAMILY,
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults=DEEPSEEK_DEFAULTS
        | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0}
        | {"routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": None, "topk_group": None},
        required={**DEEPSEEK_FAMILY.required} | {"norm_topk_prob": False},
        said={"norm_topk_prob": False, "scoring_func": "softmax"},
        aliases={"n_routed_experts": "num_experts"},
        experts=ExpertKeys("n_routed_experts", "first_k", "multiple", "topk_method", own_width=True),
    ),
    replace(
        DEEPSEEK_FAMILY,
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        defaults=DEEPSEEK_DEFAULTS
        | {"num_key_value_heads": 128, "max_position_embeddings": 4096, "num_experts_per_tok": 8}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
        | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
        # noaux_tc: choice by biased scores, without an auxiliary loss.
        required={**DEEPSEEK_FAMILY.required} | {"rope_interleave": True, "topk_method": "noaux_tc"},
        said={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        aliases={"n_routed_experts": "num_local_experts"},
        experts=ExpertKeys("n_routed_experts", "first_k", "multiple", "sigmoid", own_width=True),
        predicts=True,
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
        # No RoPE: learned positions.
        fixed=LAYER_NORM | {"position_embedding_type": "learned_absolute", "parallel_residual": False},
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        activation_key="activation_function",
        activations=GELUS,
        rope_keys=None,
        # Causal masks that old versions saved as buffers.
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
            **SIZES,
            "layer_norm_eps": "norm_epsilon",
            "tie_word_embeddings": "tied",
            "use_parallel_residual": "parallel_residual",
            **ATTENTION_BIAS,
        },
        defaults={
            **{"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False},
            **{"use_parallel_residual": True, "hidden_act": "gelu", "rotary_emb_base": 10000.0, "rotary_pct": 0.25},
            **{"attention_bias": True, "mlp_bias": True},
        },
        fixed=LAYER_NORM | {"position_embedding_type": "rope"},
        activations=GELUS,
        rope_keys=("rotary_emb_base", "rotary_pct"),
        ignored=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
        renamed={"embed_out": "lm_head"},
    ),
)
REASONS: dict[str, str] = {
    "moe": "a router or layers besides its experts of its own",
    "deepseek": "attention or layers of its own",
    "gemma3n": "layers that share keys and values, and embeddings of each layer",
    "gemma4": "layers that share keys and values, and head widths of their own",
    "gemma": "layers for images",
    "phimoe": "a router of its own",
    "phi": "a bias in its output layer, or layers for images and sound",
    "falcon": "state-space layers",
    "mpt": "ALiBi slopes of its own",
    "t5": "encoder layers",
    "bert": "encoder layers",
    "mamba": "state-space layers",
    "vl": "layers for images",
    "gptj": "a bias in its output layer",
    "gpt_neo": "local attention layers",
}
"""Part of a ``model_type`` -> what such models have that smp's decoder lacks or that is not converted."""
