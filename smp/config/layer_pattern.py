"""Megatron's notation for what differs between layers, and which layers have a window, RoPE or experts by it. All
settings of a layer are in :mod:`smp.config.layers`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache

from smp.config.command_line.fields import require
from smp.config.model import ModelConfig
from smp.config.schema import ConfigError

# [0]*1000000000 in a flag would fill the memory.
MOST_LAYERS = 10_000


def windowed(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has --window-size."""
    if model.window_size is None:
        return (False,) * model.num_layers
    return _windowed(model.window_attn_skip_freq, model.num_layers)


OF_ATTENTION = (
    *("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_base_local", "no_rope_freq", "use_rope_scaling"),
    *("attn_temperature_tuning", "window_size", "attention_chunk_size", "add_qkv_bias", "add_attention_output_bias"),
    *("qk_layernorm", "qk_l2_norm", "attention_output_gate", "softmax_scale", "softmax_type"),
    *("attn_logit_softcapping", "attention_dropout", "multi_latent_attention"),
)
"""Settings of attention layers only; they are refused where no layer has attention."""
OF_FEED_FORWARD = (
    *("swiglu", "geglu", "quick_geglu", "relu", "squared_relu", "tanh_gelu", "add_mlp_bias"),
    *("disable_bias_linear", "mlp_multipliers"),
)
"""Settings of MLPs and experts only; likewise."""


DELTA_RULES = ("gated_delta_net", "kda")
"""Values of --linear-attention-type whose states follow the delta rule."""
MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
"""Letters of --hybrid-layer-pattern."""


def has_mixer(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer mixes tokens."""
    letters = model.hybrid_layer_pattern
    return (True,) * model.num_layers if letters is None else tuple(letter in MAMBA + ATTENTION for letter in letters)


def has_feed_forward(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has an MLP or experts."""
    letters = model.hybrid_layer_pattern
    return (True,) * model.num_layers if letters is None else tuple(letter in MLP + EXPERTS for letter in letters)


def attends(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has attention, or a mixer that --layer-types names."""
    both = model.linear_attention_parallel
    return tuple(mixes and (both or not recurs) for mixes, recurs in zip(has_mixer(model), linear(model), strict=True))


def has_mlp(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has a dense feed-forward network."""
    pairs = zip(has_feed_forward(model), with_experts(model), strict=True)
    return tuple(there and not experts for there, experts in pairs)


def linear(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has a linear recurrence, instead of attention or in parallel with it."""
    if (letters := model.hybrid_layer_pattern) is not None:
        return tuple(letter == MAMBA for letter in letters)
    if model.linear_attention_type is None:
        return (False,) * model.num_layers
    return _linear(model.linear_attention_freq, model.num_layers)


def no_rope(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer is without RoPE."""
    if model.position_embedding_type != "rope":
        return (True,) * model.num_layers
    return _no_rope(model.no_rope_freq, model.num_layers)


def with_experts(model: ModelConfig) -> tuple[bool, ...]:
    """Whether each layer has experts.

    Raises:
        ConfigError: --moe-layer-freq is neither a number nor a list of the right length.
    """
    if (letters := model.hybrid_layer_pattern) is not None:
        return tuple(letter == EXPERTS for letter in letters)
    return (
        (False,) * model.num_layers if model.num_experts is None else _experts(model.moe_layer_freq, model.num_layers)
    )


# Cached: every layer of a model asks, and a pattern is parsed text.
@cache
def _windowed(text: str | None, num_layers: int) -> tuple[bool, ...]:
    if text is None:
        return (True,) * num_layers
    value = pattern_value("--window-attn-skip-freq", text, num_layers)
    found = tuple(bool(v) for v in value) if isinstance(value, list) else _all_but_every(value, num_layers)
    require(any(found), f"--window-attn-skip-freq {text} leaves no layer with a window; leave out --window-size")
    return found


@cache
def _linear(text: str | None, num_layers: int) -> tuple[bool, ...]:
    if text is None:
        return (True,) * num_layers
    value = pattern_value("--linear-attention-freq", text, num_layers)
    found = tuple(bool(v) for v in value) if isinstance(value, list) else _all_but_every(value, num_layers)
    require(any(found), f"--linear-attention-freq {text} leaves no layer with it; leave out --linear-attention-type")
    return found


@cache
def _no_rope(text: str | None, num_layers: int) -> tuple[bool, ...]:
    if text is None:
        return (False,) * num_layers
    value = pattern_value("--no-rope-freq", text, num_layers)
    if not isinstance(value, list):
        return tuple(not rope for rope in _all_but_every(value, num_layers))
    return tuple(bool(v) for v in value)


@cache
def _experts(text: str, num_layers: int) -> tuple[bool, ...]:
    value = pattern_value("--moe-layer-freq", text, num_layers)
    if isinstance(value, int):
        # Megatron: layer i has experts if i is a multiple of the number; for the other settings
        # every n-th layer is the exception.
        return tuple(layer % value == 0 for layer in range(num_layers))
    require(1 in value, f"--moe-layer-freq {text} leaves no layer with experts; leave out --num-experts")
    return tuple(bool(kind) for kind in value)


def _all_but_every(number: int, num_layers: int) -> tuple[bool, ...]:
    """False for every ``number``-th layer, counted from 1; True for the others."""
    return tuple((layer + 1) % number != 0 for layer in range(num_layers))


def skip_pattern(kept: Sequence[bool], *, ones: bool) -> str | None:
    """The shortest text for a pattern in which all but every n-th layer is ``kept``: n, else the list, in which 1 means
    kept if ``ones``; None if all are kept."""
    if all(kept):
        return None
    first = list(kept).index(False) + 1
    if tuple(kept) == _all_but_every(first, len(kept)):
        return str(first)
    return str([int(keeps == ones) for keeps in kept]).replace(" ", "")


def pattern_value(flag: str, text: str, num_layers: int) -> int | list[int]:
    """The value of a pattern: a number above 0, or a 0 or 1 for each layer.

    Raises:
        ConfigError: it is neither.
    """
    try:
        # Megatron evals this text; here only numbers, lists, + and * are interpreted.
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"{flag} {text}: expected a number, or a list of 0 and 1 such as [0]*1+[1]*3") from None
    if isinstance(value, int):
        require(value > 0, f"{flag} {text} must be above 0")
        return value
    require(set(value) <= {0, 1}, f"{flag} {text}: a list is made of 0 and 1")
    require(len(value) == num_layers, f"{flag} {text} names {len(value)} layers of {num_layers} (--num-layers)")
    return value


def _value(node: ast.expr) -> int | list[int]:
    """The value of an expression of integers, lists, + of two lists, and a list times a number."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(node.value, bool):
            return number
        case ast.List(elts=elements):
            numbers = [_value(element) for element in elements]
            return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, two = _value(left), _value(right)
            # Checked before the list is made.
            if isinstance(one, list) and isinstance(two, list) and len(one) + len(two) <= MOST_LAYERS:
                return one + two
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, two = _value(left), _value(right)
            if isinstance(one, list) and isinstance(two, int) and len(one) * two <= MOST_LAYERS:
                return one * two
    raise ValueError
