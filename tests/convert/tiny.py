"""Tiny random models of every family, made by transformers, and what they compute."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

VOCAB = 99
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"max_position_embeddings": 128}
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA: dict[str, Any] = {**_SIZES, **_IDS, "intermediate_size": 64, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


_YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
_DEEPSEEK = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}


def _rope(kind: str = "default", theta: float | None = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **more}}


_MOE = {**_LLAMA, **_rope(), "num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_MOE |= {"tie_word_embeddings": False}
_GLM4_MOE: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
_GLM4_MOE |= {"use_qk_norm": True, "first_k_dense_replace": 1, "head_dim": 16}
_DEEPSEEK_MODEL: dict[str, Any] = {**_LLAMA, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "kv_lora_rank": 20}
_DEEPSEEK_MODEL |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "n_routed_experts": 8}
_DEEPSEEK_MODEL |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 2}
_DEEPSEEK_MODEL |= {"tie_word_embeddings": False, "routed_scaling_factor": 2.5}
_INDEXER: dict[str, Any] = {"q_lora_rank": 14, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 8}
_LLAMA32 = _rope("llama3", 500_000.0, **{**_LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192})

_LLAMA4: dict[str, Any] = {**_LLAMA, "head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 40}
_LLAMA4 |= {"num_local_experts": 8, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4, "pad_token_id": 0}
_LLAMA4 |= {"tie_word_embeddings": False}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**_LLAMA, **_rope(), "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {**_LLAMA, **_rope(), "tie_word_embeddings": False}),
    "llama3.1": ("Llama", {**_LLAMA, **_rope("llama3", **_LLAMA3), "tie_word_embeddings": False}),
    "llama3.2": ("Llama", {**_LLAMA, **_LLAMA32, "tie_word_embeddings": True}),
    "llama-bias": (
        "Llama",
        {**_LLAMA, **_rope(), "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-attention-bias": ("Llama", {**_LLAMA, **_rope(), "attention_bias": True}),
    "llama-mlp-bias": ("Llama", {**_LLAMA, **_rope(), "tie_word_embeddings": True, "mlp_bias": True}),
    "llama-dynamic": ("Llama", {**_LLAMA, **_rope("dynamic", factor=3.0), "max_position_embeddings": 24}),
    "llama-mqa": (
        "Llama",
        {
            **_LLAMA,
            **_rope(),
            "num_key_value_heads": 1,
            "head_dim": 10,
            "intermediate_size": 36,
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear": ("Llama", {**_LLAMA, **_rope("linear", factor=4.0), "tie_word_embeddings": False}),
    "mistral": ("Mistral", {**_LLAMA, **_rope(), "sliding_window": 7, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {**_LLAMA, **_rope(), "tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {**_LLAMA, **_rope(), "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_LLAMA, **_rope(), "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {**_LLAMA, **_rope("yarn", **_YARN), "tie_word_embeddings": False}),
    "qwen3-yarn": (
        "Qwen3",
        {**_LLAMA, **_rope("yarn", **_DEEPSEEK), "head_dim": 16, "tie_word_embeddings": True}
        | {"attention_bias": True},
    ),
    "mixtral": ("Mixtral", {**_LLAMA, **_rope(), "num_local_experts": 4, "sliding_window": 7}),
    "qwen2-moe": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 20, "num_experts_per_tok": 3}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**_MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0], "attention_bias": True},
    ),
    "olmoe": ("Olmoe", {**_MOE, "num_experts_per_tok": 3, "attention_bias": True}),
    "glm4-moe": ("Glm4Moe", {**_MOE, **_GLM4_MOE}),
    "glm4-moe-groups": (
        "Glm4Moe",
        {**_MOE, **_GLM4_MOE, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "attention_bias": True}
        | {"first_k_dense_replace": 0},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**_DEEPSEEK_MODEL, **_rope(), "q_lora_rank": None, "num_experts_per_tok": 3, "v_head_dim": 18},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**_DEEPSEEK_MODEL, **_rope("yarn", **_DEEPSEEK), "q_lora_rank": 14, "num_experts_per_tok": 3}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**_DEEPSEEK_MODEL, **_rope("yarn", **_DEEPSEEK), "q_lora_rank": 14, "num_experts_per_tok": 4}
        | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        {**_DEEPSEEK_MODEL, **_rope("yarn", **_DEEPSEEK), **_INDEXER, "num_experts_per_tok": 4}
        | {"n_group": 4, "topk_group": 2},
    ),
    "glm-5": (
        "GlmMoeDsa",
        {**_DEEPSEEK_MODEL, **_rope(), **_INDEXER, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5}
        | {"n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": (
        "GptOss",
        {**_LLAMA, **_rope("yarn", **{**_YARN, "truncate": False}), "head_dim": 16, "num_local_experts": 8}
        | {"num_experts_per_tok": 3, "sliding_window": 7, "swiglu_limit": 1.0, "num_hidden_layers": 3}
        | {"tie_word_embeddings": False, "intermediate_size": 64},
    ),
    "gpt-oss-mlp-bias": (
        "GptOss",
        {**_LLAMA, **_rope("yarn", **_YARN), "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 7, "tie_word_embeddings": False, "attention_bias": False},
    ),
    "llama4-scout": (
        "Llama4Text",
        {**_LLAMA4, **_rope("llama3", **{**_LLAMA3, "high_freq_factor": 1.0}), "no_rope_layer_interval": 2},
    ),
    "llama4-maverick": (
        "Llama4Text",
        {**_LLAMA4, **_rope(), "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "use_qk_norm": False}
        | {"attention_chunk_size": 12, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, **_IDS}),
    "gpt2-untied": (
        "GPT2",
        {
            **{"vocab_size": VOCAB, "n_positions": 130, "n_embd": 36, "n_layer": 3, "n_head": 4, "n_inner": 50, **_IDS},
            **{"activation_function": "gelu", "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
        },
    ),
    "neox": ("GPTNeoX", {**_SIZES, **_IDS, "intermediate_size": 128, **_rope(partial_rotary_factor=0.25)}),
    "neox-linear": (
        "GPTNeoX",
        {**_SIZES, **_IDS, "intermediate_size": 128, **_rope("linear", factor=2.0, partial_rotary_factor=0.5)},
    ),
    "neox-serial": (
        "GPTNeoX",
        {
            **_SIZES,
            **_IDS,
            "intermediate_size": 128,
            **_rope(partial_rotary_factor=0.5),
            "use_parallel_residual": False,
            "attention_bias": False,
        },
    ),
}
"""Name -> (their class without its ending, its configuration)."""


def _two_ropes(local: float, **full: Any) -> dict[str, Any]:
    """Of layers without a window, and with one."""
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 500.0, **full}}
    return {"rope_parameters": kinds | {"sliding_attention": {"rope_type": "default", "rope_theta": local}}}


_GEMMA: dict[str, Any] = {**_LLAMA, "head_dim": 16, "num_hidden_layers": 3, "query_pre_attn_scalar": 20}
_GEMMA |= {"sliding_window": 7, "tie_word_embeddings": True}
_COHERE: dict[str, Any] = {key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"}
_COHERE |= {"layer_norm_eps": 1e-3, "logit_scale": 0.25, **_rope()}
_GLM = {**_LLAMA, **_rope(partial_rotary_factor=0.5), "head_dim": 16, "pad_token_id": None}
_FALCON: dict[str, Any] = {**_SIZES, **_IDS, **_rope(), "ffn_hidden_size": 80, "hidden_dropout": 0.0}
_OPT: dict[str, Any] = {**_SIZES, **_IDS, "ffn_dim": 72, "pad_token_id": 0, "dropout": 0.0}
_FACTORS = {"short_factor": [1.0, 1.1, 1.5, 2.5], "long_factor": [1.0, 2.0, 4.0, 7.0]}
_LONGROPE: dict[str, Any] = {**_LLAMA, **_rope("longrope", **_FACTORS), "pad_token_id": 0}
_LONGROPE |= {"original_max_position_embeddings": 50}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {**_LLAMA, **_rope(), "head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**_GEMMA, **_rope(), "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3",
        {**_GEMMA, **_two_ropes(50.0, rope_type="linear", factor=8.0), "num_hidden_layers": 4}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
        | {"attention_bias": True},
    ),
    "olmo2": ("Olmo2", {**_LLAMA, **_rope(), "attention_bias": True}),
    "olmo3": ("Olmo3", {**_LLAMA, **_two_ropes(500.0, **_YARN, rope_type="yarn"), "sliding_window": 7}),
    "phi3": ("Phi3", {**_LLAMA, **_rope(partial_rotary_factor=0.5), "sliding_window": 9, "pad_token_id": 0}),
    "phi3-long": ("Phi3", {**_LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-long-factor": ("Phi3", {**_LONGROPE, **_rope("longrope", **_FACTORS, factor=3.0)}),
    "granite": (
        "Granite",
        {**_LLAMA, **_rope(), "embedding_multiplier": 3.0, "logits_scaling": 3.0, "residual_multiplier": 0.6}
        | {"attention_multiplier": 0.2, "tie_word_embeddings": True, "mlp_bias": True},
    ),
    "cohere": ("Cohere", _COHERE),
    "cohere2": (
        "Cohere2",
        {**_COHERE, "sliding_window": 7, "num_hidden_layers": 5, "layer_types": None, "attention_bias": True},
    ),
    "smollm3": (
        "SmolLM3",
        {**_LLAMA, **_rope(), "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "starcoder2": (
        "Starcoder2",
        {**_SIZES, **_IDS, **_rope(), "intermediate_size": 80, "num_key_value_heads": 2, "sliding_window": 9},
    ),
    "glm": ("Glm", _GLM),
    "glm4": ("Glm4", {**_GLM, "attention_bias": False}),
    "falcon": ("Falcon", _FALCON),
    "falcon-groups": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "opt": ("OPT", _OPT),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 36, "n_layer": 2, "n_head": 6, **_IDS}),
}
_HYBRID: dict[str, Any] = {**_LLAMA, **_rope(partial_rotary_factor=0.25), "head_dim": 16}
_HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "rms_norm_eps": 1.0}
_HYBRID |= {"linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]}
_HYBRID |= {"tie_word_embeddings": False}
_HYBRID_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_HYBRID_MOE |= {"shared_expert_intermediate_size": 20}
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next-moe": ("Qwen3Next", {**_HYBRID, **_HYBRID_MOE, "mlp_only_layers": [1], "linear_conv_kernel_dim": 3}),
    "qwen3.5": ("Qwen3_5Text", {**_HYBRID, "tie_word_embeddings": True}),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        {name: value for name, value in _HYBRID.items() if name != "intermediate_size"} | _HYBRID_MOE,
    ),
}
_MAMBA: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "tie_word_embeddings": True, **_IDS}
_MAMBA_HEADS: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 5}
_GRANITE: dict[str, Any] = {**_LLAMA, **_rope(), **_MAMBA_HEADS, "layer_types": ["mamba", "attention"]}
_GRANITE |= {"embedding_multiplier": 3.0, "logits_scaling": 3.0, "residual_multiplier": 0.6, "mamba_d_conv": 3}
_GRANITE |= {"attention_multiplier": 0.2, "shared_intermediate_size": 28, "rms_norm_eps": 0.3}
_FALCON_H1: dict[str, Any] = {**_LLAMA, **_rope(), **_MAMBA_HEADS, "mamba_d_ssm": 64, "mamba_d_conv": 3}
_FALCON_H1 |= {"rms_norm_eps": 0.3, "tie_word_embeddings": True, "head_dim": 16, "pad_token_id": None}
# Factors in front of projections are powers of two: behind them, where they are written, they round as before.
_FALCON_H1_FACTORS: dict[str, Any] = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7}
_FALCON_H1_FACTORS |= {"attention_in_multiplier": 2.0, "attention_out_multiplier": 0.6, "ssm_in_multiplier": 0.5}
_FALCON_H1_FACTORS |= {"ssm_out_multiplier": 0.8, "ssm_multipliers": [0.7, 1.5, 1.2, 0.8, 2.0]}
_FALCON_H1_FACTORS |= {"mlp_multipliers": [1.4, 0.6]}
_NEMOTRON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, **_IDS}
_NEMOTRON |= {"num_key_value_heads": 2, "intermediate_size": 52, "mamba_num_heads": 8, "mamba_head_dim": 6}
_NEMOTRON |= {"n_groups": 4, "ssm_state_size": 7, "layer_norm_epsilon": 0.3, "max_position_embeddings": 128}
# Widths of experts are multiples of 8: transformers' product of all experts in bf16 wants rows of 16 bytes.
STATE_SPACE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        {**_MAMBA, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 5}
        | {"layer_norm_epsilon": 0.3, "time_step_limit": [0.05, 0.9], "conv_kernel": 3}
        | {"tie_word_embeddings": False},  # tied and with random weights it says one word again and again
    ),
    "granite-hybrid": ("GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 0}),
    "granite-hybrid-moe": (
        "GraniteMoeHybrid",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"}
        | {"intermediate_size": 24},
    ),
    "falcon-h1": ("FalconH1", {**_FALCON_H1, **_FALCON_H1_FACTORS, "tie_word_embeddings": False}),
    "falcon-h1-norm": (
        "FalconH1",
        {**_FALCON_H1, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | {"time_step_limit": [0.05, 0.9], "mamba_conv_bias": True},
    ),
    "nemotron-h": ("NemotronH", {**_NEMOTRON, "hybrid_override_pattern": "M*-M"}),
    "nemotron-h-moe": (
        "NemotronH",
        {**_NEMOTRON, "hybrid_override_pattern": "ME*-", "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5},
    ),
}
_KIMI: dict[str, Any] = {**_IDS, "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": None}
_KIMI |= {"num_key_value_heads": 4, "intermediate_size": 52, "num_hidden_layers": 3, "kv_lora_rank": 10}
_KIMI |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "linear_num_heads": 4, "linear_head_dim": 6}
_KIMI |= {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24, "rms_norm_eps": 0.3}
_KIMI |= {"num_shared_experts": 2, "routed_scaling_factor": 2.5, "linear_conv_kernel_dim": 3}
_OLMO: dict[str, Any] = {**_IDS, "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": None}
_OLMO |= {"intermediate_size": 52, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_OLMO |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "rms_norm_eps": 0.3, "linear_conv_kernel_dim": 3}
_OLMO |= {"linear_key_head_dim": 10, "linear_value_head_dim": 5}  # transformers writes convolutions in equal parts
DELTA_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo-hybrid": ("OlmoHybrid", {**_OLMO, **_rope(theta=None)}),
    "olmo-hybrid-rope": (
        "OlmoHybrid",
        {**_OLMO, **_rope(), "linear_allow_neg_eigval": False, "num_key_value_heads": 2},
    ),
    "kimi-linear-moe": (
        "KimiLinear",
        {**_KIMI, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
}
TINY |= SCALED | HYBRID | STATE_SPACE | DELTA_RULES
"""Those with scales, caps, norms or layers of their own."""
SPARSE = ("deepseek-v3.2", "glm-5")
"""Those in which a token sees the keys that an indexer chooses."""
_WITH = ("mixtral", "gpt-oss", "deepseek", "llama4", "glm-5")
EXPERTS = [kind for kind in TINY if kind.startswith(_WITH) or "moe" in kind]
"""Those with experts."""


def their_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """All parameters drawn: theirs start with biases of 0 and norms of 1, which would hide what is left out."""
    import transformers

    name, settings = TINY[kind]
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**deepcopy(settings))  # some are changed there
    model_name = f"{name.removesuffix('Text')}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel"
    model = getattr(transformers, model_name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and parameter_name.endswith("weight")
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=generator)
    return model.to(dtype)


def save_theirs(kind: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """A Hugging Face folder written by transformers."""
    their_model(kind, dtype).save_pretrained(folder, max_shard_size=shard)
    if kind in _AUTHORS:
        _as_authors_do(folder, _AUTHORS[kind])
    return folder


_OLMO_NAMES = ((r"attention_layer_norm", "input_layernorm"), (r"feedforward_layer_norm", "post_attention_layernorm"))
_AUTHORS: dict[str, tuple[tuple[str, str], ...]] = {
    "kimi-linear-moe": ((r"\.block_sparse_moe\.(\w+_proj\.)", r".mlp.\1"),),
    **dict.fromkeys(("olmo-hybrid", "olmo-hybrid-rope"), _OLMO_NAMES),
}
"""Names that transformers writes, and those of the authors' files."""


def _as_authors_do(folder: Path, names: tuple[tuple[str, str], ...]) -> None:
    from safetensors.torch import load_file, save_file

    def renamed(text: str) -> str:
        for pattern, name in names:
            text = re.sub(pattern, name, text)
        return text

    for path in folder.glob("*.safetensors"):
        save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    for index in folder.glob("*.index.json"):
        index.write_text(renamed(index.read_text()))
