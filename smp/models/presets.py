"""Named sizes: the architecture of published models as values of ``ModelConfig`` fields. Imports nothing.

Each is what the model's authors released: GPT-2's and GPT-3's papers, and the ``config.json`` of the Hugging Face
repository of the same name for the rest: the base models of Llama and Qwen 2.5 (whose instruct variants have other
epsilons and lengths), the hybrid ones of Qwen 3, version 0.1 of Mistral 7B and of Command R.

Two things differ on purpose. Dropout, 0.1 in GPT-2's recipe, is a setting of the run and stays off. GPT-3 used banded
sparse attention in every other layer; here every layer is dense, as in all later models.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]


def _size(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> Preset:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
    }


_TIED: Preset = {"untie_embeddings_and_output_weights": False}
_GPT2: Preset = _TIED | {
    "vocab_size": 50257,
    "max_position_embeddings": 1024,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "tanh_gelu": True,
    "disable_bias_linear": False,
}
# RMSNorm, SwiGLU, RoPE, no biases and an output matrix of its own are ModelConfig's defaults: they are Llama's.
_LLAMA2: Preset = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000.0,
}
_LLAMA3: Preset = _LLAMA2 | {"vocab_size": 128256, "max_position_embeddings": 8192, "rotary_base": 500000.0}
_LLAMA31: Preset = _LLAMA3 | {
    "max_position_embeddings": 131072,
    "use_rope_scaling": True,
    "rope_scaling_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_max_position": 8192,
}
_LLAMA32: Preset = _LLAMA31 | _TIED | {"rope_scaling_factor": 32.0}
_MISTRAL: Preset = _LLAMA2 | {"max_position_embeddings": 32768, "window_size": 4096}
# One tokenizer: the models up to 3B pad it to 151,936 rows, the larger ones to 152,064.
_QWEN25: Preset = {
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "norm_epsilon": 1e-6,
    "rotary_base": 1000000.0,
    "add_qkv_bias": True,
}
_QWEN25_SMALL: Preset = _QWEN25 | _TIED | {"vocab_size": 151936}
_QWEN25_BIG: Preset = _QWEN25 | {"norm_epsilon": 1e-5}
_32K: Preset = {"max_position_embeddings": 32768}
# Heads of 128 whatever hidden_size / heads is: ``kv_channels`` has to be given.
_QWEN3: Preset = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "norm_epsilon": 1e-6,
    "rotary_base": 1000000.0,
    "kv_channels": 128,
    "qk_layernorm": True,
}


def _experts(count: int, topk: int, width: int, **more: Any) -> Preset:
    return {"num_experts": count, "moe_router_topk": topk, "moe_ffn_hidden_size": width, **more}


def _shared(width: int) -> Preset:
    return {"moe_shared_expert_intermediate_size": width}


_MIXTRAL: Preset = _LLAMA2 | {"rotary_base": 1000000.0, "max_position_embeddings": 32768}
# norm_topk_prob is false in its file: the softmax over all experts is not normalized again (pre_softmax).
_QWEN2_MOE: Preset = _QWEN25 | {
    "vocab_size": 151936,
    "moe_router_pre_softmax": True,
    "moe_shared_expert_gate": True,
}
_GLM45: Preset = {
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rotary_base": 1000000.0,
    "rotary_percent": 0.5,
    "kv_channels": 128,
    "add_qkv_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}

_DEEPSEEK: Preset = {
    "max_position_embeddings": 163840,
    "norm_epsilon": 1e-6,
    "rotary_base": 10000.0,
    "use_rope_scaling": True,
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_max_position": 4096,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 512,
}
_DEEPSEEK2: Preset = _DEEPSEEK | {
    "vocab_size": 102400,
    "yarn_mscale": 0.707,
    "yarn_mscale_all_dim": 0.707,
    "moe_router_pre_softmax": True,
}

_GEMMA2: Preset = _TIED | {
    **{"vocab_size": 256000, "max_position_embeddings": 8192, "norm_epsilon": 1e-6, "kv_channels": 256},
    **{"apply_layernorm_1p": True, "norm_placement": "sandwich", "swiglu": False, "geglu": True, "tanh_gelu": True},
    **{"window_size": 4096, "window_attn_skip_freq": "2"},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
# Five layers with a window and a base of their own, then a global one. Norms of queries and keys
# stand in for Gemma 2's soft caps.
_GEMMA3: Preset = _GEMMA2 | {
    **{"vocab_size": 262144, "max_position_embeddings": 131072, "qk_layernorm": True, "window_attn_skip_freq": "6"},
    **{"rotary_base": 1000000.0, "rotary_base_local": 10000.0, "window_size": 1024},
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
}

_GPT_OSS: Preset = {
    **{"vocab_size": 201088, "max_position_embeddings": 131072, "norm_epsilon": 1e-5, "kv_channels": 64},
    **{"rotary_base": 150000.0, "use_rope_scaling": True, "rope_scaling_type": "yarn", "rope_scaling_factor": 32.0},
    **{"rope_original_max_position": 4096, "yarn_truncate": False, "window_size": 128, "window_attn_skip_freq": "2"},
    **{"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    **{"disable_bias_linear": False, "softmax_type": "learnable"},
}

# Three layers with RoPE and chunks, then one without positions whose queries grow with them (iRoPE).
_LLAMA4: Preset = {
    **{"vocab_size": 202048, "norm_epsilon": 1e-5, "kv_channels": 128, "rotary_base": 500000.0},
    **{"rotary_interleaved": True, "no_rope_freq": "4", "attention_chunk_size": 8192, "attn_temperature_tuning": True},
    **{"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
}


# Every fourth layer is gated attention, the others are gated delta nets.
_QWEN3_NEXT: Preset = {
    **{"vocab_size": 151936, "max_position_embeddings": 262144, "norm_epsilon": 1e-6, "kv_channels": 256},
    **{"rotary_base": 10000000.0, "rotary_percent": 0.25, "qk_layernorm": True, "apply_layernorm_1p": True},
    **{"attention_output_gate": True, "linear_attention_type": "gated_delta_net", "linear_attention_freq": "4"},
    "moe_shared_expert_gate": True,
}


_MAMBA2: Preset = {"max_position_embeddings": 2**20, "norm_epsilon": 1e-5}
# Attention in layers 5, 15, 25 and 35, Mamba-2 in all others.
_GRANITE4: Preset = _TIED | {
    **{"vocab_size": 100352, "max_position_embeddings": 131072, "norm_epsilon": 1e-5, "mamba_num_groups": 1},
    **{"position_embedding_type": "none", "linear_attention_type": "mamba2", "residual_multiplier": 0.22},
    **{"linear_attention_freq": str([int(layer % 10 != 5) for layer in range(40)]).replace(" ", "")},
    "embedding_multiplier": 12.0,
}
# Attention and Mamba-2 side by side in every layer. Its muP multipliers that only scale a product
# are folded: key_multiplier into softmax_scale, ssm_in_multiplier into ssm_multipliers.
_FALCON_H1: Preset = {
    **{"norm_epsilon": 1e-5, "rotary_base": 1e11, "embedding_multiplier": 5.656854249492381, "mamba_num_groups": 1},
    **{"linear_attention_type": "mamba2", "linear_attention_parallel": True},
}
_NEMOTRON_H: Preset = {
    **{"vocab_size": 131072, "norm_epsilon": 1e-5, "kv_channels": 128, "swiglu": False, "squared_relu": True},
    **{"position_embedding_type": "none", "mamba_num_groups": 8},
}
# M: Mamba-2; *: attention; -: MLP; E: experts (``hybrid_layer_pattern``).
_NEMOTRON_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _granite4(head_dim: int, hidden: int) -> Preset:
    """Granite 4's factors of attention scores and logits."""
    return {"softmax_scale": 1 / head_dim, "logit_scale": 256 / hidden, "mamba_num_heads": hidden // 32}


def _ssm(before: float, *after: float) -> Preset:
    """Falcon-H1's factors in front of Mamba-2's projections and after each, in one."""
    return {"ssm_multipliers": " ".join(str(before * factor) for factor in after)}


def _embedded(hidden: int) -> Preset:
    """Gemma's factor of the embedding."""
    return {"embedding_multiplier": hidden**0.5}


# Norms after attention and MLP; those of queries and keys go over all heads at once.
_OLMO2: Preset = {
    **{"vocab_size": 100352, "max_position_embeddings": 4096, "norm_epsilon": 1e-6, "rotary_base": 500000.0},
    **{"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True},
}
_GRANITE: Preset = _TIED | {
    **{"vocab_size": 49155, "max_position_embeddings": 131072, "norm_epsilon": 1e-5, "embedding_multiplier": 12.0},
    "residual_multiplier": 0.22,
}
# Attention and MLP read one norm, and both are added to its input (Cohere).
_COMMAND: Preset = _TIED | {
    **{"vocab_size": 256000, "normalization": "LayerNorm", "layernorm_bias": False, "norm_epsilon": 1e-5},
    **{"parallel_residual": True, "parallel_residual_shared_norm": True, "rotary_interleaved": True},
}
_LAYER_NORMS: Preset = {
    **{"normalization": "LayerNorm", "norm_epsilon": 1e-5, "swiglu": False, "disable_bias_linear": False},
}
_STARCODER2: Preset = (
    _LAYER_NORMS
    | _TIED
    | {
        **{"vocab_size": 49152, "max_position_embeddings": 16384, "tanh_gelu": True, "window_size": 4096},
    }
)
_GLM4: Preset = {
    **{"vocab_size": 151552, "norm_epsilon": 1e-5, "rotary_percent": 0.5, "rotary_interleaved": True},
    **{"kv_channels": 128, "add_qkv_bias": True, "max_position_embeddings": 131072},
}
_FALCON: Preset = (
    _LAYER_NORMS
    | _TIED
    | {
        **{
            "vocab_size": 65024,
            "max_position_embeddings": 2048,
            "disable_bias_linear": True,
            "parallel_residual": True,
        },
    }
)
# fairseq's table of positions begins with two rows that no token uses:
# ``position_embedding_offset``.
_OPT: Preset = (
    _LAYER_NORMS
    | _TIED
    | {
        **{"vocab_size": 50272, "max_position_embeddings": 2048, "relu": True},
        **{"position_embedding_type": "learned_absolute", "position_embedding_offset": 2},
    }
)
_BLOOM: Preset = (
    _LAYER_NORMS
    | _TIED
    | {
        **{"vocab_size": 250880, "max_position_embeddings": 2048, "tanh_gelu": True},
        **{"position_embedding_type": "alibi", "embedding_layernorm": True},
    }
)

#                          layers, hidden, heads, kv heads, ffn
PRESETS: dict[str, Preset] = {
    "debug": _size(4, 128, 4, 2, 384) | {"max_position_embeddings": 2048},
    "gpt2": _GPT2 | _size(12, 768, 12, 12, 3072),
    "gpt2-medium": _GPT2 | _size(24, 1024, 16, 16, 4096),
    "gpt2-large": _GPT2 | _size(36, 1280, 20, 20, 5120),
    "gpt2-xl": _GPT2 | _size(48, 1600, 25, 25, 6400),
    "gpt3-175b": _GPT2 | _size(96, 12288, 96, 96, 49152) | {"max_position_embeddings": 2048},
    "llama2-7b": _LLAMA2 | _size(32, 4096, 32, 32, 11008),
    "llama2-13b": _LLAMA2 | _size(40, 5120, 40, 40, 13824),
    "llama2-70b": _LLAMA2 | _size(80, 8192, 64, 8, 28672),
    "llama3-8b": _LLAMA3 | _size(32, 4096, 32, 8, 14336),
    "llama3-70b": _LLAMA3 | _size(80, 8192, 64, 8, 28672),
    "llama3.1-8b": _LLAMA31 | _size(32, 4096, 32, 8, 14336),
    "llama3.1-70b": _LLAMA31 | _size(80, 8192, 64, 8, 28672),
    # 8 kv heads as in the paper; the first upload to Hugging Face had 16.
    "llama3.1-405b": _LLAMA31 | _size(126, 16384, 128, 8, 53248),
    "llama3.2-1b": _LLAMA32 | _size(16, 2048, 32, 8, 8192),
    "llama3.2-3b": _LLAMA32 | _size(28, 3072, 24, 8, 8192),
    "mistral-7b": _MISTRAL | _size(32, 4096, 32, 8, 14336),
    "qwen2.5-0.5b": _QWEN25_SMALL | _size(24, 896, 14, 2, 4864) | _32K,
    "qwen2.5-1.5b": _QWEN25_SMALL | _size(28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _QWEN25_SMALL | _size(36, 2048, 16, 2, 11008) | _32K,
    "qwen2.5-7b": _QWEN25 | _size(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _QWEN25_BIG | _size(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _QWEN25_BIG | _size(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _QWEN25_BIG | _size(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _QWEN3 | _TIED | _size(28, 1024, 16, 8, 3072),
    "qwen3-1.7b": _QWEN3 | _TIED | _size(28, 2048, 16, 8, 6144),
    "qwen3-4b": _QWEN3 | _TIED | _size(36, 2560, 32, 8, 9728),
    "qwen3-8b": _QWEN3 | _size(36, 4096, 32, 8, 12288),
    "qwen3-14b": _QWEN3 | _size(40, 5120, 40, 8, 17408),
    "qwen3-32b": _QWEN3 | _size(64, 5120, 64, 8, 25600),
    "gemma-2-2b": _GEMMA2 | _size(26, 2304, 8, 4, 9216) | _embedded(2304),
    "gemma-2-9b": _GEMMA2 | _size(42, 3584, 16, 8, 14336) | _embedded(3584),
    "gemma-2-27b": _GEMMA2
    | _size(46, 4608, 32, 16, 36864)
    | _embedded(4608)
    # query_pre_attn_scalar is 144 = hidden / heads, not the width of a head.
    | {"kv_channels": 128, "softmax_scale": 144**-0.5},
    "gemma-3-1b": _GEMMA3
    | _size(26, 1152, 4, 1, 6912)
    | _embedded(1152)
    | {"window_size": 512, "max_position_embeddings": 32768},
    "olmo-2-7b": _OLMO2 | _size(32, 4096, 32, 32, 11008),
    "olmo-2-13b": _OLMO2 | _size(40, 5120, 40, 40, 13824),
    # Its file says sliding_window 2047.
    "phi-3-mini-4k": _LLAMA2 | _size(32, 3072, 32, 32, 8192) | {"vocab_size": 32064, "window_size": 2047},
    "phi-4": _LLAMA2
    | _size(40, 5120, 40, 10, 17920)
    | {"vocab_size": 100352, "max_position_embeddings": 16384, "rotary_base": 250000.0},
    "granite-3.1-2b": _GRANITE
    | _size(40, 2048, 32, 8, 8192)
    | {"softmax_scale": 0.015625, "logit_scale": 1 / 8.0, "rotary_base": 5000000.0},
    "granite-3.1-8b": _GRANITE
    | _size(40, 4096, 32, 8, 12800)
    | {"softmax_scale": 0.0078125, "logit_scale": 1 / 16.0, "rotary_base": 10000000.0},
    "command-r-35b": _COMMAND
    | _size(40, 8192, 64, 64, 22528)
    | {"max_position_embeddings": 8192, "rotary_base": 8000000.0, "logit_scale": 0.0625},
    "command-r7b": _COMMAND
    | _size(32, 4096, 32, 8, 14336)
    | {"max_position_embeddings": 8192, "rotary_base": 50000.0, "logit_scale": 0.25}
    | {"window_size": 4096, "window_attn_skip_freq": "4", "no_rope_freq": "4"},
    "smollm3-3b": _TIED
    | _size(36, 2048, 16, 4, 11008)
    | {"vocab_size": 128256, "max_position_embeddings": 65536, "norm_epsilon": 1e-6, "rotary_base": 5000000.0}
    | {"no_rope_freq": "4"},
    "starcoder2-3b": _STARCODER2 | _size(30, 3072, 24, 2, 12288) | {"rotary_base": 999999.4420358813},
    "starcoder2-7b": _STARCODER2 | _size(32, 4608, 36, 4, 18432) | {"rotary_base": 1000000.0},
    "glm-4-9b": _GLM4 | _size(40, 4096, 32, 2, 13696) | {"norm_epsilon": 1.5625e-07, "max_position_embeddings": 8192},
    "glm-4-9b-0414": _GLM4
    | _size(40, 4096, 32, 2, 13696)
    | {"norm_placement": "sandwich", "max_position_embeddings": 32768},
    # Multi-query attention: one key/value head. Attention and MLP share a norm, unlike in the 40B model.
    "falcon-7b": _FALCON | _size(32, 4544, 71, 1, 18176) | {"parallel_residual_shared_norm": True},
    "falcon-40b": _FALCON | _size(60, 8192, 128, 8, 32768),
    "opt-125m": _OPT | _size(12, 768, 12, 12, 3072),
    "opt-6.7b": _OPT | _size(32, 4096, 32, 32, 16384),
    "bloom-560m": _BLOOM | _size(24, 1024, 16, 16, 4096),
    "bloom-7b1": _BLOOM | _size(30, 4096, 32, 32, 16384),
    #                                                              experts, of a token, their width
    "mixtral-8x7b": _MIXTRAL | _size(32, 4096, 32, 8, 14336) | _experts(8, 2, 14336),
    "mixtral-8x22b": _MIXTRAL
    | _size(56, 6144, 48, 8, 16384)
    | _experts(8, 2, 16384)
    | {"max_position_embeddings": 65536},
    "qwen1.5-moe-a2.7b": _QWEN2_MOE
    | _size(24, 2048, 16, 16, 5632)
    | _experts(60, 4, 1408, **_shared(5632))
    | {"max_position_embeddings": 8192},
    "qwen3-30b-a3b": _QWEN3 | _size(48, 2048, 32, 4, 6144) | _experts(128, 8, 768),
    "qwen3-235b-a22b": _QWEN3 | _size(94, 4096, 64, 4, 12288) | _experts(128, 8, 1536),
    "qwen3-next-80b-a3b": _QWEN3_NEXT | _size(48, 2048, 16, 2, 5120) | _experts(512, 10, 512, **_shared(512)),
    # norm_topk_prob is false, as of Qwen 2's.
    "olmoe-1b-7b": _size(16, 2048, 16, 16, 1024)
    | _experts(64, 8, 1024, moe_router_pre_softmax=True)
    | {"vocab_size": 50304, "max_position_embeddings": 4096, "norm_epsilon": 1e-5}
    | {"qk_layernorm": True, "qk_layernorm_across_heads": True},
    "glm-4.5-air": _GLM45
    | _size(46, 4096, 96, 8, 10944)
    | _experts(128, 8, 1408, moe_layer_freq="[0]*1+[1]*45", **_shared(1408)),
    "glm-4.5": _GLM45
    | _size(92, 5120, 96, 8, 12288)
    | _experts(160, 8, 1536, moe_layer_freq="[0]*3+[1]*89", **_shared(1536))
    | {"qk_layernorm": True, "moe_router_topk_scaling_factor": 2.5},
    # The dense first layers are in moe_layer_freq, here and below: 1 in V2, 3 in V3.
    "deepseek-v2-lite": _DEEPSEEK2
    | _size(27, 2048, 16, 16, 10944)
    | _experts(64, 6, 1408, moe_layer_freq="[0]*1+[1]*26", **_shared(2816)),
    "deepseek-v2": _DEEPSEEK2
    | _size(60, 5120, 128, 128, 12288)
    | _experts(160, 6, 1536, moe_layer_freq="[0]*1+[1]*59", **_shared(3072))
    | {"q_lora_rank": 1536, "moe_router_topk_scaling_factor": 16.0}
    | {"moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_router_group_score": "max"},
    "deepseek-v3": _DEEPSEEK
    | _size(61, 7168, 128, 128, 18432)
    | _experts(256, 8, 2048, moe_layer_freq="[0]*3+[1]*58", **_shared(2048))
    | {"vocab_size": 129280, "q_lora_rank": 1536, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 1.0}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    | {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5},
    "deepseek-v3.2": _DEEPSEEK
    | _size(61, 7168, 128, 128, 18432)
    | _experts(256, 8, 2048, moe_layer_freq="[0]*3+[1]*58", **_shared(2048))
    | {"vocab_size": 129280, "q_lora_rank": 1536, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 1.0}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    | {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5}
    | {"experimental_attention_variant": "dsa"},
    "glm-5": _size(78, 6144, 64, 64, 12288)
    | _experts(256, 8, 2048, moe_layer_freq="[0]*3+[1]*75", **_shared(2048))
    | {"vocab_size": 154880, "max_position_embeddings": 202752, "rotary_base": 1000000.0, "norm_epsilon": 1e-5}
    | {"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 512, "q_lora_rank": 2048}
    | {"qk_head_dim": 192, "v_head_dim": 256, "latent_norm_epsilon": 1e-6}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    | {"moe_router_topk_scaling_factor": 2.5, "experimental_attention_variant": "dsa"}
    | {"dsa_indexer_n_heads": 32, "dsa_indexer_rope_interleaved": True},
    "llama4-scout": _LLAMA4
    | _size(48, 5120, 40, 8, 16384)
    | _experts(16, 1, 8192, **_shared(8192))
    | {"max_position_embeddings": 10485760, "qk_l2_norm": True}
    | {"use_rope_scaling": True, "rope_scaling_factor": 16.0}
    | {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 1.0, "rope_original_max_position": 8192},
    # Experts in every second layer, and no norm of queries and keys.
    "llama4-maverick": _LLAMA4
    | _size(48, 5120, 40, 8, 16384)
    | _experts(128, 1, 8192, moe_layer_freq="[0,1]*24", **_shared(8192))
    | {"max_position_embeddings": 1048576},
    # Mamba-2 layers alone, without attention and MLPs.
    "mamba2-2.7b": _MAMBA2
    | _TIED
    | {"num_layers": 64, "hidden_size": 2560, "vocab_size": 50288, "mamba_num_groups": 1, "mamba_num_heads": 80}
    | {"hybrid_layer_pattern": "M" * 64},
    "mamba-codestral-7b": _MAMBA2
    | {"num_layers": 64, "hidden_size": 4096, "vocab_size": 32768, "mamba_num_groups": 8, "mamba_num_heads": 128}
    | {"hybrid_layer_pattern": "M" * 64},
    "granite-4.0-h-micro": _GRANITE4 | _size(40, 2048, 32, 8, 8192) | _granite4(64, 2048),
    "granite-4.0-h-tiny": _GRANITE4
    | _size(40, 1536, 12, 4, 512)
    | _granite4(128, 1536)
    | _experts(64, 6, 512, **_shared(1024)),
    "granite-4.0-h-small": _GRANITE4
    | _size(40, 4096, 32, 8, 768)
    | _granite4(128, 4096)
    | _experts(72, 10, 768, **_shared(1536)),
    "falcon-h1-0.5b": _FALCON_H1
    | _size(36, 1024, 8, 2, 2048)
    | {"vocab_size": 32784, "max_position_embeddings": 16384, "kv_channels": 64, "mamba_num_heads": 24}
    | {"softmax_scale": 64**-0.5 * 0.39062499999999994, "mamba_state_dim": 128, "mamba_rms_norm": False}
    | {"logit_scale": 0.0390625, "mlp_multipliers": "0.8838834764831844 0.5859375", "attention_out_multiplier": 0.9375}
    | {"ssm_out_multiplier": 0.23570226039551587}
    | _ssm(1.25, 0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738),
    "falcon-h1-7b": _FALCON_H1
    | _size(44, 3072, 12, 2, 12288)
    | {"vocab_size": 130049, "max_position_embeddings": 262144, "kv_channels": 128}
    | {"softmax_scale": 128**-0.5 * 0.030690398488999456, "logit_scale": 0.013020833333333334}
    | {"mamba_num_heads": 24, "mamba_head_dim": 128, "mamba_state_dim": 256, "ssm_out_multiplier": 0.11785113019775793}
    | {"mlp_multipliers": "0.2946278254943948 0.032552083333333336", "attention_out_multiplier": 0.10416666666666667}
    | _ssm(0.4166666666666667, 0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738),
    "nemotron-h-8b": _NEMOTRON_H
    | _size(52, 4096, 32, 8, 21504)
    | {"max_position_embeddings": 8192, "mamba_num_heads": 128, "hybrid_layer_pattern": _NEMOTRON_8B},
    "nemotron-3-nano-30b-a3b": _NEMOTRON_H
    | _size(52, 2688, 32, 2, 1856)
    | _experts(128, 6, 1856, **_shared(3712))
    | {"max_position_embeddings": 262144, "mamba_num_heads": 64, "hybrid_layer_pattern": _NANO_30B}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    | {"moe_router_topk_scaling_factor": 2.5},
    # Three layers of Kimi delta attention, then one of latent attention without positions; the
    # first layer has a dense MLP.
    "kimi-linear-48b-a3b": _size(27, 2304, 32, 32, 9216)
    | _experts(256, 8, 1024, moe_layer_freq="[0]*1+[1]*26", **_shared(1024))
    | {"vocab_size": 163840, "max_position_embeddings": 1048576, "norm_epsilon": 1e-5, "latent_norm_epsilon": 1e-6}
    | {"position_embedding_type": "none", "multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 512}
    | {"linear_attention_type": "kda", "linear_attention_freq": "[1,1,1,0]*6+[1,1,0]", "linear_num_key_heads": 32}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    | {"moe_router_topk_scaling_factor": 2.446},
    # Every fourth layer is attention without positions. It has norms after both parts, as OLMo 2;
    # layers with a gated delta net have them in front.
    "olmo-hybrid-7b": _size(32, 3840, 30, 30, 11008)
    | {"vocab_size": 100352, "norm_epsilon": 1e-6, "norm_placement": "post"}
    | {"qk_layernorm": True, "qk_layernorm_across_heads": True}
    | {"max_position_embeddings": 65536, "position_embedding_type": "none", "linear_attention_freq": "4"}
    | {"linear_attention_type": "gated_delta_net", "linear_num_key_heads": 30, "linear_num_value_heads": 30}
    | {"linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_allow_neg_eigval": True}
    | {"linear_norm_placement": "pre", "linear_norm_epsilon": 1e-5},
    "gpt-oss-20b": _GPT_OSS | _size(24, 2880, 64, 8, 2880) | _experts(32, 4, 2880),
    "gpt-oss-120b": _GPT_OSS | _size(36, 2880, 64, 8, 2880) | _experts(128, 4, 2880),
}
"""``--model`` name -> ``ModelConfig`` field -> value. ``debug`` leaves the vocabulary to the tokenizer."""
