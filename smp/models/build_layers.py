"""The decoder's layers from their specs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from smp.config import ModelConfig
from smp.config import layer_specs as specs
from smp.kernels import Kernels
from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.quick_geglu import QuickGeglu
from smp.layers.attention import QueryKeyOptions, SelfAttention
from smp.layers.block import MoEBlock, TransformerBlock
from smp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from smp.layers.heads.head import VocabParallelHead
from smp.layers.heads.prediction import Prediction
from smp.layers.heads.score import ScoreHead
from smp.layers.latent_attention import LatentAttention
from smp.layers.mixer import Mixer
from smp.layers.mlp import MLP, Activation
from smp.layers.moe import Experts, MoE, Router, SharedExpertGate
from smp.layers.moe.capacity import Capacity
from smp.layers.moe.router import Balancing
from smp.layers.norm import LayerNorm, Norm, RMSNorm
from smp.layers.parallel_mixers import ParallelMixers
from smp.layers.recurrences.delta_net import GatedDeltaNet
from smp.layers.recurrences.kimi_delta import KimiDeltaAttention
from smp.layers.recurrences.mamba import Mamba2
from smp.layers.sparse_attention import IndexerOptions, SparseLatentAttention
from smp.layers.token_needs import QueryScale, RopeTable
from smp.models.rope_scaling import latent_scale, scaling_of
from smp.parallel.context import ParallelContext


@dataclass(frozen=True)
class Build:
    """Settings that all layers of a model share, and builders of their parts.

    Attributes:
        hidden_size: width of the residual stream.
        init_std, output_std: of initial weights, inner ones and those that write to the residual stream.
        context: meshes and groups.
        kernels: what computes attention and the operations that have fused kernels.
    """

    hidden_size: int
    init_std: float
    output_std: float
    context: ParallelContext
    kernels: Kernels

    @staticmethod
    def of(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> Build:
        """The builder for a model of this configuration."""
        std = config.init_method_std
        # GPT-2 (Radford et al. 2019): 2 x layers terms are added to the residual stream, so what
        # writes to it starts smaller. Layers of the whole model, on every pipeline stage.
        return Build(config.hidden_size, std, std / (2 * config.num_layers) ** 0.5, context, kernels)

    @property
    def drawn(self) -> dict[str, Any]:
        """Arguments of every layer that has weights inside and at its end."""
        return {"init_std": self.init_std, "output_std": self.output_std, "kernels": self.kernels}

    def norm(self, spec: specs.NormSpec) -> Norm:
        """A norm of the residual stream."""
        options: dict[str, Any] = {"eps": spec.eps, "one_plus": spec.one_plus, "kernels": self.kernels}
        if spec.kind == "RMSNorm":
            return RMSNorm(self.hidden_size, self.context, **options)
        return LayerNorm(self.hidden_size, self.context, bias=spec.bias, **options)

    def block(self, spec: specs.LayerSpec) -> TransformerBlock:
        """One layer: the mixer and the feed-forward network with norms and residual connections around them."""
        # Pre-norm, post-norm (OLMo 2) or both ("sandwich", Gemma 2).
        before, after = spec.norm_before, spec.norm_after
        # A hybrid's layer (``hybrid_layer_pattern``) may be one of the two alone, with one norm.
        mixes, feeds = spec.mixer is not None, spec.feed_forward is not None
        # In the order mixer, feed-forward network, after the mixer, after the feed-forward network.
        wanted = before and mixes, before and feeds and not spec.shared_norm, after and mixes, after and feeds
        norms = [self.norm(spec.norm) if there else None for there in wanted]
        kind = MoEBlock if spec.has_experts else TransformerBlock
        return kind(
            # By the type of the spec, so that a registered mixer needs no branch here.
            MIXER_BUILDERS[type(spec.mixer)](spec.mixer, self) if mixes else None,
            self._feed_forward(spec.feed_forward),
            norms[0],
            norms[1],
            attention_post_norm=norms[2],
            mlp_post_norm=norms[3],
            parallel_residual=spec.parallel,
            multiplier=spec.multiplier,
            dropout=spec.dropout,
        )

    def _feed_forward(self, spec: specs.MLPSpec | specs.ExpertsSpec | None) -> MLP | MoE | None:
        if spec is None:
            return None
        return self.experts(spec) if isinstance(spec, specs.ExpertsSpec) else self.mlp(spec)

    def mlp(self, spec: specs.MLPSpec) -> MLP:
        """A dense feed-forward network."""
        return MLP(
            self.hidden_size,
            spec.width,
            self.context,
            activation=activation_of(spec.activation),
            bias=spec.bias,
            gate_multiplier=spec.gate_multiplier,
            multiplier=spec.multiplier,
            **self.drawn,
        )

    def experts(self, spec: specs.ExpertsSpec) -> MoE:
        """A mixture of experts."""
        experts = Experts(
            spec.count,
            self.hidden_size,
            spec.expert.width,
            self.context,
            activation=activation_of(spec.expert.activation),
            bias=spec.expert.bias,
            **self.drawn,
        )
        capacity = spec.capacity
        return MoE(
            self._router(spec),
            experts,
            self.context,
            # A dense MLP for every token, cut over TP as any other.
            shared=None if spec.shared is None else self.mlp(spec.shared),
            gate=SharedExpertGate(self.hidden_size, self.context, init_std=self.init_std) if spec.shared_gate else None,
            capacity=None
            if capacity is None
            # A capacity is of whole sequences, which context-parallel ranks share.
            else Capacity(capacity.factor, capacity.policy, self.context.cp_group, capacity.pad),
            weighs_input=spec.weighs_input,
            kernels=self.kernels,
        )

    def _router(self, spec: specs.ExpertsSpec) -> Router:
        kind = spec.balancing
        balancing: Balancing = (
            "aux_loss" if kind == "none" or kind == "sinkhorn" else kind
        )  # what the log says of loads
        return Router(
            self.hidden_size,
            spec.count,
            spec.topk,
            self.context,
            score_function=spec.score_function,
            pre_softmax=spec.pre_softmax,
            scaling_factor=spec.scaling_factor or 1.0,
            bias_update_rate=spec.bias_update_rate,
            num_groups=spec.num_groups,
            group_topk=spec.group_topk,
            group_score=spec.group_score,
            balancing=balancing,
            bias=spec.expert.bias,
            sinkhorn=kind == "sinkhorn",
            init_std=self.init_std,
            kernels=self.kernels,
        )


def activation_of(spec: specs.Activation) -> Activation | QuickGeglu:
    """An activation's spec as the ``activation`` argument of layers."""
    return QuickGeglu(spec.clamp, spec.linear_offset) if spec.kind == "quick_geglu" else spec.kind


def _attention(spec: specs.AttentionMixer, build: Build) -> SelfAttention:
    rope, temperature = spec.rope, spec.temperature
    # Layers with equal settings make equal tables, which are prepared once.
    table = None if rope is None else RopeTable(rope.base, rope.channels, scaling_of(rope.scaling))
    # Tables are made once for each micro-batch and shared by the layers that name the same key.
    scaled = None if temperature is None else QueryScale(temperature.floor_scale, temperature.scale)
    return SelfAttention(
        build.hidden_size,
        spec.heads,
        build.context,
        num_groups=spec.groups,
        head_dim=spec.head_dim,
        bias=spec.bias,
        qkv_bias=spec.qkv_bias,
        query_key=QueryKeyOptions(
            norm_eps=spec.norm_eps if spec.norm in ("per head", "all heads") else None,
            norm_across_heads=spec.norm == "all heads",
            norm_one_plus=spec.norm_one_plus,
            rope=None if table is None else table.key,
            rope_interleaved=rope is not None and rope.interleaved,
            l2_norm_eps=spec.norm_eps if spec.norm == "l2" else None,
            query_scale=None if scaled is None else scaled.key,
        ),
        spec=AttentionSpec(
            window=spec.window,
            scale=spec.scale,
            dropout=spec.dropout,
            softcap=spec.softcap,
            # The number of heads of the whole model: slopes follow from it, whatever TP cuts.
            alibi_heads=spec.heads if spec.alibi else None,
        ),
        chunk=spec.chunk,
        needs=tuple(need for need in (table, scaled) if need is not None),
        gate=spec.gate,
        sinks=spec.sinks,
        **build.drawn,
    )


def _latent_attention(spec: specs.LatentMixer, build: Build) -> LatentAttention:
    rope = spec.rope
    table = None if rope is None else RopeTable(rope.base, rope.channels, scaling_of(rope.scaling))
    chooses: dict[str, Any] = {}
    kind: type[LatentAttention] = LatentAttention
    if (indexer := spec.indexer) is not None:
        sizes = indexer.heads, indexer.head_dim, indexer.topk
        chooses, kind = {"indexer": IndexerOptions(*sizes, indexer.interleaved, indexer.stage)}, SparseLatentAttention
    return kind(
        build.hidden_size,
        spec.heads,
        build.context,
        **chooses,
        kv_lora_rank=spec.kv_rank,
        q_lora_rank=spec.q_rank,
        qk_head_dim=spec.plain_dim,
        rope_dim=spec.rope_dim,
        v_head_dim=spec.value_dim,
        norm_eps=spec.norm_eps if spec.norm else None,
        # With YaRN's growth, which the layer could not compute from its widths.
        scale=latent_scale(spec),
        window=spec.window,
        dropout=spec.dropout,
        rope=None if table is None else table.key,
        needs=() if table is None else (table,),
        **build.drawn,
    )


def _delta_net(spec: specs.DeltaNetMixer, build: Build) -> Mixer:
    return GatedDeltaNet(
        build.hidden_size,
        spec.key_heads,
        spec.value_heads,
        build.context,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        conv=spec.conv,
        norm_eps=spec.norm_eps,
        negative=spec.negative,
        **build.drawn,
    )


def _kimi_delta(spec: specs.KimiDeltaMixer, build: Build) -> Mixer:
    return KimiDeltaAttention(
        build.hidden_size,
        spec.value_heads,
        build.context,
        head_dim=spec.value_dim,
        conv=spec.conv,
        norm_eps=spec.norm_eps,
        **build.drawn,
    )


def _mamba(spec: specs.MambaMixer, build: Build) -> Mixer:
    least, largest = spec.steps
    return Mamba2(
        build.hidden_size,
        spec.value_heads,
        spec.key_heads,
        build.context,
        head_dim=spec.value_dim,
        state_dim=spec.key_dim,
        conv=spec.conv,
        step_limits=(least, math.inf if largest is None else largest),
        norm_eps=spec.norm_eps if spec.norm else None,
        multipliers=spec.multipliers,
        **build.drawn,
    )


def _parallel(spec: specs.ParallelMixer, build: Build) -> Mixer:
    built = {branch.name: MIXER_BUILDERS[type(branch.mixer)](branch.mixer, build) for branch in spec.branches}
    return ParallelMixers(built, [branch.multiplier for branch in spec.branches])


MixerBuilder = Callable[[Any, Build], Mixer]
MIXER_BUILDERS: dict[type, MixerBuilder] = {
    specs.AttentionMixer: _attention,
    specs.LatentMixer: _latent_attention,
    specs.DeltaNetMixer: _delta_net,
    specs.KimiDeltaMixer: _kimi_delta,
    specs.MambaMixer: _mamba,
    specs.ParallelMixer: _parallel,
}
"""Builders by the type of a mixer's spec; :func:`smp.models.mixers.register_mixer` adds one."""


def build_embedding(config: ModelConfig, context: ParallelContext, dtype: torch.dtype | None) -> VocabParallelEmbedding:
    """The embedding, whose result has ``dtype``; None: that of its weight."""
    assert config.vocab_size is not None
    return VocabParallelEmbedding(
        config.vocab_size,
        config.hidden_size,
        context,
        divisible_by=config.make_vocab_size_divisible_by,
        init_std=config.init_method_std,
        compute_dtype=dtype,
    )


def build_positions(config: ModelConfig, context: ParallelContext, dtype: torch.dtype | None) -> PositionEmbedding:
    """Learned positions (GPT-2, OPT), in ``dtype`` as the embedding."""
    return PositionEmbedding(
        config.max_position_embeddings,
        config.hidden_size,
        context,
        offset=config.position_embedding_offset,
        init_std=config.init_method_std,
        compute_dtype=dtype,
    )


def build_prediction(config: ModelConfig, build: Build, norm: specs.NormSpec) -> Prediction:
    """Norms and projection around the block of a layer of multi-token prediction."""
    return Prediction(config.hidden_size, build.context, partial(build.norm, norm), init_std=config.init_method_std)


def build_head(config: ModelConfig, context: ParallelContext, kernels: Kernels) -> VocabParallelHead | ScoreHead:
    """The output layer and the loss."""
    assert config.vocab_size is not None
    if config.scalar_head:
        return ScoreHead(config.hidden_size, context, init_std=config.init_method_std)
    return VocabParallelHead(
        config.vocab_size,
        config.hidden_size,
        context,
        # The model passes the embedding's matrix to a tied head in each forward pass.
        tied=not config.untie_embeddings_and_output_weights,
        divisible_by=config.make_vocab_size_divisible_by,
        init_std=config.init_method_std,
        softcap=config.final_logit_softcapping,
        kernels=kernels,
    )
