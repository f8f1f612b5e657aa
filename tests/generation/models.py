"""Small models of every kind of attention and positions, with weights that say something."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
SIZES |= {"kv_channels": 8, "ffn_hidden_size": 64, "vocab_size": 50, "max_position_embeddings": 40}
SIZES |= {"make_vocab_size_divisible_by": 2, "init_method_std": 0.3}
GPT2 = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False}
LATENT: dict[str, Any] = {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 10, "kv_lora_rank": 12}
LATENT |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 7, "kv_channels": 10, "num_query_groups": 4}
MODELS = {
    "rope": SIZES,
    "latent": SIZES | LATENT,
    "dsa": SIZES
    | LATENT
    | {
        **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6, "dsa_indexer_head_dim": 8},
        **{"dsa_indexer_topk": 5, "num_experts": 4, "moe_ffn_hidden_size": 24},
    },
    "window": SIZES | {"window_size": 5},
    "longrope": SIZES  # the text grows past 22 tokens, also where it goes through in pieces
    | {
        **{"use_rope_scaling": True, "rope_scaling_type": "longrope", "rope_original_max_position": 22},
        **{"longrope_short_factor": "1 1 1.5 2", "longrope_long_factor": "1 2 4 8"},
    },
    "dynamic": SIZES  # all frequencies change with every token from the 19th on
    | {
        **{"use_rope_scaling": True, "rope_scaling_type": "dynamic", "rope_original_max_position": 18},
        **{"rope_scaling_factor": 3.0},
    },
    "learned positions": SIZES | GPT2,
    "gemma": SIZES
    | {
        **{"apply_layernorm_1p": True, "norm_placement": "sandwich", "swiglu": False, "geglu": True},
        **{"attn_logit_softcapping": 2.0, "window_size": 5, "window_attn_skip_freq": "2", "rotary_base_local": 50.0},
    },
    "gpt-oss": SIZES
    | {
        **{"softmax_type": "learnable", "window_size": 5, "window_attn_skip_freq": "2", "disable_bias_linear": False},
        **{"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
        **{"num_experts": 4, "moe_ffn_hidden_size": 24},
    },
    "llama4": SIZES
    | {
        **{"rotary_interleaved": True, "no_rope_freq": "2", "attention_chunk_size": 6, "qk_l2_norm": True},
        **{"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5},
        **{"num_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 24, "moe_apply_probs_on_input": True},
        **{"moe_router_score_function": "sigmoid"},
    },
    "olmo": SIZES | {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True},
    "command": SIZES | {"rotary_interleaved": True, "no_rope_freq": "2", "logit_scale": 2.0},
    "bloom": SIZES | GPT2 | {"position_embedding_type": "alibi", "embedding_layernorm": True},
    "hybrid": SIZES
    | {
        **{"linear_attention_type": "gated_delta_net", "linear_attention_freq": "2", "num_layers": 3},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 5, "attention_output_gate": True, "qk_layernorm": True, "norm_epsilon": 0.3},
    },
    "kimi": SIZES
    | LATENT
    | {
        **{"linear_attention_type": "kda", "linear_attention_freq": "2", "num_layers": 3, "norm_epsilon": 0.3},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 6, "position_embedding_type": "none", "latent_norm_epsilon": 0.1},
    },
    "mamba": SIZES
    | {
        **{"linear_attention_type": "mamba2", "linear_attention_freq": "2", "num_layers": 3, "norm_epsilon": 0.3},
        **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 6, "mamba_state_dim": 5},
    },
    "falcon h1": SIZES
    | {
        **{"linear_attention_type": "mamba2", "linear_attention_parallel": True, "mamba_rms_norm": False},
        **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 6, "mamba_state_dim": 5},
        **{"ssm_multipliers": "0.7 1.5 1.2 0.8 2", "mlp_multipliers": "1.4 0.6", "norm_epsilon": 0.3},
    },
    "nemotron": SIZES
    | {
        **{"hybrid_layer_pattern": "M*-ME", "num_layers": 5, "swiglu": False, "squared_relu": True, "num_experts": 4},
        "moe_ffn_hidden_size": 24,
        **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 6, "mamba_state_dim": 5},
        **{"norm_epsilon": 0.3, "position_embedding_type": "none"},
    },
    # wide enough for weights in 4 bits
    "wide": SIZES | {"hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 256, "init_method_std": 0.1},
    "opt": SIZES | GPT2 | {"position_embedding_offset": 2, "relu": True},
}
