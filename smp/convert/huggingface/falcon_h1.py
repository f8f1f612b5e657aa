"""Falcon-H1 of transformers: names of its tensors, and its multipliers. No torch here.

It multiplies what attention and Mamba-2 read as well as what their projections give. The projections have no biases, so
a number in front of one may as well stand after it, and those of queries and keys in the scale of scores. That is how
they are kept here, and they are written so, with 1 for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import attends, linear
from smp.config.rules.multipliers import as_text, mlp_multipliers, ssm_multipliers
from smp.convert.huggingface.families import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_MODULES, NO_BIAS
from smp.convert.huggingface.family import Family, Own
from smp.convert.huggingface.reader import Reader
from smp.convert.huggingface.state_space import GRANITE_KEYS, mamba_modules, read_mamba, written_mamba
from smp.convert.layout import Fused, Table

_FACTORS = ("key_multiplier", "attention_in_multiplier", "attention_out_multiplier")
_SSM_FACTORS = ("ssm_in_multiplier", "ssm_out_multiplier")


def _read(reader: Reader, values: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads, head_dim = (values[name] for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    width, expand = reader.get("mamba_d_ssm"), reader.get("mamba_expand")
    reader.check_number("mamba_expand", expand, int)
    width = expand * (hidden or 1) if width is None else width
    reader.check_number("mamba_d_ssm", width, int)
    found = read_mamba(reader, GRANITE_KEYS, width)
    if found["mamba_num_heads"] * found["mamba_head_dim"] != width:
        raise ConfigError(f"{reader.where}: mamba_n_heads x mamba_d_head is not the width of all heads, {width}")
    has_norm = reader.get("mamba_rms_norm")
    reader.check_number("mamba_rms_norm", has_norm, bool)
    if has_norm and reader.get("mamba_norm_before_gate"):
        raise ConfigError(f"{reader.where}: mamba_norm_before_gate true is not supported, only false")
    # before: in front of the projections, after: of their results.
    key, before, after = (_number(reader, name) for name in _FACTORS)
    inside, outside = (_number(reader, name) for name in _SSM_FACTORS)
    # sizes that are none are refused later
    # max(1, ..): sizes of 0 are refused by the checks that follow.
    usual = max(1, (hidden or 1) // max(1, heads or 1) if head_dim is None else head_dim) ** -0.5
    # Queries and keys both have ``before``; keys also ``key``.
    scale = usual * (key * before**2)
    return {
        **found,
        **{"linear_attention_type": "mamba2", "linear_attention_parallel": True, "mamba_rms_norm": has_norm},
        "softmax_scale": None if scale == usual else scale,
        # The value's ``before`` and the output's ``after`` are one factor of attention's output.
        **{"attention_out_multiplier": after * before, "ssm_out_multiplier": outside},
        "ssm_multipliers": as_text(tuple(inside * x for x in _numbers(reader, "ssm_multipliers", 5))),
        "mlp_multipliers": as_text(_numbers(reader, "mlp_multipliers", 2)),
    }


def _number(reader: Reader, key: str) -> float:
    value = reader.get(key)
    reader.check_number(key, value)
    if value <= 0:
        raise ConfigError(f"{reader.where}: {key} {value} is not supported, only above 0")
    return float(value)


def _numbers(reader: Reader, key: str, count: int) -> tuple[float, ...]:
    values = reader.get(key)
    values = [1.0] * count if values is None else values
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"{reader.where}: {key} {values!r} is not a list of {count} numbers")
    for value in values:
        reader.check_number(key, value)
    return tuple(float(value) for value in values)


def _write(config: ModelConfig) -> dict[str, Any]:
    if not all(linear(config)) or not all(attends(config)):
        raise ConfigError("its layers all have attention and Mamba-2")
    numbers = ssm_multipliers(config)
    return {
        **written_mamba(config, GRANITE_KEYS),
        "mamba_d_ssm": (config.mamba_num_heads or 0) * config.mamba_head_dim,
        **{"mamba_rms_norm": config.mamba_rms_norm, "mamba_norm_before_gate": False},
        **{"key_multiplier": _key_multiplier(config), "attention_in_multiplier": 1.0},
        "attention_out_multiplier": config.attention_out_multiplier,
        **{"ssm_in_multiplier": 1.0, "ssm_out_multiplier": config.ssm_out_multiplier},
        **{"ssm_multipliers": list(numbers), "mlp_multipliers": list(mlp_multipliers(config))},
    }


def _key_multiplier(config: ModelConfig) -> float:
    """The ``key_multiplier`` from which reading gets the same scale, to the bit; the plain quotient may be off by a
    rounding."""
    assert config.kv_channels is not None, "resolved before"
    usual = config.kv_channels**-0.5
    if config.softmax_scale is None:
        return 1.0
    quotient = config.softmax_scale / usual
    near = (quotient, math.nextafter(quotient, 0), math.nextafter(quotient, math.inf))
    return next((number for number in near if usual * number == config.softmax_scale), quotient)


_MODULES: dict[str, str | Fused] = {
    **{f"attention.{name}": target for name, target in LLAMA_MODULES.items() if name.startswith("attention.")},
    **mamba_modules("mamba", "attention.recurrence"),
    **{"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    table=Table(
        "model.layers.{}.",
        _MODULES,
        {"embedding": "model.embed_tokens", "final_norm": "model.final_layernorm", "head": "lm_head"},
    ),
    fields=LLAMA_FIELDS,
    defaults=LLAMA_DEFAULTS
    | {"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    | {"mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256}
    | {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_norm_before_gate": True, "mamba_rms_norm": False}
    | dict.fromkeys(("time_step_limit", "mlp_multipliers", "ssm_multipliers"))
    | dict.fromkeys((*_FACTORS, *_SSM_FACTORS, "lm_head_multiplier", "embedding_multiplier"), 1.0),
    fixed=NO_BIAS | {"normalization": "RMSNorm", "swiglu": True, "qk_layernorm": False, "window_size": None},
    required={
        **{"attention_bias": False, "mlp_bias": False, "projectors_bias": False, "mamba_proj_bias": False},
        **{"mamba_conv_bias": True, "hidden_act": "silu"},
        # which transformers does not read: every layer has attention, Mamba-2 and an MLP
        **{"mamba_use_mlp": True, "attn_layer_indices": None},
    },
    said={"attention_bias": False, "mlp_bias": False, "projectors_bias": False, "hidden_act": "silu"},
    activation_key=None,
    factors={
        "embedding_multiplier": ("embedding_multiplier", "same"),
        "lm_head_multiplier": ("logit_scale", "same"),
    },
    own=Own(_read, _write),
)
