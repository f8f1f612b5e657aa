"""What Llama 4's ``config.json`` says under keys of its own, see ``families.Own``. No torch here.

Layers with RoPE have chunks and, by ``use_qk_norm``, L2 norms; the others' queries grow with their positions. Experts
are ``intermediate_size`` wide, and so is the MLP next to them; dense layers are ``intermediate_size_mlp`` wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import no_rope, skip_pattern, with_experts
from smp.convert.huggingface.family import Own
from smp.convert.huggingface.reader import Reader

Values = Mapping[str, Any]


def _read(reader: Reader, values: Values) -> Values:
    return {**_read_attention(reader, values["num_layers"]), **_read_experts(reader, values["num_layers"])}


def _read_attention(reader: Reader, layers: int) -> Values:
    # iRoPE: layers without RoPE see all tokens, those with RoPE a chunk.
    turned = _turned(reader, layers)
    if not any(turned):
        raise ConfigError(f"{reader.where}: no_rope_layers without a layer that has RoPE is not supported")
    kinds = ["chunked_attention" if one else "full_attention" for one in turned]
    if reader.content.get("layer_types") not in (None, kinds):
        raise ConfigError(
            f"{reader.where}: layer_types other than chunked_attention with RoPE and full_attention without is not "
            "supported"
        )
    chunk, tuned = reader.get("attention_chunk_size"), bool(reader.get("attn_temperature_tuning"))
    reader.check_number("attention_chunk_size", chunk, int)
    norm = reader.get("use_qk_norm")
    reader.check_number("use_qk_norm", norm, bool)
    out = {"no_rope_freq": skip_pattern(turned, ones=False), "attention_chunk_size": chunk, "qk_l2_norm": norm}
    if not tuned or all(turned):
        # Temperature acts in layers without RoPE only: without any it is no setting.
        return out
    scale, floor = reader.get("attn_scale"), reader.get("floor_scale")
    reader.check_number("attn_scale", scale)
    reader.check_number("floor_scale", floor, int)
    return {**out, "attn_temperature_tuning": True, "attn_scale": float(scale), "floor_scale": floor}


def _turned(reader: Reader, layers: int) -> list[bool]:
    """Whether each layer has RoPE. (An empty list means: by the interval.)"""
    kinds, every = reader.get("no_rope_layers"), reader.get("no_rope_layer_interval")
    if not kinds:
        reader.check_number("no_rope_layer_interval", every, int)
        # transformers: 1 means RoPE, every interval-th layer has none.
        kinds = [int((layer + 1) % max(every, 1) != 0) for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (0, 1) for kind in kinds):
        raise ConfigError(f"{reader.where}: no_rope_layers {kinds!r} is no list of a 0 or 1 for each layer")
    return [bool(kind) for kind in kinds]


def _read_experts(reader: Reader, layers: int) -> Values:
    numbers = {}
    for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size", "interleave_moe_layer_step"):
        numbers[key] = reader.get(key)
        reader.check_number(key, numbers[key], int)
    # 0 or less would be no step.
    step, chosen = max(1, numbers["interleave_moe_layer_step"]), reader.get("moe_layers")
    if chosen is None:
        chosen = list(range(step - 1, layers, step))
    if not isinstance(chosen, list) or not chosen or not set(chosen) <= set(range(layers)):
        raise ConfigError(f"{reader.where}: moe_layers {chosen!r} are no layers of {layers}")
    if numbers["num_experts_per_tok"] != 1:
        raise ConfigError(
            f"{reader.where}: num_experts_per_tok {numbers['num_experts_per_tok']} is not supported, only 1"
        )
    pattern = str([int(layer in chosen) for layer in range(layers)]).replace(" ", "")
    return {
        "num_experts": numbers["num_local_experts"],
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        # Llama 4 multiplies the expert's input, not its output, by the score.
        "moe_apply_probs_on_input": True,
        "moe_ffn_hidden_size": numbers["intermediate_size"],
        # The shared expert is as wide as the routed ones.
        "moe_shared_expert_intermediate_size": numbers["intermediate_size"],
        "moe_layer_freq": "1" if len(set(chosen)) == layers else pattern,
    }


def _write(config: ModelConfig) -> Values:
    kinds = [int(not skipped) for skipped in no_rope(config)]
    return {
        "no_rope_layers": kinds,
        # Without chunks: one chunk as long as any sequence.
        "attention_chunk_size": config.attention_chunk_size or config.max_position_embeddings,
        "use_qk_norm": config.qk_l2_norm,
        "attn_temperature_tuning": config.attn_temperature_tuning,
        "attn_scale": config.attn_scale,
        "floor_scale": config.floor_scale,
        "num_local_experts": config.num_experts or 0,
        "num_experts_per_tok": config.moe_router_topk,
        "intermediate_size": config.moe_ffn_hidden_size or 0,
        "moe_layers": [layer for layer, experts in enumerate(with_experts(config)) if experts],
    }


LLAMA4 = Own(_read, _write)
