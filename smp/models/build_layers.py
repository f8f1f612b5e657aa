"""The decoder's layers as a configuration asks for them."""

from __future__ import annotations

from functools import partial
from typing import Any

from smp.config import ModelConfig
from smp.config.layer_pattern import layer_attention
from smp.config.moe import has_experts
from smp.kernels import Kernels
from smp.kernels.attention_core import AttentionSpec
from smp.kernels.quick_geglu import QuickGeglu
from smp.layers.attention import QueryKeyOptions, SelfAttention
from smp.layers.block import MoEBlock, TransformerBlock
from smp.layers.head import VocabParallelHead
from smp.layers.latent_attention import LatentAttention
from smp.layers.mlp import MLP, Activation
from smp.layers.moe import Experts, MoE, Router, SharedExpertGate
from smp.layers.moe.capacity import Capacity
from smp.layers.moe.router import Balancing
from smp.layers.norm import LayerNorm, Norm, RMSNorm
from smp.layers.prediction import Prediction
from smp.layers.score import ScoreHead
from smp.models.rope_scaling import latent_scale
from smp.parallel.context import ParallelContext


def activation_of(config: ModelConfig) -> Activation | QuickGeglu:
    """The MLP's activation that the switches name."""
    if config.swiglu:
        return "swiglu"
    if config.quick_geglu:
        return QuickGeglu(config.activation_func_clamp_value, config.glu_linear_offset)
    if config.geglu:
        return "tanh_geglu" if config.tanh_gelu else "geglu"
    if config.relu or config.squared_relu:
        return "relu" if config.relu else "squared_relu"
    return "tanh_gelu" if config.tanh_gelu else "gelu"


def build_norm(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> Norm:
    options: dict[str, Any] = {"eps": config.norm_epsilon, "one_plus": config.apply_layernorm_1p, "kernels": kernels}
    if config.normalization == "RMSNorm":
        return RMSNorm(config.hidden_size, context, **options)
    return LayerNorm(config.hidden_size, context, bias=config.layernorm_bias, **options)


def build_block(config: ModelConfig, context: ParallelContext, kernels: Kernels, layer: int) -> TransformerBlock:
    """Block number ``layer`` of the whole model."""
    attention, experts = _attention(config, context, kernels, layer), has_experts(config, layer)
    before, behind = (config.norm_placement in kinds for kinds in (("pre", "sandwich"), ("post", "sandwich")))
    # In the order attention, MLP, behind attention, behind the MLP.
    wanted = before, before and not config.parallel_residual_shared_norm, behind, behind
    norms = [build_norm(config, context, kernels) if there else None for there in wanted]
    kind = MoEBlock if experts else TransformerBlock
    return kind(
        attention,
        _moe(config, context, kernels) if experts else _mlp(config, config.ffn_hidden_size, context, kernels),
        norms[0],
        norms[1],
        attention_post_norm=norms[2],
        mlp_post_norm=norms[3],
        parallel_residual=config.parallel_residual,
        multiplier=config.residual_multiplier,
        dropout=config.hidden_dropout,
    )


def _attention(
    config: ModelConfig, context: ParallelContext, kernels: Kernels, layer: int
) -> SelfAttention | LatentAttention:
    if config.multi_latent_attention:
        return _latent_attention(config, context, kernels)
    bias, own = not config.disable_bias_linear, layer_attention(config, layer)
    std, output_std = _stds(config)
    return SelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        context,
        num_groups=config.num_query_groups,
        head_dim=config.kv_channels,
        bias=bias,
        qkv_bias=bias or config.add_qkv_bias,
        query_key=QueryKeyOptions(
            norm_eps=config.norm_epsilon if config.qk_layernorm else None,
            norm_across_heads=config.qk_layernorm_across_heads,
            norm_one_plus=config.apply_layernorm_1p,
            rope=own.rope,
            rope_interleaved=config.rotary_interleaved,
            l2_norm_eps=config.norm_epsilon if config.qk_l2_norm and own.rope is not None else None,
            query_scaled=config.attn_temperature_tuning and own.rope is None,
        ),
        spec=AttentionSpec(
            window=own.window,
            scale=config.softmax_scale,
            dropout=config.attention_dropout,
            softcap=config.attn_logit_softcapping,
            alibi_heads=config.num_attention_heads if config.position_embedding_type == "alibi" else None,
        ),
        chunk=own.chunk,
        sinks=config.softmax_type == "learnable",
        init_std=std,
        output_std=output_std,
        kernels=kernels,
    )


def _latent_attention(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> LatentAttention:
    std, output_std = _stds(config)
    return LatentAttention(
        config.hidden_size,
        config.num_attention_heads,
        context,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_head_dim=config.qk_head_dim,
        rope_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        norm_eps=config.norm_epsilon if config.qk_layernorm else None,
        scale=latent_scale(config),
        window=config.window_size,
        dropout=config.attention_dropout,
        init_std=std,
        output_std=output_std,
        kernels=kernels,
    )


def build_prediction(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> Prediction:
    """What stands around the block of a layer of multi-token prediction."""
    make_norm = partial(build_norm, config, context, kernels)
    return Prediction(config.hidden_size, context, make_norm, init_std=config.init_method_std)


def build_head(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> VocabParallelHead | ScoreHead:
    assert config.vocab_size is not None
    if config.scalar_head:
        return ScoreHead(config.hidden_size, context, init_std=config.init_method_std)
    return VocabParallelHead(
        config.vocab_size,
        config.hidden_size,
        context,
        tied=not config.untie_embeddings_and_output_weights,
        divisible_by=config.make_vocab_size_divisible_by,
        init_std=config.init_method_std,
        softcap=config.final_logit_softcapping,
        kernels=kernels,
    )


def _stds(config: ModelConfig) -> tuple[float, float]:
    """Of initial weights, inner ones and those that write to the residual stream."""
    return config.init_method_std, config.init_method_std / (2 * config.num_layers) ** 0.5


def _mlp(config: ModelConfig, ffn_hidden_size: int | None, context: ParallelContext, kernels: Kernels) -> MLP:
    assert ffn_hidden_size is not None, "resolved before"
    std, output_std = _stds(config)
    return MLP(
        config.hidden_size,
        ffn_hidden_size,
        context,
        activation=activation_of(config),
        bias=not config.disable_bias_linear,
        init_std=std,
        output_std=output_std,
        kernels=kernels,
    )


def _moe(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> MoE:
    assert config.num_experts is not None and config.moe_ffn_hidden_size is not None, "resolved before"
    std, output_std = _stds(config)
    kind = config.moe_router_load_balancing_type
    balancing: Balancing = "aux_loss" if kind == "none" or kind == "sinkhorn" else kind  # what the log says of loads
    router = Router(
        config.hidden_size,
        config.num_experts,
        config.moe_router_topk,
        context,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        scaling_factor=config.moe_router_topk_scaling_factor or 1.0,
        bias_update_rate=config.moe_router_bias_update_rate if config.moe_router_enable_expert_bias else None,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_score=config.moe_router_group_score,
        balancing=balancing,
        bias=not config.disable_bias_linear,
        sinkhorn=kind == "sinkhorn",
        init_std=std,
        kernels=kernels,
    )
    experts = Experts(
        config.num_experts,
        config.hidden_size,
        config.moe_ffn_hidden_size,
        context,
        activation=activation_of(config),
        bias=not config.disable_bias_linear,
        init_std=std,
        output_std=output_std,
        kernels=kernels,
    )
    width = config.moe_shared_expert_intermediate_size
    shared = None if width is None else _mlp(config, width, context, kernels)
    gate = SharedExpertGate(config.hidden_size, context, init_std=std) if config.moe_shared_expert_gate else None
    factor, policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
    capacity = (
        None if factor is None else Capacity(factor, policy, context.cp_group, config.moe_pad_expert_input_to_capacity)
    )
    return MoE(
        router,
        experts,
        context,
        shared=shared,
        gate=gate,
        capacity=capacity,
        weighs_input=config.moe_apply_probs_on_input,
        kernels=kernels,
    )
