"""Architectures of transformers with delta rules of their own: names of their tensors, and what their ``config.json``
say under keys of their own. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import linear, skip_pattern, with_experts
from smp.convert.huggingface.experts import read_experts, write_experts
from smp.convert.huggingface.families import (
    ATTENTION_BIAS,
    LATENT_FIELDS,
    LATENT_MODULES,
    LLAMA_DEFAULTS,
    LLAMA_ENDS,
    LLAMA_FIELDS,
    LLAMA_FIXED,
    LLAMA_MODULES,
    NO_BIAS,
    QK_MODULES,
)
from smp.convert.huggingface.family import ExpertKeys, Family, Own
from smp.convert.huggingface.reader import Reader
from smp.convert.layout import Fused, Table

Values = Mapping[str, Any]
KINDS = ("full_attention", "linear_attention")


def read_kinds(reader: Reader, kinds: Any, layers: int) -> list[bool]:
    """Whether each layer has the recurrence, from a list of ``KINDS``."""
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in KINDS for kind in kinds):
        raise ConfigError(f"{reader.where}: layer_types {kinds!r} is not one of {', '.join(KINDS)} for each layer")
    # False and True index ``KINDS``.
    return [kind == KINDS[True] for kind in kinds]


# transformers' keys; the files of Kimi Linear's authors have other names, below.
_KIMI_EXPERTS = ExpertKeys("num_experts", "first_k", "multiple", "sigmoid", own_width=True)
_KIMI_NAMES = {
    **{"num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"},
    **{"norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group"},
}
"""Keys as other families have them, and as its authors' files do."""
_KIMI_SIZES = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
_KIMI_SIZES |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
"""Keys inside ``linear_attn_config``, and transformers' names for them outside of it."""


def _read_kimi(reader: Reader, values: Values) -> Values:
    layers = values["num_layers"]
    # Recurrence and experts are read apart: either may be missing.
    return {**_read_kda(reader, layers), **_read_kimi_experts(reader, layers)}


def _read_kda(reader: Reader, layers: int) -> dict[str, Any]:
    inner = reader.content.get("linear_attn_config") or {}
    if not isinstance(inner, dict):
        raise ConfigError(f"{reader.where}: linear_attn_config {inner!r} is not an object")
    recurs = _kimi_layers(reader, inner, layers)
    if not any(recurs):
        return {}
    # The authors' nested key wins over transformers' flat one.
    sizes = {name: inner.get(key, reader.get(name)) for key, name in _KIMI_SIZES.items()}
    for name, value in sizes.items():
        reader.check_number(name, value, int)
    heads, width = sizes["linear_num_heads"], sizes["linear_head_dim"]
    return {
        **{"linear_attention_type": "kda", "linear_attention_freq": skip_pattern(recurs, ones=True)},
        **{"linear_num_key_heads": heads, "linear_num_value_heads": heads},
        **{"linear_key_head_dim": width, "linear_value_head_dim": width},
        "linear_conv_kernel_dim": sizes["linear_conv_kernel_dim"],
    }


def _kimi_layers(reader: Reader, inner: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has the recurrence. ``linear_attn_config`` counts layers from 1."""
    if (kinds := reader.content.get("layer_types")) is not None:
        return read_kinds(reader, kinds, layers)
    lists = inner.get("full_attn_layers"), inner.get("kda_layers")
    if lists == (None, None):
        return [not (layer and layer % 4 == 0) for layer in range(layers)]  # as transformers has it
    named = [layer for found in lists if isinstance(found, list) for layer in found]
    # As texts: the lists of a broken file may hold anything.
    if None in lists or sorted(map(str, named)) != sorted(map(str, range(1, layers + 1))):
        raise ConfigError(
            f"{reader.where}: full_attn_layers and kda_layers of linear_attn_config do not name each of {layers} "
            "layers once, from 1 on"
        )
    return [layer + 1 in (lists[1] or ()) for layer in range(layers)]


def _read_kimi_experts(reader: Reader, layers: int) -> dict[str, Any]:
    kinds = reader.content.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not all(k in ("dense", "sparse") for k in kinds):
            raise ConfigError(f"{reader.where}: mlp_layer_types {kinds!r} is not one of dense, sparse for each layer")
        sparse = [kind == "sparse" for kind in kinds]
    else:
        first = reader.get("first_k_dense_replace")
        reader.check_number("first_k_dense_replace", first, int)
        sparse = [layer >= first for layer in range(layers)]
    if not any(sparse):
        return {}
    pattern = str([int(layer) for layer in sparse]).replace(" ", "")
    return read_experts(reader, _KIMI_EXPERTS, layers) | {"moe_layer_freq": "1" if all(sparse) else pattern}


def _write_kimi(config: ModelConfig) -> Values:
    """The keys in the form of its authors' files; ``mlp_layer_types`` can also express patterns that
    ``first_k_dense_replace`` cannot."""
    recurs, sparse = linear(config), with_experts(config)
    out: dict[str, Any] = {
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer, one in enumerate(recurs) if not one],
            "kda_layers": [layer + 1 for layer, one in enumerate(recurs) if one],
            "head_dim": config.linear_value_head_dim,
            "num_heads": config.linear_num_value_heads,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        },
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        "first_k_dense_replace": sparse.index(True) if any(sparse) else len(sparse),
    }
    if config.num_experts is None:
        return out
    return out | {_KIMI_NAMES.get(key, key): value for key, value in write_experts(config, _KIMI_EXPERTS).items()}


_CONVOLVED = ("query", "key", "value")
_KIMI_MODULES: dict[str, str | Fused] = {
    **LLAMA_MODULES,
    **LATENT_MODULES,
    # q_conv1d, k_conv1d, v_conv1d
    **{f"attention.{part}_conv": f"self_attn.{part[0]}_conv1d.weight" for part in _CONVOLVED},
    **{"attention.beta": "self_attn.b_proj", "attention.norm": "self_attn.o_norm"},
    **{"attention.decay_down": "self_attn.f_a_proj", "attention.decay_up": "self_attn.f_b_proj"},
    **{"attention.gate_down": "self_attn.g_a_proj", "attention.gate_up": "self_attn.g_b_proj"},
    # A_log has dimensions of size 1 around its heads in files.
    **{"attention.decay_log": Fused("self_attn.A_log", "ones", "decay"), "attention.decay_bias": "self_attn.dt_bias"},
    **{"mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.{}.w1"},
    **{"mlp.experts.up": "block_sparse_moe.experts.{}.w3", "mlp.experts.down": "block_sparse_moe.experts.{}.w2"},
    "mlp.router.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"mlp.shared_experts.{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
# transformers 5: one convolution for all three, and stacked experts.
_KIMI_STACKED: dict[str, str | Fused] = {
    **{f"attention.{part}_conv": Fused("self_attn.conv1d.weight", "recurrent", part) for part in _CONVOLVED},  # type: ignore[arg-type]
    "attention.decay_down": "self_attn.forget_gate.f_a_proj",
    "attention.decay_up": "self_attn.forget_gate.f_b_proj",
    "attention.decay_log": Fused("self_attn.forget_gate.A_log", "ones", "decay"),
    "attention.decay_bias": "self_attn.forget_gate.dt_bias",
    "mlp.router": "mlp.gate",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.experts.gate": Fused("mlp.experts.gate_up_proj", "halves", "gate"),
    "mlp.experts.up": Fused("mlp.experts.gate_up_proj", "halves", "up"),
    "mlp.experts.down": "mlp.experts.down_proj",
    **{f"mlp.shared_experts.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_KIMI = Family(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    table=Table("model.layers.{}.", _KIMI_MODULES, LLAMA_ENDS, stacked=_KIMI_STACKED),
    fields={
        **{"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers"},
        **{"num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_query_groups"},
        **{"intermediate_size": "ffn_hidden_size", "model_max_length": "max_position_embeddings"},
        **{"rms_norm_eps": "norm_epsilon", "tie_word_embeddings": "tied"},
        **LATENT_FIELDS,
    },
    defaults={
        **{"vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32},
        **{"num_key_value_heads": 32, "intermediate_size": 9216, "model_max_length": 1048576, "rms_norm_eps": 1e-5},
        **{"tie_word_embeddings": False, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "linear_num_heads": 32, "linear_head_dim": 128},
        **{"linear_conv_kernel_dim": 4, "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_tok": 8},
        **{"n_shared_experts": 1, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446},
        **{"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    },
    # the norms of latents have this epsilon, whatever the others' is
    # No RoPE anywhere: "NoPE" latent attention.
    fixed={"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "none", "latent_norm_epsilon": 1e-6}
    | NO_BIAS
    | {"multi_latent_attention": True, "qk_layernorm": True, "window_size": None},
    required={
        **{"attention_bias": False, "hidden_act": "silu", "mla_use_nope": True, "moe_layer_freq": 1},
        "moe_router_activation_func": "sigmoid",
    },
    said={"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "hidden_act": "silu"},
    activation_key=None,
    rope_keys=None,
    renamed={".mlp.": ".block_sparse_moe."},
    aliases={**_KIMI_NAMES, "model_max_length": "max_position_embeddings", "num_experts": "num_local_experts"},
    own=Own(_read_kimi, _write_kimi),
)
_OLMO_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Keys that have the same names as settings."""


def _read_olmo(reader: Reader, values: Values) -> Values:
    layers, kinds = values["num_layers"], reader.content.get("layer_types")
    if kinds is None:
        kinds = [KINDS[layer % 4 != 3] for layer in range(layers)]
        # At least one layer has attention: the last.
        kinds[-1] = kinds[-1] if KINDS[False] in kinds else KINDS[False]
    recurs = read_kinds(reader, kinds, layers)
    if not any(recurs) or all(recurs):
        raise ConfigError(f"{reader.where}: layer_types without {KINDS[all(recurs) is False]} is not supported")
    sizes = {name: reader.get(name) for name in _OLMO_SIZES}
    # Heads default to attention's.
    for name in _OLMO_SIZES[:2]:
        sizes[name] = values["num_attention_heads"] if sizes[name] is None else sizes[name]
    for name, value in sizes.items():
        reader.check_number(name, value or 1, int)
    if sizes["linear_key_head_dim"] is None:
        sizes["linear_key_head_dim"] = int(0.75 * values["hidden_size"] / sizes["linear_num_key_heads"])
    if sizes["linear_value_head_dim"] is None:
        sizes["linear_value_head_dim"] = 2 * sizes["linear_key_head_dim"]
    negative = reader.get("linear_allow_neg_eigval")
    reader.check_number("linear_allow_neg_eigval", negative, bool)
    freq = skip_pattern(recurs, ones=True)
    return {"linear_attention_freq": freq, "linear_allow_neg_eigval": negative, **sizes}


def _write_olmo(config: ModelConfig) -> Values:
    kinds = [KINDS[recurs] for recurs in linear(config)]
    names = (*_OLMO_SIZES, "linear_allow_neg_eigval")
    return {"layer_types": kinds, **{name: getattr(config, name) for name in names}}


# Layers with the recurrence have pre-norms, those with attention post-norms.
_OLMO_RECURRENT: dict[str, str | Fused] = {
    **{"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    **{f"attention.{part}": f"linear_attn.{part[0]}_proj" for part in _CONVOLVED},
    **{f"attention.{part}_conv": f"linear_attn.{part[0]}_conv1d.weight" for part in _CONVOLVED},
    **{"attention.gate": "linear_attn.g_proj", "attention.beta": "linear_attn.b_proj"},
    **{"attention.decay": "linear_attn.a_proj", "attention.output": "linear_attn.o_proj"},
    **{"attention.decay_log": "linear_attn.A_log", "attention.decay_bias": "linear_attn.dt_bias"},
    "attention.norm": "linear_attn.o_norm",
}
_OLMO_MODULES: dict[str, str | Fused] = {
    **{name: target for name, target in QK_MODULES.items() if name not in ("attention_norm", "mlp_norm")},
    **{"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
}
_OLMO = Family(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    table=Table("model.layers.{}.", _OLMO_MODULES, LLAMA_ENDS, recurrent=_OLMO_RECURRENT),
    fields={key: name for key, name in LLAMA_FIELDS.items() if key != "head_dim"} | ATTENTION_BIAS,
    defaults={name: value for name, value in LLAMA_DEFAULTS.items() if name not in ("head_dim", "mlp_bias")}
    | {"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32}
    | {"num_attention_heads": 30, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6}
    | dict.fromkeys(_OLMO_SIZES[:4])
    | {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    fixed=LLAMA_FIXED
    | NO_BIAS
    | {"qk_layernorm": True, "qk_layernorm_across_heads": True, "norm_placement": "post", "window_size": None}
    # the recurrence's output has a norm of this epsilon, whatever the others' is
    | {"linear_attention_type": "gated_delta_net", "linear_norm_placement": "pre", "linear_norm_epsilon": 1e-5},
    required={"hidden_act": "silu"},
    said={"hidden_act": "silu"},
    activation_key=None,
    renamed={
        ".input_layernorm.": ".attention_layer_norm.",
        ".post_attention_layernorm.": ".feedforward_layer_norm.",
    },
    own=Own(_read_olmo, _write_olmo),
)
HYBRID_FAMILIES = (_KIMI, _OLMO)
