"""Keys that single architectures have, see ``families.Own``. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import linear, no_rope, skip_pattern
from smp.convert.huggingface.family import Own
from smp.convert.huggingface.reader import Reader, written_scaling

Values = Mapping[str, Any]


def _nothing(config: ModelConfig) -> Values:
    return {}


def _gemma(reader: Reader, values: Values) -> Values:
    """Gemma multiplies embeddings by sqrt(hidden_size), without a key for it."""
    return {"embedding_multiplier": values["hidden_size"] ** 0.5}


GEMMA = Own(_gemma, _nothing)


def _read_local_rope(reader: Reader, base: Any) -> Values:
    """RoPE of layers with a window, which is never scaled."""
    given = reader.content.get("rope_parameters") or {}
    local = given.get("sliding_attention") if isinstance(given, dict) else None
    if isinstance(local, dict):
        if local.get("rope_type", "default") != "default":
            raise ConfigError(
                f"{reader.where}: RoPE of type {local['rope_type']!r} in layers with a window is not supported, only "
                "'default'"
            )
        base = local.get("rope_theta", base)
    reader.check_number("rope_theta", base)
    return {"rotary_base_local": float(base)}


def _read_gemma3(reader: Reader, values: Values) -> Values:
    return {**_gemma(reader, values), **_read_local_rope(reader, reader.get("rope_local_base_freq"))}


def _write_gemma3(config: ModelConfig) -> Values:
    return {"rope_local_base_freq": config.rotary_base_local or config.rotary_base}


GEMMA3 = Own(_read_gemma3, _write_gemma3)


def _read_olmo3(reader: Reader, values: Values) -> Values:
    return _read_local_rope(reader, values["rotary_base"])


def _write_olmo3(config: ModelConfig) -> Values:
    """The keys of transformers 5, as older versions have none for the layers with a window."""
    full = {**(written_scaling(config) or {"rope_type": "default"}), "rope_theta": config.rotary_base}
    local = {"rope_type": "default", "rope_theta": config.rotary_base_local or config.rotary_base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


OLMO3 = Own(_read_olmo3, _write_olmo3)


def _read_smollm3(reader: Reader, values: Values) -> Values:
    layers, kinds = values["num_layers"], reader.get("no_rope_layers")
    every = reader.get("no_rope_layer_interval")
    if kinds is None:
        reader.check_number("no_rope_layer_interval", every, int)
        kinds = [int((layer + 1) % max(every, 1) != 0) for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (0, 1) for kind in kinds):
        raise ConfigError(f"{reader.where}: no_rope_layers {kinds!r} is no list of a 0 or 1 for each layer")
    return _no_rope([bool(kind) for kind in kinds])


def _no_rope(turned: list[bool]) -> Values:
    # In no layer: the model has no position embedding at all.
    if not any(turned):
        return {"position_embedding_type": "none"}
    return {"no_rope_freq": skip_pattern(turned, ones=False)}


def _write_smollm3(config: ModelConfig) -> Values:
    return {"no_rope_layers": [int(not skipped) for skipped in no_rope(config)]}


SMOLLM3 = Own(_read_smollm3, _write_smollm3)


def _read_cohere2(reader: Reader, values: Values) -> Values:
    """Layers without a window have no RoPE (Cohere Command R7B)."""
    window = values["window_size"]
    return {"position_embedding_type": "none"} if window is None else {"no_rope_freq": _skipped(values)}


def _skipped(values: Values) -> str | None:
    """The setting of layers without RoPE from that of layers without a window: a list has 1 for a window in one and for
    no RoPE in the other, so 0 and 1 are exchanged."""
    skipped = values.get("window_attn_skip_freq")
    if skipped is None or not skipped.startswith("["):
        return skipped
    return str(skipped).translate(str.maketrans("01", "10"))


COHERE2 = Own(_read_cohere2, _nothing)


def _read_falcon(reader: Reader, values: Values) -> Values:
    new, many = (reader.get(key) for key in ("new_decoder_architecture", "multi_query"))
    norms = reader.get("num_ln_in_parallel_attn")
    # The new architecture has grouped heads; before it one key/value head for all, or one for each query head.
    groups = reader.get("num_kv_heads") if new else 1 if many else None
    if groups is not None:
        reader.check_number("num_kv_heads", groups, int)
    # Two norms for attention and MLP exist in the new architecture only.
    two = new and norms in (None, 2)
    return {"num_query_groups": groups, "parallel_residual_shared_norm": not two}


def _write_falcon(config: ModelConfig) -> Values:
    one, shared = config.num_query_groups == 1, config.parallel_residual_shared_norm
    if shared and one:
        return {"new_decoder_architecture": False, "multi_query": True}
    new = {"new_decoder_architecture": True, "num_kv_heads": config.num_query_groups}
    return new | {"num_ln_in_parallel_attn": 1 if shared else 2}


FALCON = Own(_read_falcon, _write_falcon)


def _read_gpt_oss(reader: Reader, values: Values) -> Values:
    """RoPE is scaled by YaRN unless the file says something else."""
    if reader.content.get("rope_parameters") or reader.content.get("rope_scaling"):
        return {}
    # transformers' defaults of this family.
    scaling = {"rope_scaling_factor": 32.0, "rope_original_max_position": 4096, "yarn_truncate": False}
    return {"use_rope_scaling": True, "rope_scaling_type": "yarn", **scaling}


def _write_gpt_oss(config: ModelConfig) -> Values:
    """Unscaled RoPE has to be written, because its absence means YaRN."""
    return {} if config.use_rope_scaling else {"rope_scaling": {"rope_type": "default"}}


GPT_OSS = Own(_read_gpt_oss, _write_gpt_oss)


def _read_qwen3_next(reader: Reader, values: Values) -> Values:
    """Layers with full attention come at an interval, unless the layers are listed."""
    layers, kinds, every = values["num_layers"], reader.get("layer_types"), reader.get("full_attention_interval")
    if kinds is None:
        reader.check_number("full_attention_interval", every, int)
        kinds = [_KINDS[(layer + 1) % max(every, 1) != 0] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise ConfigError(f"{reader.where}: layer_types {kinds!r} is not one of {', '.join(_KINDS)} for each layer")
    # ``_KINDS[True]`` is the recurrence.
    recurs = [kind == _KINDS[True] for kind in kinds]
    if not any(recurs):
        return {}
    numbers = {key: reader.get(key) for key in _DELTA_NET}
    for key, value in numbers.items():
        reader.check_number(key, value, int)
    pattern = {"linear_attention_freq": skip_pattern(recurs, ones=True)}
    return {"linear_attention_type": "gated_delta_net", **pattern, **numbers}


_KINDS = ("full_attention", "linear_attention")
_DELTA_NET = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    "linear_num_value_heads",
)
"""Keys that have the same names as settings."""


def _write_qwen3_next(config: ModelConfig) -> Values:
    kinds = [_KINDS[recurs] for recurs in linear(config)]
    return {"layer_types": kinds, **{name: getattr(config, name) for name in _DELTA_NET}}


QWEN3_NEXT = Own(_read_qwen3_next, _write_qwen3_next)
