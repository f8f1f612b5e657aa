"""Checks of layers with a linear recurrence, and of layers that are only one part."""

from __future__ import annotations

from smp.config.command_line.fields import flag_of, given, require
from smp.config.layer_pattern import (
    ATTENTION,
    DELTA_RULES,
    EXPERTS,
    MAMBA,
    MLP,
    OF_ATTENTION,
    OF_FEED_FORWARD,
    attends,
    has_feed_forward,
    linear,
)
from smp.config.model import ModelConfig

OF_MAMBA = (
    *("linear_conv_kernel_dim", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    *("mamba_dt_min", "mamba_dt_max", "mamba_rms_norm", "ssm_multipliers"),
)


def check_linear(model: ModelConfig, tp: int) -> None:
    """Check a model with its defaults filled in, whose heads ``tp`` processes share.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    if model.linear_attention_type is not None:
        require(
            model.layer_types is None,
            f"--layer-types {model.layer_types} and --linear-attention-type {model.linear_attention_type} both say "
            "what layers are; leave out one",
        )
    if model.linear_attention_type in DELTA_RULES:
        _check_delta_net(model, tp)
    elif any(linear(model)):
        _check_mamba(model, tp)
    if model.linear_attention_parallel:
        require(
            not model.multi_latent_attention,
            "--linear-attention-parallel and --multi-latent-attention exclude each other: attention next to a "
            "recurrence has keys and values of its own; leave out one",
        )
    if not any(attends(model)):
        _check_without_attention(model)


def check_pattern(model: ModelConfig) -> None:
    """Check --hybrid-layer-pattern of a model with its defaults filled in. Called before anything that asks what layers
    are.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    letters, known = model.hybrid_layer_pattern, MAMBA + ATTENTION + MLP + EXPERTS
    if letters is None:
        return
    where = f"--hybrid-layer-pattern {letters}"
    for flag in given(model, "layer_types", "linear_attention_type"):
        require(False, f"{flag} and {where} both say what layers are; leave out one")
    for flag in given(model, "parallel_residual", "mtp_num_layers"):
        require(False, f"{flag} and {where} exclude each other: its layers are one part alone; leave out one")
    for flag in given(model, "moe_layer_freq"):
        require(False, f"{flag} and {where} both say which layers have experts; leave out {flag}")
    strange = sorted(set(letters) - set(known))
    require(
        bool(letters) and not strange,
        f"{where}: {strange[0]!r} is no kind of layer; M is Mamba-2, * attention, - an MLP, E experts"
        if strange
        else "--hybrid-layer-pattern names no layers",
    )
    require(
        len(letters) == model.num_layers,
        f"{where} names {len(letters)} layers of {model.num_layers}; give --num-layers {len(letters)}",
    )
    has_experts = EXPERTS in letters
    require(
        has_experts or model.num_experts is None,
        f"{where} leaves no layer with experts (E); leave out --num-experts",
    )
    require(not has_experts or model.num_experts is not None, f"{where} has layers with experts: give --num-experts")
    if MAMBA not in letters:
        named = given(model, *OF_MAMBA)
        require(not named, f"{', '.join(named)}: {where} has no layer with Mamba-2 (M); leave it out")
    if not any(has_feed_forward(model)):
        width = [] if model.ffn_hidden_size == model.default_ffn else ["ffn_hidden_size"]
        named = given(model, *width, *OF_FEED_FORWARD)
        # Attention layers have biases, too, which this flag gives them.
        bias = any(attends(model)) and "--no-disable-bias-linear" in named
        named = [flag for flag in named if not (bias and flag == "--no-disable-bias-linear")]
        require(not named, f"{', '.join(named)}: {where} has no layer with an MLP (-) or experts (E); leave it out")


def _check_delta_net(model: ModelConfig, tp: int) -> None:
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if model.linear_attention_type == "kda":
        # Kimi delta attention has one decay for each channel of a key, so heads come in pairs of one width.
        _check_alike(model, "linear_num_key_heads", "linear_num_value_heads")
        _check_alike(model, "linear_key_head_dim", "linear_value_head_dim")
    require(
        values % keys == 0,
        f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}; change one of them",
    )
    # A value head reads the key head of its group, so both must be on the same process.
    require(
        keys % tp == 0,
        f"--linear-num-key-heads {keys} is not divisible by --tensor-model-parallel-size {tp}; change one of them",
    )


def _check_alike(model: ModelConfig, one: str, other: str) -> None:
    require(
        getattr(model, one) == getattr(model, other),
        f"--linear-attention-type kda: {flag_of(one)} {getattr(model, one)} and {flag_of(other)} "
        f"{getattr(model, other)} must be the same number; give both",
    )


def _check_mamba(model: ModelConfig, tp: int) -> None:
    heads, groups = model.mamba_num_heads, model.mamba_num_groups
    assert heads is not None, "resolved before"
    require(
        heads % groups == 0,
        f"--mamba-num-heads {heads} is not divisible by --mamba-num-groups {groups}; change one of them",
    )
    require(
        heads % tp == 0,
        f"--mamba-num-heads {heads} is not divisible by --tensor-model-parallel-size {tp}; change one of them",
    )
    # A single group is on every process; several must be whole on each.
    require(
        groups == 1 or groups % tp == 0,
        f"--mamba-num-groups {groups} is neither 1 nor divisible by --tensor-model-parallel-size {tp}: a group's norm "
        "would be of some of the processes; change one of them",
    )
    largest = model.mamba_dt_max
    require(
        largest is None or largest > model.mamba_dt_min,
        f"--mamba-dt-max {largest} is not above --mamba-dt-min {model.mamba_dt_min}; change one of them",
    )


def _check_without_attention(model: ModelConfig) -> None:
    """Refuse settings of attention in a model without attention layers."""
    named = given(model, *OF_ATTENTION)
    # The derived number of groups is no wish of the user.
    if model.num_query_groups != model.num_attention_heads:
        named += given(model, "num_query_groups")
    if model.kv_channels != model.hidden_size // model.num_attention_heads:
        named += given(model, "kv_channels")
    if model.position_embedding_type == "alibi":
        named += given(model, "position_embedding_type")
    if model.hybrid_layer_pattern is not None:
        require(
            not named,
            f"{', '.join(named)}: --hybrid-layer-pattern {model.hybrid_layer_pattern} has no layer with attention "
            "(*); leave it out",
        )
    require(
        not named,
        f"{', '.join(named)}: all layers have --linear-attention-type {model.linear_attention_type}, none has "
        "attention; leave it out, or give some attention with --linear-attention-freq",
    )
