"""RoPE's scaling for layers, from its spec."""

from __future__ import annotations

from smp.config.layer_specs import LatentMixer, RopeScalingSpec
from smp.layers.rope import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
    longrope_amplitude,
    yarn_amplitude,
    yarn_growth,
)


def latent_scale(mixer: LatentMixer) -> float:
    """Scale of latent attention's scores: 1 / sqrt(channels of a key), and as in DeepSeek-V2's and
    V3's files the square of YaRN's amplitude for --yarn-mscale-all-dim."""
    scale = float((mixer.plain_dim + mixer.rope_dim) ** -0.5)
    scaling = None if mixer.rope is None else mixer.rope.scaling
    if scaling is None or scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return scale
    # Squared, for queries and keys. ``yarn_amplitude`` divides cos and sin by the same number, so
    # with equal mscales the growth is in this scale alone.
    return scale * yarn_growth(scaling.factor, scaling.mscale_all_dim) ** 2


def scaling_of(spec: RopeScalingSpec | None) -> Scaling | None:
    """The scaling of a RoPE spec as the layers' class; None: frequencies are not scaled."""
    if spec is None:
        return None
    factor, original = spec.factor, spec.original_max_position
    if spec.kind == "linear":
        return LinearScaling(factor)
    if spec.kind == "dynamic":
        return DynamicScaling(factor, original)
    if spec.kind == "longrope":
        # As transformers computes it where a config.json names no attention factor.
        usual = longrope_amplitude(spec.max_position / original, original)
        return LongRopeScaling(spec.short, spec.long, original, spec.attention_factor or usual)
    if spec.kind == "llama3":
        return RopeScaling(factor, spec.low_freq_factor, spec.high_freq_factor, original)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=spec.beta_fast,
        beta_slow=spec.beta_slow,
        truncate=spec.truncate,
        amplitude=spec.attention_factor or yarn_amplitude(factor, spec.mscale, spec.mscale_all_dim),
    )
