"""Checks of positions: kind, RoPE and its scalings."""

from __future__ import annotations

import math

from smp.config.command_line.fields import flag_of, given, require
from smp.config.layer_pattern import attends, no_rope, windowed
from smp.config.model import ModelConfig
from smp.config.schema import ConfigError


def check_positions(model: ModelConfig) -> None:
    """Check them in a model with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag.
    """
    kind = model.position_embedding_type
    _check_rope_scaling(model)
    _check_layers(model)
    require(
        not model.use_rope_scaling or model.rope_low_freq_factor <= model.rope_high_freq_factor,
        f"--rope-low-freq-factor {model.rope_low_freq_factor} must not be above "
        f"--rope-high-freq-factor {model.rope_high_freq_factor}",
    )
    assert model.kv_channels is not None, "filled in before"
    # RoPE rotates pairs of channels, so their number is even.
    rotated = model.rotary_channels
    require(
        kind != "rope" or not any(attends(model)) or (rotated > 0 and rotated % 2 == 0 and model.rotary_percent <= 1),
        f"--rotary-percent {model.rotary_percent} of --kv-channels {model.kv_channels} rotates {rotated} channels: "
        "RoPE needs an even number above 0 and at most all of them; change one of the two",
    )


def _check_layers(model: ModelConfig) -> None:
    """Check settings by which layers differ."""
    turned = [not skipped for skipped in no_rope(model)]
    has_local = any(rope and window for rope, window in zip(turned, windowed(model), strict=True))
    local, skipped = given(model, "rotary_base_local"), given(model, "no_rope_freq")
    require(
        not local or has_local,
        f"{''.join(local)} has no effect: no layer has both a window and RoPE; leave it out",
    )
    every = (model.no_rope_freq or "").isdecimal()  # of a named size, which may have been given fewer layers
    require(
        not skipped or every or not all(turned),
        f"{''.join(skipped)} has no effect: every layer has RoPE; leave it out",
    )
    require(
        not skipped or any(turned),
        f"{''.join(skipped)} leaves no layer with RoPE; --position-embedding-type none is that",
    )
    _check_of_rope_layers(model)
    require(
        model.position_embedding_type != "alibi" or model.attn_logit_softcapping is None,
        f"--position-embedding-type alibi and --attn-logit-softcapping {model.attn_logit_softcapping} exclude each "
        "other; leave out one",
    )


def _check_of_rope_layers(model: ModelConfig) -> None:
    """Check settings that only layers with RoPE have."""
    require(
        model.attention_chunk_size is None or model.window_size is None,
        f"--attention-chunk-size {model.attention_chunk_size} and --window-size {model.window_size} exclude each "
        "other: each says which tokens one sees; leave out one",
    )
    require(
        not (model.qk_l2_norm and model.qk_layernorm),
        "--qk-l2-norm and --qk-layernorm exclude each other: each normalizes queries and keys; leave out one",
    )
    # YaRN and LongRoPE scale attention by the length of queries and keys, which the norm sets to 1 again.
    require(
        not (model.qk_l2_norm and model.use_rope_scaling and model.rope_scaling_type in ("yarn", "longrope")),
        f"--qk-l2-norm and --rope-scaling-type {model.rope_scaling_type} exclude each other: the norm, which comes "
        "after RoPE, takes back what that multiplies queries and keys by; leave out one",
    )


def _check_rope_scaling(model: ModelConfig) -> None:
    kind, fast, slow = model.rope_scaling_type, model.yarn_beta_fast, model.yarn_beta_slow
    if kind == "longrope" and model.use_rope_scaling:
        _check_longrope(model)
    # The new base is base x (...)^(channels / (channels - 2)): with 2 channels it divides by zero.
    require(
        kind != "dynamic" or model.rotary_channels > 2,
        f"--rope-scaling-type dynamic needs more than the {model.rotary_channels} rotated channels of a head",
    )
    require(
        kind != "dynamic" or model.rope_scaling_factor >= 1,
        f"--rope-scaling-factor {model.rope_scaling_factor} must be at least 1 with --rope-scaling-type dynamic",
    )
    if kind != "yarn":
        return
    # YaRN (Peng et al. 2023, arXiv 2309.00071) goes from kept to interpolated channels between these two.
    require(fast > slow, f"--yarn-beta-fast {fast} must be above --yarn-beta-slow {slow}")
    require(model.rotary_base > 1, f"--rope-scaling-type yarn needs --rotary-base above 1, not {model.rotary_base}")
    require(
        (model.yarn_mscale is None) == (model.yarn_mscale_all_dim is None),
        "--yarn-mscale and --yarn-mscale-all-dim go together: give both or none",
    )
    require(
        model.yarn_attention_factor is None or model.yarn_mscale is None,
        f"--yarn-attention-factor {model.yarn_attention_factor} and --yarn-mscale {model.yarn_mscale} are both given; "
        "give one",
    )


def longrope_factors(model: ModelConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """LongRoPE's factors for short and for long sequences, one per pair of rotated channels.

    Raises:
        ConfigError: they are missing, or no numbers above 0, or not as many as there are pairs of rotated channels.
    """
    short, long = (_factors(model, name) for name in ("longrope_short_factor", "longrope_long_factor"))
    return short, long


def _factors(model: ModelConfig, name: str) -> tuple[float, ...]:
    text, flag, pairs = getattr(model, name), flag_of(name), model.rotary_channels // 2
    require(text is not None, f"--rope-scaling-type longrope needs {flag}, {pairs} numbers")
    try:
        numbers = tuple(float(word) for word in text.split())
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected numbers") from None
    require(all(0 < x < math.inf for x in numbers), f"{flag} {text}: expected numbers above 0")
    # LongRoPE (arXiv 2402.13753) scales each frequency by itself, and a pair of channels has one.
    require(
        len(numbers) == pairs,
        f"{flag} has {len(numbers)} numbers, but {model.rotary_channels} rotated channels are {pairs} pairs",
    )
    return numbers


def _check_longrope(model: ModelConfig) -> None:
    longrope_factors(model)
    original, scale = model.rope_original_max_position, model.longrope_attention_factor
    require(original > 1, f"--rope-original-max-position {original} must be above 1 with --rope-scaling-type longrope")
    require(scale is None or scale > 0, f"--longrope-attention-factor {scale} must be above 0")
