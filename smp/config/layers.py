"""The layers of a model: flat settings, resolved once to a list of specs (:mod:`smp.config.layer_specs`).

The model, the inventory and FLOPs read the specs. Converters write the patterns of :mod:`smp.config.layer_pattern`,
which they share with the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any, Literal

from smp.config.command_line.fields import require, without_effect
from smp.config.layer_pattern import (
    MOST_LAYERS,
    OF_ATTENTION,
    attends,
    has_feed_forward,
    has_mixer,
    linear,
    no_rope,
    windowed,
    with_experts,
)
from smp.config.layer_specs import (
    Activation,
    AttentionMixer,
    Branch,
    CapacitySpec,
    DeltaNetMixer,
    ExpertsSpec,
    IndexerSpec,
    KimiDeltaMixer,
    LatentMixer,
    LayerSpec,
    MambaMixer,
    MLPSpec,
    NormSpec,
    ParallelMixer,
    QueryTemperature,
    Recurrence,
    RopeScalingSpec,
    RopeSpec,
    single_mixers,
)
from smp.config.model import ModelConfig
from smp.config.rules.dsa import chooses_keys
from smp.config.rules.mtp import mtp_layers
from smp.config.rules.multipliers import mlp_multipliers, ssm_multipliers
from smp.config.rules.positions import longrope_factors
from smp.config.schema import Config

MixerResolver = Callable[[ModelConfig, int], Any]
"""(resolved settings, layer number) -> the spec of its mixer, a frozen dataclass."""


def _attention(model: ModelConfig, layer: int) -> AttentionMixer | LatentMixer:
    """The spec of this layer's attention."""
    has_window = windowed(model)[layer]
    window = model.window_size if has_window else None
    # A base of its own (Gemma 3) is for RoPE in layers with a window.
    rope = None if no_rope(model)[layer] else _rope(model, has_window and model.rotary_base_local is not None)
    if model.multi_latent_attention:
        return LatentMixer(
            heads=model.num_attention_heads,
            kv_rank=model.kv_lora_rank,
            q_rank=model.q_lora_rank,
            plain_dim=model.qk_head_dim,
            rope_dim=model.qk_pos_emb_head_dim,
            value_dim=model.v_head_dim,
            rope=rope,
            norm=model.qk_layernorm,
            norm_eps=model.norm_epsilon if model.latent_norm_epsilon is None else model.latent_norm_epsilon,
            window=window,
            dropout=model.attention_dropout,
            indexer=_indexer(model) if chooses_keys(model) else None,
        )
    groups, head_dim, bias = model.num_query_groups, model.kv_channels, not model.disable_bias_linear
    assert groups is not None and head_dim is not None, "resolved before"
    # Llama 4 scales queries in its layers without RoPE only.
    tuned = model.attn_temperature_tuning and rope is None
    return AttentionMixer(
        heads=model.num_attention_heads,
        groups=groups,
        head_dim=head_dim,
        window=window,
        # Llama 4's chunks are for layers with RoPE; the others see everything.
        chunk=None if rope is None else model.attention_chunk_size,
        rope=rope,
        temperature=QueryTemperature(model.floor_scale, model.attn_scale) if tuned else None,
        scale=model.softmax_scale,
        softcap=model.attn_logit_softcapping,
        alibi=model.position_embedding_type == "alibi",
        sinks=model.softmax_type == "learnable",
        # The two add_..._bias settings give these biases where all others are off (Qwen2: qkv
        # only).
        bias=bias or model.add_attention_output_bias,
        qkv_bias=bias or model.add_qkv_bias,
        gate=model.attention_output_gate,
        norm=_query_norm(model, rope),
        norm_eps=model.norm_epsilon,
        norm_one_plus=model.apply_layernorm_1p,
        dropout=model.attention_dropout,
    )


def _indexer(model: ModelConfig) -> IndexerSpec:
    over_chosen = model.dsa_indexer_use_sparse_loss
    return IndexerSpec(
        heads=model.dsa_indexer_n_heads,
        head_dim=model.dsa_indexer_head_dim,
        topk=model.dsa_indexer_topk,
        interleaved=model.dsa_indexer_rope_interleaved,
        stage="warm-up" if model.dsa_indexer_warmup else "sparse loss" if over_chosen else "dense loss",
    )


def _delta_net(model: ModelConfig, layer: int) -> DeltaNetMixer | KimiDeltaMixer:
    sizes: dict[str, Any] = {
        "key_heads": model.linear_num_key_heads,
        "value_heads": model.linear_num_value_heads,
        "key_dim": model.linear_key_head_dim,
        "value_dim": model.linear_value_head_dim,
        "conv": model.linear_conv_kernel_dim,
        "norm_eps": model.norm_epsilon if model.linear_norm_epsilon is None else model.linear_norm_epsilon,
    }
    if model.linear_attention_type == "kda":
        return KimiDeltaMixer(**sizes)
    return DeltaNetMixer(**sizes, negative=model.linear_allow_neg_eigval)


def _mamba(model: ModelConfig, layer: int) -> MambaMixer:
    assert model.mamba_num_heads is not None, "resolved before"
    # Mamba-2's C and B are queries and keys, its groups their heads; x is values; the state is
    # [key_dim, value_dim].
    return MambaMixer(
        key_heads=model.mamba_num_groups,
        value_heads=model.mamba_num_heads,
        key_dim=model.mamba_state_dim,
        value_dim=model.mamba_head_dim,
        conv=model.linear_conv_kernel_dim,
        norm_eps=model.norm_epsilon,
        steps=(model.mamba_dt_min, model.mamba_dt_max),
        norm=model.mamba_rms_norm,
        multipliers=ssm_multipliers(model),
    )


def _nothing(model: ModelConfig, layer: int) -> None:
    return None


MIXERS: dict[str, MixerResolver] = {"attention": _attention}
"""Kinds of mixers for --layer-types; :func:`smp.models.mixers.register_mixer` adds one."""
_LINEAR: dict[str, MixerResolver] = {"gated_delta_net": _delta_net, "kda": _delta_net, "mamba2": _mamba}
"""By --linear-attention-type."""
_NONE = "none"
_OWN: dict[str, MixerResolver] = {**_LINEAR, _NONE: _nothing}
_ALIKE = ("attention", *_OWN)
"""Kinds whose layers differ by patterns only."""


def layer_specs(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """Specs of all layers of a resolved model, then those of multi-token prediction, which are like the last layer's.

    Raises:
        ConfigError: --layer-types names a kind that does not exist, or other numbers of layers.
    """
    kinds, experts, last = mixer_kinds(model), with_experts(model), model.num_layers - 1
    # Layers of attention that patterns make alike are made once: a planner asks for hundreds of models.
    alike = list(zip(kinds, experts, has_feed_forward(model), windowed(model), no_rope(model), strict=True))
    made: dict[Any, LayerSpec] = {}
    for i, kind in enumerate(alike):
        # A registered mixer may depend on the layer's number: each layer has its own spec.
        key = kind if kinds[i] in _ALIKE else i
        if key not in made:
            # None for a layer of a hybrid pattern that is only a mixer.
            forward = _feed_forward(model, experts[i]) if kind[2] else None
            made[key] = _layer(model, _mixer(model, kinds[i], i), forward)
    specs = [made[kind if kinds[i] in _ALIKE else i] for i, kind in enumerate(alike)]
    # Specs are immutable: the same object may stand for several layers.
    return (*specs, *(specs[last] for _ in mtp_layers(model)))


def _mixer(model: ModelConfig, kind: str, layer: int) -> Any:
    mixer = {**MIXERS, **_OWN}[kind](model, layer)
    if kind not in _LINEAR or not model.linear_attention_parallel:
        return mixer
    attention = Branch("attention", _attention(model, layer), model.attention_out_multiplier)
    # Falcon-H1: attention and Mamba-2 read the same input, and each output has a multiplier.
    return ParallelMixer((attention, Branch("recurrence", mixer, model.ssm_out_multiplier)))


def _feed_forward(model: ModelConfig, has_experts: bool) -> MLPSpec | ExpertsSpec:
    return _experts(model) if has_experts else _mlp(model, model.ffn_hidden_size)


def _layer(model: ModelConfig, mixer: Any, forward: MLPSpec | ExpertsSpec | None) -> LayerSpec:
    # Falcon-H1 has attention and a recurrence in one layer: its norms stand where the recurrence says.
    recurs = any(isinstance(one, Recurrence) for one in single_mixers(mixer))
    own = model.linear_norm_placement if recurs else None
    placement = own or model.norm_placement
    return LayerSpec(
        mixer=mixer,
        feed_forward=forward,
        norm=norm_of(model),
        norm_before=placement in ("pre", "sandwich"),
        norm_after=placement in ("post", "sandwich"),
        parallel=model.parallel_residual,
        shared_norm=model.parallel_residual_shared_norm,
        multiplier=model.residual_multiplier,
        dropout=model.hidden_dropout,
    )


def mixer_kinds(model: ModelConfig) -> tuple[str, ...]:
    """Kind of each layer: from --layer-types, which repeats if it is shorter, or from --linear-attention-type or
    --hybrid-layer-pattern."""
    if model.layer_types is None:
        # Letters of a hybrid pattern without a recurrence type are Megatron's: M is Mamba-2.
        recurrence, pairs = model.linear_attention_type or "mamba2", zip(has_mixer(model), linear(model), strict=True)
        return tuple(recurrence if recurs else "attention" if mixes else _NONE for mixes, recurs in pairs)
    words = tuple(model.layer_types.replace(",", " ").split())
    for word in words:
        known = ", ".join(sorted(MIXERS))
        require(
            word in MIXERS,
            f"--layer-types {model.layer_types}: {word!r} is no kind of layer; known: {known}; a module of yours that "
            "registers it is imported by python -m smp --import MODULE COMMAND",
        )
    require(
        len(words) > 0 and model.num_layers % len(words) == 0,
        f"--layer-types {model.layer_types} names {len(words)} layers, which do not divide --num-layers "
        f"{model.num_layers}",
    )
    return words * (model.num_layers // len(words))


def effective(model: ModelConfig, keep: Container[str] = ()) -> ModelConfig:
    """``model`` with settings that have no effect set to their defaults, except those in ``keep``."""
    model = _without_idle(model, keep)
    if not 0 < model.num_layers <= MOST_LAYERS or any(attends(model)):  # a number that is refused is never looped over
        return model
    # A named size or a folder of which so few layers are taken that none has attention.
    names = [name for name in (*OF_ATTENTION, "num_query_groups", "kv_channels") if name not in keep]
    if model.position_embedding_type == "none":  # as good as any other without attention
        names.append("position_embedding_type")
    return _without_idle(replace(model, **{name: getattr(ModelConfig, name) for name in names}), keep)


def _without_idle(model: ModelConfig, keep: Container[str]) -> ModelConfig:
    # Repeated: settings that needed one of these have no effect now.
    while idle := [s for s in without_effect(Config(model=model), "model") if s.name not in keep]:
        model = replace(model, **{setting.name: setting.default for setting in idle})
    return model


def in_runs(specs: tuple[LayerSpec, ...]) -> list[str]:
    """One line for each kind of layer with the numbers of its layers: ``layers 0-2, 4: ...``."""
    found: dict[str, list[int]] = {}
    # Equal texts, not equal specs: what a user could not tell apart is one line.
    for number, spec in enumerate(specs):
        found.setdefault(str(spec), []).append(number)
    return [
        f"{'layers' if len(numbers) > 1 else 'layer'} {ranges_of(numbers)}: {text}" for text, numbers in found.items()
    ]


def hides_tokens(model: ModelConfig, length: int | None = None) -> bool:
    """Whether some layer has a window or chunks that hide earlier tokens of sequences of ``length``; None: of sequences
    of any length."""
    sizes = {model.window_size, model.attention_chunk_size} - {None}
    return any(length is None or size < length for size in sizes if size is not None)


def scores_flag(model: ModelConfig) -> str:
    """The flag that makes attention's scores more than scale q k^T + mask, which only --attention-backend math
    computes; "" without one."""
    if model.attn_logit_softcapping is not None:
        return f"--attn-logit-softcapping {model.attn_logit_softcapping:g}"
    return "--position-embedding-type alibi" if model.position_embedding_type == "alibi" else ""


def norm_of(model: ModelConfig) -> NormSpec:
    """The norm of the residual stream: around layers, of the embedding, and at the end."""
    bias = model.normalization == "LayerNorm" and model.layernorm_bias
    return NormSpec(model.normalization, model.norm_epsilon, model.apply_layernorm_1p, bias)


def activation_of(model: ModelConfig) -> Activation:
    """The activation of MLPs."""
    if model.swiglu:
        return Activation("swiglu")
    if model.quick_geglu:
        return Activation("quick_geglu", model.activation_func_clamp_value, model.glu_linear_offset)
    # Gated variants first: the switches of a gated MLP may come with --tanh-gelu.
    if model.geglu:
        return Activation("tanh_geglu" if model.tanh_gelu else "geglu")
    if model.relu or model.squared_relu:
        return Activation("relu" if model.relu else "squared_relu")
    return Activation("tanh_gelu" if model.tanh_gelu else "gelu")


def _rope(model: ModelConfig, local: bool) -> RopeSpec:
    if local:
        assert model.rotary_base_local is not None
        return RopeSpec(model.rotary_base_local, model.rotary_channels, model.rotary_interleaved, local=True)
    # Files of latent attention have pairs side by side, whatever the setting is.
    interleaved = model.rotary_interleaved or model.multi_latent_attention
    return RopeSpec(model.rotary_base, model.rotary_channels, interleaved, rope_scaling(model))


def rope_scaling(model: ModelConfig) -> RopeScalingSpec | None:
    """The scaling of a resolved model's RoPE; None: not scaled."""
    if not model.use_rope_scaling:
        return None
    kind = model.rope_scaling_type
    # LongRoPE (Ding et al. 2024, arXiv 2402.13753): a factor for each pair of channels, for short and long sequences.
    short, long = longrope_factors(model) if kind == "longrope" else ((), ())
    return RopeScalingSpec(
        kind=kind,
        factor=model.rope_scaling_factor,
        original_max_position=model.rope_original_max_position,
        max_position=model.max_position_embeddings,
        low_freq_factor=model.rope_low_freq_factor,
        high_freq_factor=model.rope_high_freq_factor,
        beta_fast=model.yarn_beta_fast,
        beta_slow=model.yarn_beta_slow,
        truncate=model.yarn_truncate,
        attention_factor=model.longrope_attention_factor if kind == "longrope" else model.yarn_attention_factor,
        mscale=model.yarn_mscale,
        mscale_all_dim=model.yarn_mscale_all_dim,
        short=short,
        long=long,
    )


def _query_norm(model: ModelConfig, rope: RopeSpec | None) -> Literal["per head", "all heads", "l2"] | None:
    if model.qk_layernorm:
        return "all heads" if model.qk_layernorm_across_heads else "per head"
    # Llama 4 normalizes queries and keys only where it rotates them.
    return "l2" if model.qk_l2_norm and rope is not None else None


def _mlp(model: ModelConfig, width: int | None) -> MLPSpec:
    assert width is not None, "resolved before"
    bias = model.add_mlp_bias or not model.disable_bias_linear
    return MLPSpec(width, activation_of(model), bias, *mlp_multipliers(model))


def _experts(model: ModelConfig) -> ExpertsSpec:
    assert model.num_experts is not None, "asked of a layer with experts"
    shared, factor = model.moe_shared_expert_intermediate_size, model.moe_expert_capacity_factor
    return ExpertsSpec(
        count=model.num_experts,
        topk=model.moe_router_topk,
        expert=_mlp(model, model.moe_ffn_hidden_size),
        shared=None if shared is None else _mlp(model, shared),
        shared_gate=model.moe_shared_expert_gate,
        score_function=model.moe_router_score_function,
        pre_softmax=model.moe_router_pre_softmax,
        scaling_factor=model.moe_router_topk_scaling_factor,
        # Balancing without a loss (Wang et al. 2024, arXiv 2408.15664).
        bias_update_rate=model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else None,
        num_groups=model.moe_router_num_groups,
        group_topk=model.moe_router_group_topk,
        group_score=model.moe_router_group_score,
        balancing=model.moe_router_load_balancing_type,
        capacity=None
        if factor is None
        else CapacitySpec(factor, model.moe_token_drop_policy, model.moe_pad_expert_input_to_capacity),
        weighs_input=model.moe_apply_probs_on_input,
    )


def ranges_of(numbers: list[int]) -> str:
    """Ascending numbers as text with ranges: ``0-2, 4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
