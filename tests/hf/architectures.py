"""A tiny model of every causal language model that the installed transformers has, built by rules on the names of the
fields of its configuration; exceptions are few and say why."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

VOCAB = 96
_SIZES = [
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (64, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner dff dim_ff d_inner"),
    (64, "intermediate_size_mlp feed_forward_size mamba_d_ssm dense_intermediate_size expert_ffn_hidden_size"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length"),
    (64, "original_max_position_embeddings prefix_dense_intermediate_size"),
    (32, "hidden_size d_model n_embd dim_model emb_dim embedding_size lru_width backbone_hidden_size embedding_dim"),
    (32, "hidden_size_global word_embed_proj_dim moe_latent_size attention_hidden_size out_hidden_size input_size"),
    (32, "input_embedding_size output_embedding_size moe_intermediate_size shared_expert_intermediate_size"),
    (32, "shared_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size"),
    (16, "kv_lora_rank q_lora_rank o_lora_rank v_head_dim hc_lowrank adapter_rank mamba_d_state state_size"),
    (16, "ssm_state_size router_hidden_size mamba_head_dim"),
    (8, "head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim"),
    (8, "linear_head_dim swa_head_dim kv_channels dim_head attention_head_size rotary_dim d_head chunk_size"),
    (8, "mamba_chunk_size block_size hidden_size_per_layer_input laurel_rank rel_extent d_rel indexer_head_dim"),
    (8, "query_pre_attn_scalar"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads swa_num_attention_heads"),
    (4, "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_key_heads"),
    (4, "linear_num_value_heads linear_num_heads mamba_num_heads mamba_n_heads n_mamba_heads index_n_heads"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts indexer_n_heads local_attention_window_len"),
    (4, "sliding_window sliding_window_size window_size attention_window_size local_attention zero_expert_num"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads indexer_kv_heads num_experts_per_tok"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth"),
    (2, "num_decoder_layers num_blocks num_layers_per_stack moe_topk moe_k moe_top_k top_k_experts index_topk"),
    (1, "n_group topk_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace num_dense_layers"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts bos_token_id decoder_start_token_id"),
    (0, "pad_token_id num_mtp_layers num_nextn_predict_layers"),
    (2, "eos_token_id"),
    (True, "is_decoder"),
]
_RULES = {name: value for value, names in _SIZES for name in names.split()}
_PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 16},  # as it is, one table has 96 million numbers
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "jamba": _MAMBA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "qwen4_exp_text": {"indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_kv_heads": 1},
    "recurrent_gemma": {"block_types": ("recurrent", "attention")},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96},
    "xlstm": {"num_heads": 2, "chunk_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": None, "num_hidden_layers": 8, "attention_hidden_size": None},
    "zaya": {"num_experts_per_tok": 1},
}

DOUBLE = ("gemma4", "gemma4_unified_text")
"""Compared in fp64: they amplify rounding. Half a unit in the last place of the last one's weights moves its fp32
gradients by 1.5e-5, and its own, in one process, are 1.2e-5 from those in fp64."""


def tiny(kind: Any) -> Any:
    """A configuration of the class ``kind`` with small sizes, one layer of each kind that the defaults have, no
    dropout."""
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {name: _RULES[name] for name in fields if name in _RULES}
    values |= {name: 0.0 for name, value in fields.items() if isinstance(value, float) and _is_noise(name)}
    default = kind()
    lists = {name: list(value) for name in _PATTERNS if name in fields and (value := getattr(default, name, None))}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True)))
    if kinds:
        kinds += kinds[-1:] * (2 - len(kinds))
        values |= dict(zip(lists, map(list, zip(*kinds, strict=True)), strict=True))
        values |= {name: len(kinds) for name in _LAYERS if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]  # multi-latent attention
    values |= {name: tiny(type(getattr(default, name))) for name in kind.sub_configs if getattr(default, name, None)}
    return kind(**values | _OWN.get(kind.model_type, {}))


def _is_noise(name: str) -> bool:
    return any(part in name for part in ("drop", "jitter")) and "token" not in name


def architectures() -> dict[str, str]:
    """Model type -> class, of all causal language models that transformers lists."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type: str) -> Any:
    """With random weights, equal on every rank; biases and norms are not what they start with."""
    import transformers

    model_class = getattr(transformers, architectures()[model_type])
    torch.manual_seed(5)
    model = model_class(tiny(model_class.config_class))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return (model.double() if model_type in DOUBLE else model).train()
