"""Megatron's GPT: names of its tensors, and its arguments as smp's settings and back. No torch here.

Sources: ``megatron/core/models/gpt`` and ``megatron/core/transformer`` of megatron-core 0.16, Megatron-LM's
``arguments.py`` and ``checkpointing.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import no_rope, windowed, with_experts
from smp.convert.huggingface.config import architecture, resolved_external
from smp.convert.layout import Fused, Link, Table, links

_ENDS = {
    "embedding": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "head": "output_layer",
}
# Names with a final underscore: Transformer Engine's layer_norm_weight is a tensor of the linear
# layer.
_BLOCK: dict[str, str | Fused] = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "attention.query": Fused("self_attention.linear_qkv", "per_group", "query"),
    "attention.key": Fused("self_attention.linear_qkv", "per_group", "key"),
    "attention.value": Fused("self_attention.linear_qkv", "per_group", "value"),
    "attention.query_norm": "self_attention.q_layernorm",
    "attention.key_norm": "self_attention.k_layernorm",
    "attention.output": "self_attention.linear_proj",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
    "mlp.down": "mlp.linear_fc2",
}
_PLAIN: dict[str, str | Fused] = {"mlp.up": "mlp.linear_fc1"}
# fc1 is gate above up.
_GATED: dict[str, str | Fused] = {
    "mlp.gate": Fused("mlp.linear_fc1", "halves", "gate"),
    "mlp.up": Fused("mlp.linear_fc1", "halves", "up"),
}
_EXPERTS: dict[str, str | Fused] = {
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.router": "mlp.router",
    "mlp.experts.down": "mlp.experts.experts.linear_fc2.weight",
    "mlp.shared_experts.down": "mlp.shared_experts.linear_fc2",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}
_PLAIN_EXPERTS: dict[str, str | Fused] = {
    "mlp.experts.up": "mlp.experts.experts.linear_fc1.weight",
    "mlp.shared_experts.up": "mlp.shared_experts.linear_fc1",
}
_GATED_EXPERTS: dict[str, str | Fused] = {
    "mlp.experts.gate": Fused("mlp.experts.experts.linear_fc1.weight", "halves", "gate"),
    "mlp.experts.up": Fused("mlp.experts.experts.linear_fc1.weight", "halves", "up"),
    "mlp.shared_experts.gate": Fused("mlp.shared_experts.linear_fc1", "halves", "gate"),
    "mlp.shared_experts.up": Fused("mlp.shared_experts.linear_fc1", "halves", "up"),
}
RENAMED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms by Transformer Engine's names, which the table has, and by the names of local layers."""


def megatron_links(config: ModelConfig, padded: int) -> list[Link]:
    """Links for a model whose vocabulary is padded to ``padded`` rows in the files."""
    if config.num_experts is not None:
        kind = _EXPERTS | (_GATED_EXPERTS if config.swiglu else _PLAIN_EXPERTS)
    else:
        kind = _GATED if config.swiglu else _PLAIN
    table = Table("decoder.layers.{}.", _BLOCK | kind, _ENDS)
    vocabulary = ("embedding.weight", "head.weight")
    found = links(table, config)
    # Padding concerns the vocabulary's matrices only.
    return [replace(link, padded=padded) if link.smp_name in vocabulary else link for link in found]


_NEEDED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings"),
    *("position_embedding_type", "normalization", "untie_embeddings_and_output_weights"),
)
"""Megatron's arguments that are settings of the same name. Each must be there."""
_OPTIONAL: dict[str, Any] = {
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "swiglu": False,
    "squared_relu": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "apply_layernorm_1p": False,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
}
"""Arguments that are settings of the same name, with Megatron's default for versions that lack them."""
_OF_EXPERTS: dict[str, Any] = {
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
"""Arguments about experts that are settings of the same name, with Megatron's defaults."""
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "moe_expert_capacity_factor": (),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (),
    "moe_router_topk_limited_devices": (),
    "multi_latent_attention": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "heterogeneous_layers_config_path": (),
    "mtp_num_layers": (0,),
    "qk_l2_norm": (False,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (),
    "hybrid_layer_pattern": (),
    "softmax_type": ("vanilla",),
    "softmax_scale": (),
    "attention_output_gate": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (),
    "quick_geglu": (False,),
    "experimental_attention_variant": (),
    "linear_attention_freq": (),
    "use_mup": (False,),
    "enable_mhc_connections": (False,),
}
"""Values with which smp's decoder computes the same. None counts as absent."""
_NOT_THERE = (
    *("position_embedding_offset", "rotary_base_local", "layernorm_bias", "norm_placement", "embedding_layernorm"),
    *("geglu", "relu", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale"),
    *("embedding_multiplier", "residual_multiplier", "parallel_residual", "qk_layernorm_across_heads"),
    *(
        "add_attention_output_bias",
        "add_mlp_bias",
        "multi_latent_attention",
        "moe_router_group_score",
        "quick_geglu",
        "softmax_type",
    ),
    *("linear_attention_type", "attention_output_gate", "hybrid_layer_pattern", "mlp_multipliers"),
    *("mtp_num_layers", "attention_chunk_size", "qk_l2_norm", "attn_temperature_tuning", "moe_apply_probs_on_input"),
)
"""Settings that Megatron's GPT, as its own scripts run it, has with their default value only."""


def from_args(args: Mapping[str, Any], where: str, padded_vocab: int, vocab_size: int | None = None) -> ModelConfig:
    """Settings of the model that Megatron's arguments describe, resolved.

    Args:
        args: of the run that saved.
        where: for messages.
        padded_vocab: rows of the embedding in the files.
        vocab_size: number of token ids; None: what the arguments say, or else all rows.

    Raises:
        ConfigError: an argument is missing, or has a value that smp's decoder does not compute.
    """
    # Features that smp's decoder lacks, or computes from other tensors.
    for name, allowed in _MUST_BE.items():
        if args.get(name) is not None and args[name] not in allowed:
            raise ConfigError(f"{where}: a model with {name} {args[name]} is not supported")
    norm = args.get("normalization")
    if args.get("qk_layernorm") and norm != "RMSNorm":
        raise ConfigError(f"{where}: a model with qk_layernorm and normalization {norm} is not supported")
    missing = [name for name in _NEEDED if name not in args]
    if missing:
        raise ConfigError(f"{where}: its arguments do not say {', '.join(missing)}")
    values = {name: args[name] for name in _NEEDED}
    values |= {name: args.get(name, default) for name, default in _OPTIONAL.items()}
    values |= _experts_of(args, where)
    bias = bool(args.get("add_bias_linear", True))
    # Neither SwiGLU nor squared ReLU: GELU.
    plain = not values["swiglu"] and not values["squared_relu"]
    # Megatron's --rotary-seq-len-interpolation-factor is linear scaling.
    linear = args.get("rotary_seq_len_interpolation_factor") or 1
    if linear != 1:
        if values["use_rope_scaling"]:
            both = f"use_rope_scaling and rotary_seq_len_interpolation_factor {linear}"
            raise ConfigError(f"{where}: a model with {both} is not supported")
        values |= {"use_rope_scaling": True, "rope_scaling_type": "linear", "rope_scaling_factor": linear}
    tanh = args.get("openai_gelu", False) or (
        bias and args.get("bias_gelu_fusion", False)
    )  # the fused kernel computes the tanh approximation
    window = args.get("window_size")
    # (left, right): right 0 or -1 is causal.
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2 or window[1] not in (0, -1)):
        raise ConfigError(f"{where}: a model with window_size {window} is not supported")
    grouped = args.get("group_query_attention", False)
    values |= {
        # Without grouped queries num_query_groups is an unused default.
        "num_query_groups": args.get("num_query_groups") if grouped else values["num_attention_heads"],
        "norm_epsilon": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
        "disable_bias_linear": not bias,
        "tanh_gelu": bool(plain and tanh),
        # Megatron counts the tokens before a token, this project the token itself, too.
        "window_size": None if window is None or window[0] < 0 else window[0] + 1,
        "window_attn_skip_freq": _pattern_text(args.get("window_attn_skip_freq")),
        "no_rope_freq": _pattern_text(args.get("no_rope_freq")),
        # Never more token ids than there are rows.
        "vocab_size": vocab_size or min(said_vocab_size(args) or padded_vocab, padded_vocab),
    }
    return resolved_external(values, where)


def _pattern_text(value: Any) -> str | None:
    """A number or a list in the form of --window-attn-skip-freq and --no-rope-freq."""
    return None if value is None or value == 0 else str(value).replace(" ", "")


def _experts_of(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not args.get("num_experts"):
        return {}
    # Only sinkhorn changes what the router computes; other balancing affects training.
    balancing, layers = args.get("moe_router_load_balancing_type"), args.get("moe_layer_freq", 1)
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        raise ConfigError(f"{where}: a router balanced by sinkhorn is not supported")
    if layers != 1 and not (isinstance(layers, list) and all(layer == 1 for layer in layers)):
        raise ConfigError(
            f"{where}: a model with moe_layer_freq {layers} is not supported, only experts in every layer"
        )
    if args.get("add_bias_linear", True):
        raise ConfigError(f"{where}: a model with experts that have biases (add_bias_linear) is not supported")
    return {"num_experts": args["num_experts"]} | {name: args.get(name, value) for name, value in _OF_EXPERTS.items()}


def said_vocab_size(args: Mapping[str, Any]) -> int | None:
    """The number of token ids according to the arguments. NullTokenizer's may be off by one, depending on the version,
    and counts as unknown."""
    size = args.get("vocab_size")
    return size if type(size) is int and size > 0 and args.get("tokenizer_type") != "NullTokenizer" else None


def to_args(config: ModelConfig, tp: int) -> Namespace:
    """Megatron's arguments for a model, as far as they decide what its weights mean.

    Raises:
        ConfigError: Megatron's GPT does not compute what this model does.
    """
    c = config
    _refuse_what_megatron_lacks(c)
    linear = _scales_linearly(c)
    values = {name: getattr(c, name) for name in (*_NEEDED, *_OPTIONAL)}
    if linear:
        # Linear scaling has its own argument; Megatron's use_rope_scaling is Llama 3's.
        values |= {name: _OPTIONAL[name] for name in ("use_rope_scaling", "rope_scaling_factor")}
    values |= {
        "rotary_seq_len_interpolation_factor": int(c.rope_scaling_factor) if linear else None,
        "group_query_attention": c.num_query_groups != c.num_attention_heads,
        "num_query_groups": c.num_query_groups,
        "norm_epsilon": c.norm_epsilon,
        "add_bias_linear": not c.disable_bias_linear,
        "openai_gelu": c.tanh_gelu,
        # Megatron's fused bias + GELU is the tanh one.
        "bias_gelu_fusion": c.tanh_gelu and not c.disable_bias_linear,
        # This project counts the token itself.
        "window_size": None if c.window_size is None else (c.window_size - 1, 0),
        **_patterns(c),
        "vocab_size": c.vocab_size,
        "padded_vocab_size": padded_vocab(config, tp),
        "make_vocab_size_divisible_by": c.make_vocab_size_divisible_by,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "seq_length": c.max_position_embeddings,
        **_args_of_experts(c),
    }
    # Read back before anything is written: an argument that only one of the directions knows would change the model.
    assert architecture(from_args(values, "", values["padded_vocab_size"])) == architecture(c), "a table is one-sided"
    return Namespace(**values)


def _scales_linearly(config: ModelConfig) -> bool:
    """Whether RoPE is scaled by one factor, for which Megatron has an argument of its own."""
    return config.use_rope_scaling and config.rope_scaling_type == "linear"


def _refuse_what_megatron_lacks(config: ModelConfig) -> None:
    """Raise ConfigError with the flag for a setting that Megatron's GPT has with one value only."""
    c, default = config, ModelConfig()
    if c.scalar_head:
        raise ConfigError("Megatron's GPT has no head of scores: a reward model cannot be written for it")
    if c.position_embedding_type == "alibi":
        raise ConfigError(
            "Megatron's GPT has no --position-embedding-type alibi: these weights cannot be written for it"
        )
    # Each of these must be at its default.
    refused: dict[str, Any] = {name: getattr(default, name) for name in _NOT_THERE}
    if c.qk_layernorm:
        refused["normalization"] = "RMSNorm"  # there the norm of queries and keys is of the same kind as the others
    if _scales_linearly(c):
        refused["rope_scaling_factor"] = int(c.rope_scaling_factor)  # there it is a whole number
    elif c.use_rope_scaling:
        refused["rope_scaling_type"] = "llama3"
        scaling = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position")
        refused |= {name: getattr(default, name) for name in scaling}
    for name, only in refused.items():
        if getattr(c, name) != only:
            flag = f"--{name.replace('_', '-')} {getattr(c, name)}"
            where = " with --qk-layernorm" if name == "normalization" else ""
            raise ConfigError(f"Megatron's GPT has no {flag}{where}: these weights cannot be written for it")


def _args_of_experts(config: ModelConfig) -> dict[str, Any]:
    """Megatron's arguments for experts; empty without experts. Raises ConfigError for experts that Megatron's GPT has
    in another form."""
    if config.num_experts is None:
        return {}
    if not config.disable_bias_linear:
        raise ConfigError("--no-disable-bias-linear: experts with biases are not written for Megatron's GPT")
    if not all(with_experts(config)):
        raise ConfigError(
            f"--moe-layer-freq {config.moe_layer_freq}: only models with experts in every layer are written"
        )
    return {name: getattr(config, name) for name in ("num_experts", *_OF_EXPERTS)} | {"moe_layer_freq": 1}


def _patterns(config: ModelConfig) -> dict[str, Any]:
    """The layers with a window and with RoPE, as lists: a number would have to divide the layers in Megatron."""
    windows, skipped = list(map(int, windowed(config))), list(map(int, no_rope(config)))
    return {
        "window_attn_skip_freq": windows if 0 in windows and 1 in windows else None,
        "no_rope_freq": skipped if 0 in skipped and 1 in skipped else None,
    }


def padded_vocab(config: ModelConfig, tp: int) -> int:
    """Rows of the embedding that Megatron expects with ``tp`` tensor-parallel ranks."""
    assert config.vocab_size is not None
    multiple = config.make_vocab_size_divisible_by * tp
    return -(-config.vocab_size // multiple) * multiple
