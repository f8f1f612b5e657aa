"""Checks of multi-head latent attention."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.model import ModelConfig
from smp.config.schema import ConfigError

_OF_OTHERS = (
    *("rotary_percent", "rotary_interleaved", "rotary_base_local", "no_rope_freq", "window_attn_skip_freq"),
    *("qk_layernorm_across_heads", "apply_layernorm_1p", "softmax_scale", "softmax_type", "attn_logit_softcapping"),
    *("qk_l2_norm", "attention_chunk_size", "attention_output_gate"),
)
"""Settings of attention layers with keys and values of their own only."""


def head_width(model: ModelConfig) -> int:
    """Channels of a head as attention computes it: the wider of keys and values; the narrower is padded with zeros.

    Raises:
        ConfigError: --kv-channels says another width.
    """
    width = max(model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim)
    if model.kv_channels not in (None, width):
        raise ConfigError(
            f"--kv-channels {model.kv_channels} has no effect with --multi-latent-attention, whose heads have "
            "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim; leave it out"
        )
    return width


def check_latent(model: ModelConfig) -> None:
    """Check a model with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    if not model.multi_latent_attention:
        return
    # Keys and values are made of one latent for each head (DeepSeek-V2, arXiv 2405.04434): there is nothing to group.
    heads, groups = model.num_attention_heads, model.num_query_groups
    require(
        groups == heads,
        f"--num-query-groups {groups}: with --multi-latent-attention all {heads} heads have keys and values of their "
        "own; leave it out",
    )
    require(
        model.position_embedding_type in ("rope", "none"),
        "--multi-latent-attention needs --position-embedding-type rope, which rotates --qk-pos-emb-head-dim channels, "
        "or none, which rotates nothing",
    )
    require(
        model.latent_norm_epsilon is None or model.qk_layernorm,
        f"--latent-norm-epsilon {model.latent_norm_epsilon}: latent vectors have norms with --qk-layernorm only; give "
        "it, or leave this out",
    )
    require(
        model.qk_pos_emb_head_dim % 2 == 0,
        f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}: RoPE needs an even number of channels",
    )
    require(
        model.disable_bias_linear and not (model.add_qkv_bias or model.add_attention_output_bias),
        "--multi-latent-attention has no biases; leave out --no-disable-bias-linear, --add-qkv-bias and "
        "--add-attention-output-bias",
    )
    named = given(model, *_OF_OTHERS)
    require(not named, f"{', '.join(named)} does not exist with --multi-latent-attention; leave it out")
