"""What the parity matrix runs: a problem (the math) and a layout (how it is spread), and sets of them that cover pairs.

A problem has one right answer, whatever the layout. Sizes are small and awkward on purpose: a width that 4 does not
divide, a vocabulary of 33, an odd number of tokens per micro-batch, so that shards are uneven and everything is padded.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from smp.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from smp.config.resolve import resolve

SEED = 7
MAX_WORLD = 8
CLIP = 0.2
"""Below the gradient norm of every step of every problem (tested), so that clipping bites."""


@dataclass(frozen=True)
class Problem:
    """Model, data and optimizer.

    Attributes:
        style: "llama" (RMSNorm, RoPE, SwiGLU) or "gpt2" (LayerNorm, learned positions, GELU, biases).
        tied: the output layer shares the embedding's matrix.
        vocab: number of token ids, and what the rows per rank are padded to a multiple of.
        heads, kv_heads: query heads and key/value heads.
        extra: a bundle of less common switches, see ``_EXTRAS`` and ``_FAMILIES``.
        dropout: on the residual stream and on attention probabilities.
        unequal: labels left out at random, and all labels of one micro-batch of one rank in each step.
        clip: clipping that bites.
        packed: sequences hold several documents, which do not see each other and count positions each from 0.
        length: tokens per sample.
        micro_batch: samples of one micro-batch in the layout that the problem was made for.
        micro_batches: their number over all ranks in one step.
        layers: number of blocks.
        experts: layers with experts, see ``_EXPERTS``; "": dense ones.
        mtp: layers of multi-token prediction.
        fp8: recipe of its linear layers' scales, emulated, in a model that is fp64 otherwise; "": no FP8.
        steps: of training. Gradients are compared at the first, from equal weights, and the last.
        optimizer: as --optimizer says it. Adam amplifies noise, so bits are compared after it or nothing.
    """

    style: str = "llama"
    tied: bool = False
    vocab: tuple[int, int] = (33, 8)
    heads: int = 4
    kv_heads: int = 4
    extra: str = "plain"
    dropout: bool = False
    unequal: bool = False
    clip: bool = False
    packed: bool = False
    length: int = 15
    micro_batch: int = 1
    micro_batches: int = 1
    layers: int = 2
    experts: str = ""
    mtp: int = 0
    fp8: str = ""
    steps: int = 10
    optimizer: str = "sgd"

    @property
    def recorded_steps(self) -> tuple[int, int]:
        """Steps whose gradients are kept."""
        return 0, self.steps - 1

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.micro_batch * self.micro_batches


@dataclass(frozen=True)
class Spread:
    """Layout, accumulation, recompute, precision and compilation: none of it may change the answer (bf16 rounds)."""

    tp: int = 1
    sp: bool = False
    shard: int = 1
    replicate: int = 1
    accumulation: int = 1
    recompute: str = "none"
    bf16: bool = False
    compile: bool = False
    pp: int = 1
    schedule: str | None = None
    placement: str | None = None
    reshard: bool = False
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    exchange: str = "p2p"  # of context-parallel ranks; "a2a+p2p" in groups of two
    host_steps: bool = False  # of the optimizer, on the host
    fp8_gather: bool = False  # weights travel as 8-bit numbers
    horizon: int = 0  # blocks with activations on the device, the others' are offloaded; 0: all are on the device
    chunk_bytes: int | None = None  # of logits at a time; None: as users have it, more than these problems have

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.shard * self.replicate

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.tp * self.cp * self.data_parallel


@dataclass(frozen=True)
class Case:
    """One run: a problem, its layout, and for the negative control what is broken in it."""

    problem: Problem
    spread: Spread
    sabotage: str = ""

    @property
    def one_rank(self) -> Case:
        """The run that this one is compared with: one process, one micro-batch, nothing recomputed or compiled."""
        return Case(self.problem, Spread(bf16=self.spread.bf16, accumulation=self._counted_together))

    @property
    def one_rank_fp32(self) -> Case:
        """The same in fp32."""
        return Case(self.problem, Spread(accumulation=self._counted_together))

    @property
    def _counted_together(self) -> int:
        """Micro-batches of a rank: loads of experts are counted over those that ranks compute at the same time, and so
        are maxima of tensorwise scales. One process has as many then, each of the rows of all of them."""
        together = self.problem.experts or self.problem.fp8 in ("tensorwise", "nvfp4")
        return self.spread.accumulation if together else 1

    def __str__(self) -> str:
        """Name of the test, every setting spelled out."""
        p, s = self.problem, self.spread
        words = [
            "" if s.pp == 1 else f"pp{s.pp}-{s.schedule}{'-reshard' if s.reshard else ''}",
            f"tp{s.tp}{'sp' if s.sp else ''}-shard{s.shard}-rep{s.replicate}-acc{s.accumulation}",
            f"ep{s.ep}" if p.experts else "",
            "" if s.etp is None else f"etp{s.etp}",
            "" if s.cp == 1 else f"cp{s.cp}-{s.exchange}",
            p.experts,
            f"mtp{p.mtp}" if p.mtp else "",
            p.fp8,
            f"{p.style}-{p.extra}-{'tied' if p.tied else 'untied'}",
            f"vocab{p.vocab[0]}by{p.vocab[1]}-kv{p.kv_heads}of{p.heads}",
            f"{p.micro_batches}x{p.micro_batch}x{p.length}",
            "" if s.recompute == "none" else s.recompute,
            f"horizon{s.horizon}" if s.horizon else "",
            "host-steps" if s.host_steps else "",
            "fp8-gather" if s.fp8_gather else "",
            *(name for name in ("dropout", "unequal", "clip", "packed") if getattr(p, name)),
            *(name for name in ("bf16", "compile") if getattr(s, name)),
            "" if s.chunk_bytes is None else f"chunks{s.chunk_bytes}",
            self.sabotage,
        ]
        return "-".join(word for word in words if word)


_STYLES: dict[str, dict[str, Any]] = {
    "llama": {"rotary_base": 100.0},
    "gpt2": {
        "normalization": "LayerNorm",
        "swiglu": False,
        "position_embedding_type": "learned_absolute",
        "disable_bias_linear": False,
    },
}
_EXTRAS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"llama": {}, "gpt2": {"tanh_gelu": True}},
    "window": {"llama": {"window_size": 3, "add_qkv_bias": True}, "gpt2": {"window_size": 3, "squared_relu": True}},
    "parallel": {"llama": {"parallel_residual": True, "rotary_percent": 0.5}, "gpt2": {"parallel_residual": True}},
    "qknorm": {
        "llama": {"qk_layernorm": True, "use_rope_scaling": True, "rope_original_max_position": 64},
        "gpt2": {"qk_layernorm": True, "tanh_gelu": True},
    },
}


_DSA: dict[str, Any] = {
    **{"rotary_base": 100.0, "multi_latent_attention": True, "qk_layernorm": True, "kv_channels": None},
    **{"num_query_groups": None, "q_lora_rank": 7, "kv_lora_rank": 10, "qk_head_dim": 4, "qk_pos_emb_head_dim": 6},
    **{"v_head_dim": 5, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6, "dsa_indexer_topk": 4},
    **{"dsa_indexer_head_dim": 8, "dsa_indexer_loss_coeff": 0.7},
}
_FALCON_H1: dict[str, Any] = {  # attention and Mamba-2 in each layer
    **{"linear_attention_type": "mamba2", "linear_attention_parallel": True, "linear_conv_kernel_dim": 3},
    **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 3, "mamba_state_dim": 5},
    **{"mamba_rms_norm": False, "ssm_multipliers": "0.7 1.5 1.2 0.8 2.0"},
    **{"attention_out_multiplier": 0.7, "ssm_out_multiplier": 1.3, "softmax_scale": 0.6, "logit_scale": 0.5},
    **{"embedding_multiplier": 3.0, "norm_epsilon": 1e-3},
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {  # of all three at once
        **{"swiglu": False, "geglu": True, "tanh_gelu": True, "apply_layernorm_1p": True, "qk_layernorm": True},
        **{"norm_placement": "sandwich", "window_size": 3, "window_attn_skip_freq": "2", "rotary_base_local": 50.0},
        **{"attn_logit_softcapping": 1.0, "final_logit_softcapping": 0.8, "softmax_scale": 0.3},
        **{"embedding_multiplier": 10.0},
    },
    "attention bias": {"add_qkv_bias": True, "add_attention_output_bias": True},
    "mlp bias": {"add_mlp_bias": True},
    "dynamic": {
        **{"rotary_base": 100.0, "use_rope_scaling": True, "rope_scaling_type": "dynamic"},
        **{"rope_scaling_factor": 3.0, "rope_original_max_position": 6},
    },
    "olmo": {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True, "no_rope_freq": "2"},
    "command": {
        **{"normalization": "LayerNorm", "layernorm_bias": False, "parallel_residual": True},
        **{"parallel_residual_shared_norm": True, "rotary_interleaved": True, "rotary_percent": 0.5},
        **{"logit_scale": 0.5, "residual_multiplier": 0.6, "embedding_multiplier": 3.0},
    },
    "bloom": {
        **{"normalization": "LayerNorm", "swiglu": False, "tanh_gelu": True, "disable_bias_linear": False},
        **{"position_embedding_type": "alibi", "embedding_layernorm": True},
    },
    "hybrid": {
        **{"linear_attention_type": "gated_delta_net", "linear_attention_freq": "2", "linear_conv_kernel_dim": 3},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 5, "norm_epsilon": 1e-3},
        **{"linear_value_head_dim": 3, "attention_output_gate": True, "qk_layernorm": True},
        **{"apply_layernorm_1p": True, "rotary_base": 100.0, "rotary_percent": 0.5},
    },
    "olmo hybrid": {
        **{"linear_attention_type": "gated_delta_net", "linear_attention_freq": "2", "linear_conv_kernel_dim": 3},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 5, "norm_epsilon": 1e-3},
        **{"linear_value_head_dim": 3, "linear_allow_neg_eigval": True, "linear_norm_epsilon": 1e-2},
        **{"norm_placement": "post", "linear_norm_placement": "pre", "position_embedding_type": "none"},
        **{"qk_layernorm": True, "qk_layernorm_across_heads": True},
    },
    "kimi": {  # without RoPE, queries without a latent
        **{"linear_attention_type": "kda", "linear_attention_freq": "2", "linear_conv_kernel_dim": 3},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "norm_epsilon": 1e-3},
        **{"linear_value_head_dim": 5, "position_embedding_type": "none", "multi_latent_attention": True},
        **{"qk_layernorm": True, "kv_lora_rank": 10, "qk_head_dim": 4, "qk_pos_emb_head_dim": 6, "v_head_dim": 5},
        **{"latent_norm_epsilon": 1e-2, "kv_channels": None, "num_query_groups": None},
    },
    "mamba": {  # Granite 4
        **{"linear_attention_type": "mamba2", "linear_attention_freq": "2", "linear_conv_kernel_dim": 3},
        **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 3, "mamba_state_dim": 5},
        **{"norm_epsilon": 1e-3, "residual_multiplier": 0.6, "position_embedding_type": "none", "mamba_dt_min": 0.003},
    },
    "one group": {
        **{"linear_attention_type": "mamba2", "mamba_num_heads": 8, "mamba_num_groups": 1, "mamba_head_dim": 3},
        **{"mamba_state_dim": 5, "norm_epsilon": 1e-3, "linear_attention_freq": "2"},
    },
    "falcon h1": {**_FALCON_H1, "mlp_multipliers": "1.4 0.6"},
    "falcon h1 experts": _FALCON_H1,
    "delta net and attention": {  # in every other layer
        **{"linear_attention_type": "gated_delta_net", "linear_attention_freq": "2", "linear_attention_parallel": True},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 5, "norm_epsilon": 1e-3},
        **{"linear_value_head_dim": 3, "attention_output_gate": True, "qk_layernorm": True},
    },
    "nemotron": {
        **{"hybrid_layer_pattern": "M*-M", "swiglu": False, "squared_relu": True, "position_embedding_type": "none"},
        **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 3, "mamba_state_dim": 5},
        **{"norm_epsilon": 1e-3, "mamba_dt_max": 0.05},
    },
    "nemotron experts": {
        **{"hybrid_layer_pattern": "ME*-", "swiglu": False, "squared_relu": True, "position_embedding_type": "none"},
        **{"mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 3, "mamba_state_dim": 5},
        **{"norm_epsilon": 1e-3},
    },
    "dsa": {**_DSA, "dsa_indexer_use_sparse_loss": True},
    "dsa dense loss": {**_DSA, "dsa_indexer_rope_interleaved": True},
    "dsa warm-up": {**_DSA, "dsa_indexer_warmup": True},
    "opt": {
        **{"normalization": "LayerNorm", "swiglu": False, "relu": True, "disable_bias_linear": False},
        **{"position_embedding_type": "learned_absolute", "position_embedding_offset": 2},
    },
}
"""Whole architectures, whatever the style."""


_LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01}
_EXPERTS: dict[str, dict[str, Any]] = {
    "": {},
    "mixtral": {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, **_LOSSES},
    "pre-softmax": {
        **{"num_experts": 4, "moe_router_topk": 3, "moe_router_pre_softmax": True, **_LOSSES},
        **{"qk_layernorm": True, "qk_layernorm_across_heads": True},
    },
    "sigmoid": {
        **{"num_experts": 8, "moe_router_topk": 4, "moe_router_score_function": "sigmoid"},
        **{"moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 24},
        **{"moe_ffn_hidden_size": 8, "moe_layer_freq": "2", **_LOSSES},
    },
    "top-1": {"num_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True, **_LOSSES},
    "deepseek": {
        **{"num_experts": 8, "moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_ffn_hidden_size": 8},
        **{"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.02, "moe_layer_freq": "2"},
        **{"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 8},
        **{"moe_router_load_balancing_type": "seq_aux_loss", **_LOSSES},
    },
    "capacity": {
        **{"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_expert_capacity_factor": 0.9},
        **{"moe_shared_expert_intermediate_size": 8, **_LOSSES},
    },
    "padded": {
        **{"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_expert_capacity_factor": 0.9},
        **{"moe_pad_expert_input_to_capacity": True, **_LOSSES},
    },
    "latent": {
        **{"num_experts": 8, "moe_router_topk": 3, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 8},
        **{"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_score": "max", **_LOSSES},
        **{"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 7, "kv_lora_rank": 10},
        **{"qk_head_dim": 4, "qk_pos_emb_head_dim": 6, "v_head_dim": 5, "moe_layer_freq": "2"},
        **{"kv_channels": None, "num_query_groups": None},
    },
    "gpt-oss": {
        **{"num_experts": 4, "moe_router_topk": 3, "moe_ffn_hidden_size": 12, "swiglu": False, "quick_geglu": True},
        **{"activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0, "disable_bias_linear": False},
        **{"softmax_type": "learnable", "window_size": 3, "window_attn_skip_freq": "2", **_LOSSES},
    },
    "llama4": {
        **{"num_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 12, "moe_layer_freq": "2", **_LOSSES},
        **{"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
        **{"moe_shared_expert_intermediate_size": 12, "no_rope_freq": "2", "attention_chunk_size": 5},
        **{"rotary_interleaved": True, "qk_l2_norm": True},
        **{"attn_temperature_tuning": True, "attn_scale": 0.5, "floor_scale": 4},
    },
    "sinkhorn": {
        **{"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_router_pre_softmax": True},
        **{"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.01},
    },
    "squared relu": {
        **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "swiglu": False, "squared_relu": True},
        **{"moe_shared_expert_intermediate_size": 8, **_LOSSES},
    },
    "biased gelu": {
        **{"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "swiglu": False, "tanh_gelu": True},
        **{"disable_bias_linear": False, **_LOSSES},
    },
    "qwen2": {
        **{"num_experts": 4, "moe_router_topk": 2, "moe_router_pre_softmax": True, "moe_shared_expert_gate": True},
        **{"moe_shared_expert_intermediate_size": 8, "moe_ffn_hidden_size": 8},
        **{"moe_router_load_balancing_type": "global_aux_loss", **_LOSSES},
    },
}


def model_config(problem: Problem) -> ModelConfig:
    """Blocks 18 wide, or of blocks of 128. Weights of std 0.1 let ten steps do something; larger ones make training
    chaotic."""
    blocks = problem.fp8 in ("blockwise", "mxfp8", "nvfp4")
    values: dict[str, Any] = dict(
        num_layers=problem.layers,
        hidden_size=128 if blocks else 18,
        ffn_hidden_size=256 if blocks else 36 if problem.heads % 3 else 72,
        num_attention_heads=problem.heads,
        num_query_groups=problem.kv_heads,
        kv_channels=256 // problem.kv_heads if blocks else 8,
        max_position_embeddings=problem.length + 2,
        vocab_size=problem.vocab[0],
        make_vocab_size_divisible_by=problem.vocab[1],
        untie_embeddings_and_output_weights=not problem.tied,
        init_method_std=0.1,
        hidden_dropout=0.1 if problem.dropout else 0.0,
        attention_dropout=0.2 if problem.dropout else 0.0,
        mtp_num_layers=problem.mtp or None,
        **({"mtp_loss_scaling_factor": 0.7} if problem.mtp else {}),
    )
    return ModelConfig(**values | _architecture(problem) | _EXPERTS[problem.experts])


def _architecture(problem: Problem) -> dict[str, Any]:
    if problem.extra in _FAMILIES:
        return _FAMILIES[problem.extra]
    return _STYLES[problem.style] | _EXTRAS[problem.extra][problem.style]


def config_of(case: Case) -> Config:
    """Resolved settings, as a user's command line would give them."""
    problem, spread = case.problem, case.spread
    config = Config(
        model=model_config(problem),
        parallel=ParallelConfig(
            tensor_model_parallel_size=spread.tp,
            sequence_parallel=spread.sp,
            pipeline_model_parallel_size=spread.pp,
            pipeline_schedule=spread.schedule,  # type: ignore[arg-type]
            pipeline_model_parallel_layout=spread.placement,
            pipeline_reshard=spread.reshard,
            hybrid_shard_degree=spread.shard,
            context_parallel_size=spread.cp,
            expert_model_parallel_size=spread.ep,
            expert_tensor_parallel_size=spread.etp,
            cp_comm_type=spread.exchange if spread.cp > 1 else "auto",  # type: ignore[arg-type]
            hierarchical_context_parallel_sizes=f"2 {spread.cp // 2}" if spread.exchange == "a2a+p2p" else None,
            bf16=spread.bf16,
            recompute_granularity=spread.recompute,  # type: ignore[arg-type]
            compile=spread.compile,
            fp8_format=None if not problem.fp8 else "e2m1" if problem.fp8 == "nvfp4" else "hybrid",
            fp8_recipe=problem.fp8 or "delayed",  # type: ignore[arg-type]
            fp8_emulate=bool(problem.fp8),
            fp8_param_gather=spread.fp8_gather,
            **({"offload_activations": True, "activation_loading_horizon": spread.horizon} if spread.horizon else {}),
            **({"min_offloaded_tensor_size": 1} if spread.horizon and spread.recompute == "none" else {}),
        ),
        data=DataConfig(
            mock_data=True,
            seq_length=problem.length,
            micro_batch_size=problem.global_batch // (spread.data_parallel * spread.accumulation),
            global_batch_size=problem.global_batch,
        ),
        optim=OptimizerConfig(
            optimizer=problem.optimizer,  # type: ignore[arg-type]
            optimizer_cpu_offload=spread.host_steps,
            lr=0.1,
            lr_decay_style="constant",
            weight_decay=0.1,
            clip_grad=CLIP if problem.clip else 0.0,
        ),
        training=TrainingConfig(train_iters=problem.steps, seed=SEED),
    )
    return resolve(config, spread.world_size)


FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": ((1, False), (1, True), (2, False), (2, True), (4, False), (4, True)),
    "shard": (1, 2, 4),
    "replicate": (1, 2),
    "accumulation": (1, 4),
    "recompute": ("none", "selective", "full"),
    "style": ("llama", "gpt2"),
    "tied": (False, True),
    "vocab": ((33, 8), (33, 1), (32, 8)),
    "kv_heads": (1, 2, 4),
    "extra": tuple(_EXTRAS),
    "dropout": (False, True),
    "unequal": (False, True),
    "clip": (False, True),
    "length": (15, 16),
    "micro_batch": (1, 3),
}
"""The matrix. "tensor" is tensor-parallel size and sequence parallelism in one, so that every other value meets both at
once. Sequence parallelism on one rank stays in: groups of one are a classic source of bugs."""

_SPREAD = tuple(f.name for f in fields(Spread))
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def fits(values: dict[str, Any]) -> bool:
    """Whether a (partial) choice of factor values leaves a layout of at most 8 ranks."""
    return values.get("tensor", (1, False))[0] * values.get("shard", 1) * values.get("replicate", 1) <= MAX_WORLD


def case_of(values: dict[str, Any]) -> Case:
    """The case with these values of factors, or of fields of a problem or a layout; the rest has its default."""
    values = dict(values)
    if "tensor" in values:
        values["tp"], values["sp"] = values.pop("tensor")
    spread = Spread(**{name: value for name, value in values.items() if name in _SPREAD})
    problem = Problem(**{name: value for name, value in values.items() if name not in _SPREAD})
    return Case(replace(problem, micro_batches=spread.data_parallel * spread.accumulation), spread)


def valid_pairs() -> set[Pair]:
    """Every pair of values of two factors that some layout has."""
    choices = [[(name, value) for value in values] for name, values in FACTORS.items()]
    pairs = (pair for a, b in itertools.combinations(choices, 2) for pair in itertools.product(a, b))
    return {pair for pair in pairs if fits(dict(pair))}


def pairs_of(values: dict[str, Any]) -> set[Pair]:
    """The pairs that a choice of values covers."""
    return set(itertools.combinations([(name, values[name]) for name in FACTORS if name in values], 2))


def pairwise_cases() -> list[Case]:
    """A small set of cases in which every valid pair of factor values occurs; the same on every call.

    Greedy: begin with a pair not covered yet, then give each other factor the value that covers most new pairs for what
    the case costs: a pair that two processes can show needs no eight. Ties are drawn, so that the last cases, which
    have few pairs left to cover, still differ from each other.
    """
    left, cases, draw = valid_pairs(), [], random.Random(7)
    while left:
        values: dict[str, Any] = dict(draw.choice(sorted(left, key=repr)))
        for name in sorted(FACTORS, key=lambda name: -len(FACTORS[name])):
            if name not in values:
                options = [{**values, name: value} for value in FACTORS[name]]
                values = max(
                    (option for option in options if fits(option)),
                    key=lambda option: (len(pairs_of(option) & left) / cost(case_of(option)) ** 0.3, draw.random()),
                )
        left -= pairs_of(values)
        cases.append(case_of(values))
    return cases


def short(case: Case) -> Case:
    """The same with two steps, for the fast suite; ``make parity`` and the slow suite train on. Gradients are compared
    in both: from equal weights, and from weights that an optimizer step has moved."""
    return replace(case, problem=replace(case.problem, steps=2))


def cover(
    every: list[dict[str, Any]],
    pairs_of: Callable[[dict[str, Any]], set[Any]],
    case_of: Callable[[dict[str, Any]], Case],
    seed: int,
) -> list[dict[str, Any]]:
    """Of all choices of values a small set in which every pair occurs that one of them has; greedy, cheap ones first,
    the same on every call."""
    draw, made = random.Random(seed), list[dict[str, Any]]()
    known = [(values, pairs_of(values), cost(case_of(values)) ** 0.3) for values in every]
    left = set().union(*(pairs for _, pairs, _ in known))
    while left:
        values, pairs, _ = max(known, key=lambda choice: (len(choice[1] & left) / choice[2], draw.random()))
        left -= pairs
        made.append(values)
    return made


def few(cases: list[Case], features: Callable[[Case], set[Any]]) -> list[Case]:
    """Of ``cases`` those of the fast suite: what one of all has, one of them has; greedy, cheap ones first."""
    left, chosen = set[Any]().union(*map(features, cases)), list[Case]()
    while left:
        chosen.append(max(cases, key=lambda case: len(features(case) & left) / cost(case) ** 0.5))
        left -= features(chosen[-1])
    return chosen


def risky_pairs(case: Case) -> set[Any]:
    """Values of a layout's factors, and its pairs of those whose code meets: what is gathered or split by tensor
    parallelism, and what runs again or adds up under FSDP."""
    p, s = case.problem, case.spread
    tensor, sharded = ("none" if s.tp == 1 else "sp" if s.sp else "tp"), s.shard > 1
    alone = {name: {**vars(p), **vars(s)}[name] for name in FACTORS if name != "tensor"} | {"tp": (s.tp, s.sp)}
    pairs = {"recompute": s.recompute, "dropout": p.dropout, "unequal": p.unequal, "tied": p.tied, "vocab": p.vocab}
    met = {(tensor, name, value) for name, value in pairs.items()} | {(tensor, sharded)}
    return set(alone.items()) | met | {(sharded, s.accumulation > 1, s.recompute != "none")}


def cost(case: Case) -> float:
    """Of running a case, in any unit: collectives take a time per process, and each process takes its own."""
    return 2 + case.spread.world_size**2 * case.spread.accumulation**0.7


def product_cases() -> list[Case]:
    """The whole product of the factors that spread the work, with style and dropout; the other factors are drawn.

    (The product of all factors has over 700,000 members.)
    """
    crossed = ("tensor", "shard", "replicate", "accumulation", "recompute", "style", "dropout")
    draw = random.Random(0)
    return [case_of(_drawn(values, draw)) for values in _product(crossed) if fits(values)]


def _product(names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(FACTORS[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _drawn(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    return {name: values[name] if name in values else draw.choice(options) for name, options in FACTORS.items()}


def bf16_cases() -> list[Case]:
    """Layouts in bf16."""
    spreads: list[dict[str, Any]] = [
        {"tensor": (2, True), "style": "llama", "extra": "qknorm", "unequal": True, "chunk_bytes": 1000},
        {"tensor": (4, True), "style": "gpt2", "kv_heads": 2, "recompute": "full", "tied": True},
        {"tensor": (4, False), "style": "llama", "kv_heads": 1, "clip": True},
        {"shard": 4, "style": "gpt2", "extra": "window", "dropout": True},
        {"shard": 2, "replicate": 2, "accumulation": 4, "style": "llama", "extra": "parallel", "unequal": True},
        {"tensor": (2, False), "shard": 2, "accumulation": 4, "style": "gpt2", "recompute": "selective", "clip": True},
    ]
    return [case_of({**values, "bf16": True, "micro_batch": 3}) for values in spreads]


def compiled_cases() -> list[Case]:
    """Layouts under ``--compile``, in which recompute and bf16 take other ways."""
    spreads: list[dict[str, Any]] = [
        {"tensor": (2, True), "style": "llama", "unequal": True, "clip": True, "chunk_bytes": 1000},
        {"shard": 2, "accumulation": 4, "style": "gpt2", "tied": True, "dropout": True},
        {"tensor": (2, True), "style": "gpt2", "kv_heads": 1, "extra": "qknorm", "recompute": "selective"},
        {"tensor": (2, False), "shard": 2, "style": "llama", "extra": "window", "recompute": "full", "dropout": True},
        {"tensor": (2, True), "style": "llama", "kv_heads": 1, "extra": "parallel", "bf16": True},
        {"shard": 2, "style": "llama", "extra": "window", "dropout": True, "bf16": True},
    ]
    return [case_of({**values, "compile": True, "micro_batch": 3}) for values in spreads]


def sabotaged_cases() -> list[tuple[Case, str]]:
    """Each bug of the negative control in a layout where it shows, and the kind of error that must show it."""
    chosen: list[tuple[str, str, dict[str, Any]]] = [
        ("sum_gradient", "copies", {"tensor": (2, True)}),
        ("sum_gradients", "copies", {"tensor": (2, True)}),
        ("copy_to_group", "copies", {"tensor": (2, False)}),
        ("gather_tokens", "gradient", {"tensor": (2, True)}),
        ("average_gradients", "gradient", {"shard": 2}),
        ("count_own_tokens", "loss", {"shard": 2, "unequal": True}),
        ("count_copies", "norm", {"tensor": (2, False)}),
        ("number_tokens_per_rank", "loss", {"tensor": (2, True), "dropout": True}),
    ]
    made = [(case_of({**values, "style": "gpt2", "micro_batch": 3}), bug, error) for bug, error, values in chosen]
    return [(replace(case, sabotage=bug), error) for case, bug, error in made]
