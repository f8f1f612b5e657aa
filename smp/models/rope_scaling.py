"""Which scaling of RoPE the settings of a model mean."""

from __future__ import annotations

from smp.config import ModelConfig
from smp.config.positions import longrope_factors
from smp.layers.rope import (
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
    longrope_amplitude,
    yarn_amplitude,
    yarn_growth,
)


def latent_scale(config: ModelConfig) -> float:
    """What the scores of a resolved model's latent attention are multiplied by: 1 / sqrt(channels of a key), and as in
    DeepSeek-V2's and V3's files the square of YaRN's amplitude for --yarn-mscale-all-dim."""
    scale = float((config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5)
    scaled = config.use_rope_scaling and config.rope_scaling_type == "yarn"
    if not scaled or config.yarn_mscale_all_dim is None:
        return scale
    return scale * yarn_growth(config.rope_scaling_factor, config.yarn_mscale_all_dim) ** 2


def rope_scaling(config: ModelConfig) -> Scaling | None:
    """That of a resolved model; None: frequencies as they are."""
    c, factor = config, config.rope_scaling_factor
    if not c.use_rope_scaling:
        return None
    if c.rope_scaling_type == "linear":
        return LinearScaling(factor)
    if c.rope_scaling_type == "longrope":
        original = c.rope_original_max_position
        usual = longrope_amplitude(c.max_position_embeddings / original, original)
        return LongRopeScaling(*longrope_factors(c), original, c.longrope_attention_factor or usual)
    if c.rope_scaling_type == "llama3":
        return RopeScaling(factor, c.rope_low_freq_factor, c.rope_high_freq_factor, c.rope_original_max_position)
    return YarnScaling(
        factor=factor,
        original_max_position=c.rope_original_max_position,
        beta_fast=c.yarn_beta_fast,
        beta_slow=c.yarn_beta_slow,
        truncate=c.yarn_truncate,
        amplitude=c.yarn_attention_factor or yarn_amplitude(factor, c.yarn_mscale, c.yarn_mscale_all_dim),
    )
