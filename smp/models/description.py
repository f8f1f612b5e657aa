"""A model's architecture in one line, which a run prints first, so that a wrong model is noticed before it trains."""

from __future__ import annotations

import json
from collections import Counter

from smp.config import ModelConfig
from smp.config.layer_pattern import attends, has_mlp, linear, no_rope, windowed
from smp.config.layer_specs import Recurrence
from smp.config.layers import layer_specs, mixer_kinds
from smp.models.arithmetic import count_parameters


def describe_model(model: ModelConfig) -> str:
    """One line about a resolved model: sizes, what its parts are, and the number of parameters."""
    if model.is_foreign:
        return _foreign(model)
    vocab, ffn, dropout = model.vocab_size, model.ffn_hidden_size, max(model.hidden_dropout, model.attention_dropout)
    assert vocab is not None and ffn is not None, "resolved before"
    parts = [
        f"{model.num_layers} {'parallel ' if model.parallel_residual else ''}blocks of width {model.hidden_size:,}",
        *([_heads(model)] if any(attends(model)) and _registered(model).total() < model.num_layers else []),
        *(f"in {count} of {model.num_layers} layers a {text}" for text, count in _registered(model).items()),
        *([_recurrence(model)] if any(linear(model)) else []),
        _norms(model),
        *([_positions(model)] if any(attends(model)) or model.position_embedding_type != "rope" else []),
        *([f"{_activation(model)} MLP of {ffn:,}{_some(model, has_mlp(model))}"] if any(has_mlp(model)) else []),
        *([_experts(model)] if model.num_experts is not None else []),
        _biases(model),
        f"{_ends(model)} of {vocab:,} token ids",
        f"dropout {dropout}" if dropout else "no dropout",
    ]
    return f"model: {', '.join(parts)}: {count_parameters(model, vocab).total:,} parameters"


def _foreign(model: ModelConfig) -> str:
    content = json.loads(model.transformers_config or "{}")
    assert model.vocab_size is not None, "resolved before"
    return (
        f"model: {content.get('model_type')} as transformers computes it, {model.num_layers} blocks of width "
        f"{model.hidden_size:,}, {_ends(model)} of {model.vocab_size:,} token ids, no dropout: "
        f"{count_parameters(model, model.vocab_size).total:,} parameters"
    )


def _ends(model: ModelConfig) -> str:
    if model.scalar_head:
        return "a head of scores, embeddings"
    return f"{'untied' if model.untie_embeddings_and_output_weights else 'tied'} embeddings"


def _heads(model: ModelConfig) -> str:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.multi_latent_attention:
        return _latent_heads(model)
    text = f"{heads} heads of {model.kv_channels}{_some(model, attends(model))}"
    text += f" on {groups} of keys and values" if groups != heads else ""
    if model.qk_layernorm:
        text += ", with a norm over all" if model.qk_layernorm_across_heads else ", each with a norm"
    if model.window_size is not None:
        windows = windowed(model)
        some = "" if all(windows) else f" in {sum(windows)} of {len(windows)} layers"
        text += f" that see {model.window_size:,} tokens{some}"
    text += _of_rope_layers(model)
    text += ", with sinks" if model.softmax_type == "learnable" else ""
    text += ", gated" if model.attention_output_gate else ""
    return text + (f", scores within +-{model.attn_logit_softcapping:g}" if model.attn_logit_softcapping else "")


def _recurrence(model: ModelConfig) -> str:
    """Description of the layers with a linear recurrence, each kind once."""
    # Without the layers of multi-token prediction, which the counts of the other parts leave out too.
    layers = layer_specs(model)[: model.num_layers]
    found = Counter(str(mixer) for spec in layers for mixer in spec.mixers if isinstance(mixer, Recurrence))
    both = " next to attention" if model.linear_attention_parallel else ""
    return " and ".join(f"in {count} of {model.num_layers} layers a {text}{both}" for text, count in found.items())


def _registered(model: ModelConfig) -> Counter[str]:
    """Layers whose mixer is of a kind that only --layer-types names, by what it says of itself."""
    if model.layer_types is None:
        return Counter()
    named = zip(mixer_kinds(model), layer_specs(model), strict=False)  # without layers of multi-token prediction
    return Counter(str(spec.mixer) for kind, spec in named if kind != "attention")


def _of_rope_layers(model: ModelConfig) -> str:
    """Description of attention settings that only layers with RoPE, or only layers without it, have."""
    count = no_rope(model).count(False)
    some = "" if count == model.num_layers else f" in {count} of {model.num_layers} layers"
    text = f", each divided by its L2 norm{some}" if model.qk_l2_norm else ""
    if model.attention_chunk_size is not None:
        text += f" that see chunks of {model.attention_chunk_size:,} tokens{some}"
    # Llama 4: temperature tuning is for the layers without RoPE.
    others = model.num_layers - count
    return text + (f", queries growing with positions in {others} layers" if model.attn_temperature_tuning else "")


def _norms(model: ModelConfig) -> str:
    where = {"pre": "", "post": " after attention and MLP", "sandwich": " before and after attention and MLP"}
    shared = " for both" if model.parallel_residual_shared_norm else ""
    counted = " counted from 1" if model.apply_layernorm_1p else ""
    text = f"{model.normalization}{counted}{where[model.norm_placement]}{shared}"
    if model.linear_norm_placement in (None, model.norm_placement):
        return text
    # The same words about the recurrence ("it") instead of attention.
    there = where[model.linear_norm_placement].replace("attention", "it") or " before both parts"
    return f"{text} (in layers with a recurrence{there})"


def _latent_heads(model: ModelConfig) -> str:
    text = f"{model.num_attention_heads} heads of {model.qk_head_dim} + {model.qk_pos_emb_head_dim} (values of "
    text += f"{model.v_head_dim}) on {model.kv_lora_rank} latent numbers"
    text += f", queries on {model.q_lora_rank}" if model.q_lora_rank is not None else ""
    text += ", with norms" if model.qk_layernorm else ""
    text += _some(model, attends(model))
    return text + (f", that see {model.window_size:,} tokens" if model.window_size is not None else "")


def _some(model: ModelConfig, which: tuple[bool, ...]) -> str:
    """The text "in n of m layers" for hybrids whose layers have one part each; empty for other models."""
    return "" if model.hybrid_layer_pattern is None else f" in {sum(which)} of {model.num_layers} layers"


def _experts(model: ModelConfig) -> str:
    shared = model.moe_shared_expert_intermediate_size
    shared_one = "" if shared is None else f" and a shared one of {shared:,}"
    weighed = " of weighted inputs" if model.moe_apply_probs_on_input else ""
    experts = f"{model.moe_router_topk} of {model.num_experts} experts of {model.moe_ffn_hidden_size:,}"
    return f"{experts}{weighed}{shared_one}"


def _positions(model: ModelConfig) -> str:
    if model.position_embedding_type == "learned_absolute":
        return f"{model.max_position_embeddings:,} learned positions"
    if model.position_embedding_type == "alibi":
        return "ALiBi"
    if model.position_embedding_type == "none":
        return "no positions"
    part = "" if model.rotary_percent == 1 else f" on {model.rotary_channels} channels"
    factor = model.rope_scaling_factor
    if model.rope_scaling_type == "longrope":
        # LongRoPE has a factor for each channel: what can be said in one number is how far the context grows.
        factor = model.max_position_embeddings / model.rope_original_max_position
    scaling = f", {model.rope_scaling_type} scaling by {factor:g}" if model.use_rope_scaling else ""
    skipped, local = no_rope(model), ""
    if model.rotary_base_local is not None:
        # The local base is that of layers with a window; those without RoPE have no base at all.
        own = sum(window and not skips for window, skips in zip(windowed(model), skipped, strict=True))
        local = f"; {model.rotary_base_local:g} in {own} layers"
    without = f", none in {sum(skipped)} layers" if any(skipped) else ""
    name = "interleaved RoPE" if model.rotary_interleaved else "RoPE"
    return f"{name}{part} (base {model.rotary_base:g}{scaling}{local}){without}"


def _activation(model: ModelConfig) -> str:
    if model.swiglu:
        return "SwiGLU"
    if model.quick_geglu:
        return "quick GEGLU" if model.activation_func_clamp_value is None else "clamped quick GEGLU"
    if model.geglu:
        return "tanh-GEGLU" if model.tanh_gelu else "GEGLU"
    if model.relu:
        return "ReLU"
    return "squared-ReLU" if model.squared_relu else "tanh-GELU" if model.tanh_gelu else "GELU"


def _biases(model: ModelConfig) -> str:
    if not model.disable_bias_linear:
        return "biases"
    named = {
        "queries, keys and values": model.add_qkv_bias,
        "attention's output": model.add_attention_output_bias,
        "MLPs": model.add_mlp_bias,
    }
    biased = " and on ".join(name for name, has in named.items() if has)
    return f"biases on {biased}" if biased else "no biases"
