"""Every setting of a run: one tree of dataclasses, no torch import.

Flags, YAML keys, ``--help`` and the table in ``docs/configuration.md`` are generated from these fields, so a field's
docstring is its documentation. Names are flat: a field name is unique over all groups, ``--kebab-case`` on the command
line and ``snake_case`` in YAML. They are Megatron's names wherever Megatron has one. Which of them an entry point has,
and where its defaults and texts are others, is in ``smp.config.entry_points``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

Words = Annotated[str, "words"]
"""Text of several words, quoted as a shell would: a flag takes them one after the other, YAML in one line."""


GIVEN = object()
"""In :func:`only_with`: any value but the default."""


class ConfigError(ValueError):
    """A setting that cannot work. The message is one line and names the flag to change."""


def only_with(default: Any, *, noted: bool = False, **needs: Any) -> Any:
    """A field that has an effect only beside one of ``needs``: another setting and its value, several, or GIVEN.

    Elsewhere a value other than the default is refused; with ``noted`` the user is told, because command lines that
    serve several layouts give it.
    """
    return field(default=default, metadata={"needs": tuple(needs.items()), "noted": noted})


@dataclass
class ModelConfig:
    """Architecture. ``--model`` picks a named size; any flag given beside it overrides that size."""

    model: str | None = None
    """Named size to start from, such as llama3-8b (--dry-run prints what it resolves to). Default: the values below."""
    num_layers: int = 4
    """Number of transformer blocks."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. Default: 4 x hidden, or 8/3 x hidden rounded down to a multiple of 64 with SwiGLU."""
    num_attention_heads: int = 4
    """Number of query heads."""
    num_query_groups: int | None = None
    """Number of key/value heads (grouped-query attention). Default: one per query head."""
    kv_channels: int | None = None
    """Width of one attention head. Default: hidden size / number of heads."""
    max_position_embeddings: int = 2048
    """Longest sequence the model takes; also the size of the table when positions are learned."""
    vocab_size: int | None = None
    """Number of token ids. Default: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Embedding rows per tensor-parallel rank are padded to this multiple. The padding never reaches a checkpoint."""
    position_embedding_type: Literal["rope", "learned_absolute", "alibi", "none"] = "rope"
    """Kind of position information. alibi: attention scores fall with the distance, by a slope per head (BLOOM)."""
    position_embedding_offset: int = only_with(0, position_embedding_type="learned_absolute")
    """Row of the learned position table used by the first token (2 in OPT, which does not use rows 0 and 1)."""
    rotary_base: float = only_with(10000.0, position_embedding_type="rope")
    """RoPE base frequency (theta)."""
    rotary_percent: float = only_with(1.0, position_embedding_type="rope")
    """Fraction of each head that RoPE rotates."""
    rotary_interleaved: bool = only_with(False, position_embedding_type="rope")
    """RoPE rotates channel pairs (0, 1), (2, 3), ... (GLM-4, Cohere), instead of pairing the two halves of a head."""
    no_rope_freq: str | None = only_with(None, position_embedding_type="rope")
    """Layers without RoPE. n: every n-th layer, starting with the n-th (SmolLM3: 4). Or Megatron's list, with 1 for a
    layer without RoPE and 0 for one with it. Default: none."""
    attn_temperature_tuning: bool = only_with(False, no_rope_freq=GIVEN)
    """In layers without RoPE, multiply the query at position p by 1 + --attn-scale x ln(1 + floor((p + 1) /
    --floor-scale)) (Llama 4)."""
    attn_scale: float = only_with(0.1, attn_temperature_tuning=True)
    """Strength of --attn-temperature-tuning."""
    floor_scale: int = only_with(8192, attn_temperature_tuning=True)
    """Number of tokens after which --attn-temperature-tuning takes its next value. The factor is 1 before the first
    such step."""
    rotary_base_local: float | None = only_with(None, window_size=GIVEN)
    """RoPE base of the layers with a window; --use-rope-scaling does not apply to them (Gemma 3). Default: the same as
    in all other layers."""
    use_rope_scaling: bool = only_with(False, position_embedding_type="rope")
    """Scale RoPE's frequencies for sequences longer than those the model was trained on. --rope-scaling-type says
    how."""
    rope_scaling_type: Literal["llama3", "linear", "yarn", "longrope"] = only_with("llama3", use_rope_scaling=True)
    """llama3: slow down low frequencies (Llama 3.1); linear: all frequencies alike (position interpolation); yarn: slow
    down low frequencies and sharpen attention; longrope: each frequency by its own factor (Phi-3)."""
    rope_scaling_factor: float = only_with(8.0, use_rope_scaling=True)
    """RoPE scaling: how much low frequencies are slowed down; with linear all of them."""
    rope_low_freq_factor: float = only_with(1.0, use_rope_scaling=True)
    """Llama 3.1 RoPE scaling: wavelengths above original length / this are scaled fully."""
    rope_high_freq_factor: float = only_with(4.0, use_rope_scaling=True)
    """Llama 3.1 RoPE scaling: wavelengths below original length / this are left alone."""
    rope_original_max_position: int = only_with(8192, use_rope_scaling=True)
    """Llama 3.1 RoPE scaling, YaRN and LongRoPE: context length before the scaling."""
    longrope_short_factor: Words | None = only_with(None, rope_scaling_type="longrope")  # noqa: RUF009 (text)
    """LongRoPE: factor by which each frequency is slowed down in sequences up to --rope-original-max-position, one
    number per pair of rotated channels."""
    longrope_long_factor: Words | None = only_with(None, rope_scaling_type="longrope")  # noqa: RUF009 (text)
    """LongRoPE: the factors for longer sequences."""
    longrope_attention_factor: float | None = only_with(None, rope_scaling_type="longrope")
    """LongRoPE: queries and keys are multiplied by this. Default: sqrt(1 + ln(s) / ln(o)), where o is
    --rope-original-max-position and s is --max-position-embeddings / o."""
    yarn_beta_fast: float = only_with(32.0, rope_scaling_type="yarn")
    """YaRN: frequencies that turn more often than this within the original context are left alone."""
    yarn_beta_slow: float = only_with(1.0, rope_scaling_type="yarn")
    """YaRN: frequencies that turn less often than this within the original context are scaled fully."""
    yarn_truncate: bool = only_with(True, rope_scaling_type="yarn")
    """YaRN: round the ends of the ramp between --yarn-beta-slow and --yarn-beta-fast to whole channels."""
    yarn_attention_factor: float | None = only_with(None, rope_scaling_type="yarn")
    """YaRN: queries and keys are multiplied by this. Default: 0.1 x ln(factor) + 1."""
    yarn_mscale: float | None = only_with(None, rope_scaling_type="yarn")
    """YaRN: multiply queries and keys by m(this) / m(--yarn-mscale-all-dim) instead of the default, where m(a) = 0.1 x
    a x ln(factor) + 1 (DeepSeek). Default: not used."""
    yarn_mscale_all_dim: float | None = only_with(None, rope_scaling_type="yarn")
    """YaRN: see --yarn-mscale. With --multi-latent-attention, scores are also multiplied by m(this) squared. Default:
    not used."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of normalization."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside a normalization."""
    apply_layernorm_1p: bool = False
    """A norm multiplies by 1 + its weight, which starts at 0 (Gemma)."""
    layernorm_bias: bool = only_with(True, normalization="LayerNorm")
    """Add a bias in a LayerNorm; --no-layernorm-bias leaves it out (Cohere)."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: normalize the input of attention and MLP; post: normalize their output before it is added (OLMo 2);
    sandwich: both (Gemma 2 and 3, GLM-4)."""
    embedding_layernorm: bool = False
    """Normalize the embedding (BLOOM)."""
    swiglu: bool = True
    """Gated SiLU MLP with three matrices; --no-swiglu is a plain MLP with GELU."""
    geglu: bool = only_with(False, swiglu=False)
    """Gated GELU MLP with three matrices (Gemma, with --tanh-gelu; needs --no-swiglu)."""
    quick_geglu: bool = only_with(False, swiglu=False)
    """Gated MLP with x sigmoid(1.702 x), three matrices; also of experts (GPT-OSS; needs --no-swiglu)."""
    activation_func_clamp_value: float | None = only_with(None, quick_geglu=True)
    """Clamp --quick-geglu's gate to at most this, and its up projection to +- this. Default: no clamping."""
    glu_linear_offset: float = only_with(0.0, quick_geglu=True)
    """Added to --quick-geglu's up projection (GPT-OSS: 1)."""
    relu: bool = only_with(False, swiglu=False)
    """ReLU in the plain MLP instead of GELU (OPT; needs --no-swiglu)."""
    squared_relu: bool = only_with(False, swiglu=False)
    """Squared ReLU in the plain MLP instead of GELU (needs --no-swiglu)."""
    tanh_gelu: bool = only_with(False, swiglu=False)
    """GPT-2's tanh approximation of GELU, in the plain MLP or with --geglu (needs --no-swiglu)."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output layer its own matrix; --no-untie-embeddings-and-output-weights shares the embedding's."""
    scalar_head: bool = False
    """A row in place of the output matrix, whose product with a text's last token is its score: a reward model, which
    --objective reward makes. No flag."""
    disable_bias_linear: bool = True
    """No bias in linear layers; --no-disable-bias-linear adds them, also to experts and their router."""
    add_qkv_bias: bool = only_with(False, disable_bias_linear=True)
    """Bias on the query, key and value projections even when other biases are off (Qwen 2.5)."""
    qk_layernorm: bool = False
    """Normalize queries and keys per head before RoPE (Qwen 3)."""
    qk_layernorm_across_heads: bool = only_with(False, qk_layernorm=True)
    """Normalize queries and keys over all heads together instead of per head (OLMoE)."""
    qk_l2_norm: bool = only_with(False, position_embedding_type="rope")
    """In layers with RoPE, divide each head's queries and keys by their root mean square, without a weight (Llama 4
    Scout)."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are computed from one small latent vector
    per token. --qk-layernorm then normalizes the latent vectors."""
    q_lora_rank: int | None = only_with(None, multi_latent_attention=True)
    """Size of the latent vector of queries. Default: none, queries are projected directly."""
    kv_lora_rank: int = only_with(32, multi_latent_attention=True)
    """Size of the latent vector of keys and values."""
    qk_head_dim: int = only_with(128, multi_latent_attention=True)
    """Channels without RoPE in a head's query and key."""
    qk_pos_emb_head_dim: int = only_with(64, multi_latent_attention=True)
    """Channels with RoPE in a head's query, and in the one key that all heads share; rotated in neighbouring pairs."""
    v_head_dim: int = only_with(128, multi_latent_attention=True)
    """Channels of a head's value."""
    window_size: int | None = None
    """Sliding-window attention: a token attends to itself and the window_size - 1 tokens before it. Default: no
    window."""
    window_attn_skip_freq: str | None = only_with(None, window_size=GIVEN)
    """Layers without the window. n: every n-th layer, starting with the n-th (Gemma 2: 2, Gemma 3: 6). Or Megatron's
    list, with 1 for a layer with the window and 0 for one without. Default: none."""
    attention_chunk_size: int | None = only_with(None, position_embedding_type="rope")
    """Chunked attention: in layers with RoPE a token attends only within its own chunk of this many tokens, counted
    from the beginning of its document (Llama 4: 8192). Default: no chunks."""
    softmax_scale: float | None = None
    """Factor of attention scores. Default: 1 / square root of --kv-channels."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable: each head has a learned score that takes part in every softmax but belongs to no key, an attention
    sink (GPT-OSS)."""
    attn_logit_softcapping: float | None = None
    """Limit attention scores s to +-c by c x tanh(s / c) (Gemma 2). The scores are then materialised. Default: no
    limit."""
    final_logit_softcapping: float | None = None
    """Limit the logits in the same way (Gemma 2)."""
    logit_scale: float = 1.0
    """Logits are multiplied by this (Cohere; Granite's is 1 / logits_scaling)."""
    embedding_multiplier: float = 1.0
    """The embedding is multiplied by this (Gemma: square root of --hidden-size; Granite)."""
    residual_multiplier: float = 1.0
    """What attention and MLP add to the residual stream is multiplied by this (Granite)."""
    num_experts: int | None = None
    """Mixture of experts: number of experts per layer, of which each token uses --moe-router-topk. Default: none,
    layers are dense."""
    moe_router_topk: int = only_with(2, num_experts=GIVEN)
    """Experts per token."""
    moe_ffn_hidden_size: int | None = only_with(None, num_experts=GIVEN)
    """Width of one expert. Default: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = only_with(None, num_experts=GIVEN)
    """Width of the shared expert, an MLP beside the routed experts that every token uses. Default: none."""
    moe_layer_freq: str = only_with("1", num_experts=GIVEN)
    """Which layers have experts. n: every n-th, starting with the first. Or Megatron's list, with 1 for a layer with
    experts and 0 for a dense one, such as [0]*1+[1]*3."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = only_with("softmax", num_experts=GIVEN)
    """How router logits become expert weights. sigmoid: the sigmoid of each logit, divided by their sum over the
    token's experts (DeepSeek-V3)."""
    moe_router_pre_softmax: bool = only_with(False, num_experts=GIVEN)
    """Softmax over all experts before the top-k, so that a token's weights add up to less than 1 (OLMoE, Qwen 2).
    Otherwise over the chosen experts only (Mixtral, Qwen 3)."""
    moe_router_topk_scaling_factor: float | None = only_with(None, num_experts=GIVEN)
    """Factor of the expert weights. Default: none."""
    moe_apply_probs_on_input: bool = only_with(False, num_experts=GIVEN)
    """Multiply an expert's input by its weight, instead of its output (Llama 4). Needs --moe-router-topk 1."""
    moe_router_num_groups: int | None = only_with(None, num_experts=GIVEN)
    """Split the experts into this many groups of neighbours; a token's experts come from its best
    --moe-router-group-topk groups. Default: no groups."""
    moe_router_group_topk: int | None = only_with(None, moe_router_num_groups=GIVEN)
    """Number of groups from which a token's experts come. --moe-router-group-score ranks the groups."""
    moe_router_group_score: Literal["sum", "max"] = only_with("sum", moe_router_num_groups=GIVEN)
    """Score of a group. sum: of its topk / --moe-router-group-topk largest scores (DeepSeek-V3); max: its largest score
    (DeepSeek-V2)."""
    moe_router_enable_expert_bias: bool = only_with(False, moe_router_score_function="sigmoid")
    """Add a bias to each expert's score when experts are chosen, but not to their weights. After each step it grows for
    experts with fewer tokens than the mean and falls for the others: balance without a loss (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = only_with(1e-3, moe_router_enable_expert_bias=True)
    """Change of the expert bias per step. 0: it stays."""
    moe_shared_expert_gate: bool = only_with(False, moe_shared_expert_intermediate_size=GIVEN)
    """Multiply the shared expert's output by the sigmoid of an extra logit of each token (Qwen 2)."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        only_with("aux_loss", num_experts=GIVEN)
    )
    """How expert loads are balanced. aux_loss: by a loss over the micro-batches that the data-parallel processes
    compute at the same time; global_aux_loss: over those and the earlier ones of the step; seq_aux_loss: over each
    sequence; sinkhorn: no loss, choices are balanced over each sequence in training; none: no balancing.
    --moe-aux-loss-coeff weighs the loss."""
    moe_aux_loss_coeff: float = only_with(0.0, num_experts=GIVEN)
    """Coefficient of the loss that keeps the experts' loads even (Switch), summed over layers; see
    --moe-router-load-balancing-type."""
    moe_z_loss_coeff: float | None = only_with(None, num_experts=GIVEN)
    """Coefficient of the loss that keeps the router's logits small (ST-MoE), summed over layers. Default: there is
    none."""
    moe_expert_capacity_factor: float | None = only_with(None, num_experts=GIVEN)
    """In training an expert takes at most this times its even share of a sequence's choices, rounded up; the others are
    dropped. Default: nothing is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = only_with("probs", moe_expert_capacity_factor=GIVEN)
    """Which choices an expert keeps when it is full. probs: those with the largest weights; position: those of the
    first tokens."""
    moe_pad_expert_input_to_capacity: bool = only_with(False, moe_expert_capacity_factor=GIVEN)
    """Pad each expert's input to its capacity, so that the host does not wait for the numbers of rows."""
    mtp_num_layers: int | None = None
    """Multi-token prediction (DeepSeek-V3): extra layers after the last one, each of which predicts one more token
    ahead with the model's own embedding and output matrix. Used in training only, not in validation or generation.
    Default: none."""
    mtp_loss_scaling_factor: float = only_with(0.1, mtp_num_layers=GIVEN)
    """Weight of the mean loss of the --mtp-num-layers layers, added to the loss."""
    parallel_residual: bool = False
    """Attention and MLP read the same input and are added together (GPT-NeoX)."""
    parallel_residual_shared_norm: bool = only_with(False, parallel_residual=True)
    """With --parallel-residual, attention and MLP also share one norm (Falcon 7B, Cohere)."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; matrices that write to the residual stream get it / sqrt(2 x layers)."""
    hidden_dropout: float = 0.0
    """Dropout on the embedding and on what attention and MLP add to the residual stream."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities. Above 0 they are materialised (memory grows with length squared)."""

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE rotates; a part of one is cut off, as in transformers and Megatron."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        assert self.kv_channels is not None, "resolved before"
        return int(self.kv_channels * self.rotary_percent)


@dataclass
class ParallelConfig:
    """Layout over processes, precision, recompute and compilation."""

    tensor_model_parallel_size: int = 1
    """Tensor parallelism (TP): number of processes over which every matrix is split."""
    sequence_parallel: bool = only_with(False, noted=True, tensor_model_parallel_size=GIVEN)
    """Sequence parallelism (SP): split norms, dropout and the residual stream over the TP processes along the
    tokens."""
    pipeline_model_parallel_size: int = 1
    """Pipeline parallelism (PP): number of groups of processes, each with some consecutive layers."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Order of forward and backward passes. Default: interleaved with several stages per process, else 1f1b. zb-h1 and
    zb-v (zero bubble) fill waiting time with weight gradients."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages per process. Default: 2 with interleaved and zb-v, else 1."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage in Megatron's notation, such as Et*3|(tt|)*14tL: E embedding, t a layer, L output layer and
    loss, | next stage. Default: balanced by cost."""
    pipeline_reshard: bool = False
    """Free gathered weights after every use by a micro-batch, not once per step: less memory, more communication."""
    context_parallel_size: int = 1
    """Context parallelism (CP): number of processes over which every sequence is split. --seq-length must be divisible
    by twice this."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"] = "auto"
    """What attention exchanges between context-parallel processes. p2p: keys and values move around a ring; all_gather:
    each process gets all keys and values; a2a: each process gets some heads of all tokens; a2a+p2p: a2a within small
    groups and p2p between them; auto: chosen by a cost model, and printed."""
    hierarchical_context_parallel_sizes: Words | None = None
    """Two numbers for a2a+p2p: processes per a2a group and per ring. Their product is --context-parallel-size."""
    expert_model_parallel_size: int = only_with(1, num_experts=GIVEN)
    """Expert parallelism (EP): number of processes over which the experts of each layer are spread. They are neighbours
    among the processes that shard weights. It must divide --num-experts and the number of those processes
    (--hybrid-shard-degree x --context-parallel-size x the part of tensor parallelism that --expert-tensor-parallel-size
    leaves)."""
    expert_tensor_parallel_size: int | None = only_with(None, num_experts=GIVEN)
    """Expert tensor parallelism (ETP): number of processes over which each expert is split, neighbours among the
    tensor-parallel ones. If it is below --tensor-model-parallel-size, the other TP processes have other experts or
    other shards of them, and tokens are sent by all-to-all (needs --sequence-parallel). Default:
    --tensor-model-parallel-size."""
    hybrid_shard_degree: int = 0
    """Processes over which hybrid FSDP shards weights, gradients and optimizer state, times --context-parallel-size.
    0: all data-parallel ones; 1: none (replicas only); n: groups of n, replicated."""
    data_parallel_sharding_strategy: Literal["optim_grads_params", "optim_grads", "optim"] = "optim_grads_params"
    """What stays sharded over data-parallel processes between the micro-batches of a step. optim_grads_params:
    everything. optim_grads: weights are gathered once per step. optim: gradients are also reduced once per step. Less
    sharding takes more memory and less communication. A pipeline gathers and reduces once per step in any case, see
    --pipeline-reshard."""
    data_parallel_collectives: Literal["auto", "flat", "hierarchical"] = "flat"
    """How weights are gathered and gradients summed over data-parallel processes. flat: by gloo or NCCL; hierarchical:
    once over each node's uplink, then within nodes (CPU only, with several of the processes on a node); auto: the
    faster one for each size, predicted from links measured at the start. The choice is printed. hierarchical adds up in
    another order than flat."""
    network_topology: str | None = only_with(
        None, data_parallel_collectives=("auto", "hierarchical"), zero_hpz_partition_size=GIVEN
    )
    """JSON file with the processes of each node, the speed of links, or both. Default: nodes by hostname; auto measures
    the links."""
    zero_quantized_weights: bool = only_with(False, data_parallel_collectives="hierarchical")
    """ZeRO++ qwZ: send gathered weights as int8, with a scale per block of 128 numbers. Every process computes with the
    rounded weights; the weights that are trained and saved stay exact. The relative error is logged."""
    zero_quantized_gradients: bool = only_with(False, data_parallel_collectives="hierarchical")
    """ZeRO++ qgZ: send gradients between nodes as int8, with a scale per block of 128 numbers, after the sum within
    each node. Sums over replicas stay exact. The relative error is logged."""
    zero_hpz_partition_size: int = only_with(1, data_parallel_sharding_strategy="optim_grads_params")
    """ZeRO++ hpZ: this many neighbours on a node keep a second copy of the gathered weights, split over them, and the
    backward pass gathers within them: less traffic between nodes, more memory. It must divide --hybrid-shard-degree x
    --context-parallel-size. 1: off."""
    bf16: bool = False
    """Compute in bfloat16. Master weights, gradient reduction and optimizer stay in fp32. Without it everything is
    fp32, on CUDA with TF32 matrix products."""
    fp8_format: Literal["hybrid", "e4m3", "e2m1"] | None = None
    """Compute the linear layers of blocks in FP8. hybrid: inputs and weights in e4m3, gradients in e5m2 (more range);
    e4m3: all of them; e2m1: 4 bits, with --fp8-recipe nvfp4. The run prints what stays in higher precision. Default: no
    FP8."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"] = only_with(
        "delayed", fp8_format=GIVEN
    )
    """Which numbers share a scale. delayed: a tensor, from its maxima in past steps; tensorwise: a tensor of a
    micro-batch; rowwise: a token, or a row of a weight (weight gradients not in FP8); blockwise: 128 numbers of a
    token, 128 x 128 of a weight; mxfp8: 32 numbers along the summed dimension; nvfp4: 16 numbers of a token, 16 x 16 of
    a weight, with scales in e4m3 (weight gradients not in FP4). Other scales are powers of two. Only tensorwise and
    nvfp4 depend on the micro-batches."""
    fp8_amax_history_len: int = only_with(1024, fp8_recipe="delayed")
    """Delayed scaling: number of past steps whose maxima are kept."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = only_with("max", fp8_recipe="delayed")
    """Delayed scaling: scale from the largest maximum of these steps, or from the last step's."""
    fp8_emulate: bool = only_with(False, fp8_format=GIVEN)
    """Compute the same 8-bit numbers on any device: operands are rounded, products are in fp32. For tests and to try
    the effect of FP8 on a loss; slower than without FP8."""
    fp8_param_gather: bool = only_with(False, fp8_recipe=("delayed", "tensorwise"))
    """FP8: gather sharded weights as 8-bit numbers, 1 byte each. Same results, bit for bit."""
    first_last_layers_bf16: bool = only_with(False, fp8_format=GIVEN)
    """FP8: keep the first and the last layers in higher precision."""
    num_layers_at_start_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: number of first layers for --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: number of last layers for --first-last-layers-bf16."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass. selective keeps matrix products, attention and communication
    results; full keeps only each block's input."""
    offload_activations: bool = False
    """Keep what blocks save for the backward pass in host memory: with --recompute-granularity full their inputs, with
    none all saved activations. Copies run beside the computation; results are the same."""
    activation_loading_horizon: int = only_with(2, offload_activations=True)
    """With --offload-activations: largest number of blocks whose activations are on the device at the same time. With 1
    each backward pass waits for its copy."""
    min_offloaded_tensor_size: int = only_with(1048576, offload_activations=True)
    """Smallest tensor, in elements, that --offload-activations moves to the host (with --recompute-granularity
    none)."""
    compile: bool = False
    """Compile each block with torch.compile."""
    kernels: Literal["auto", "torch", "triton", "cuda", "apex"] = "auto"
    """Implementation of cross-entropy, norms, SwiGLU and RoPE. auto: Triton on CUDA where --compile does not fuse them,
    else PyTorch. triton, cuda, apex: that one where it has the operation, else as auto. The choice is printed."""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Backend of PyTorch's scaled dot-product attention. auto: the first that supports the model's attention, in an
    order that depends on the device. The choice is printed."""
    distributed_timeout_minutes: float = 10.0
    """Time after which a waiting collective ends the run. Each waiting rank prints its stack first."""


@dataclass
class DataConfig:
    """What is trained on."""

    data_path: Words | None = None
    """What to read: the prefix of a .bin/.idx pair (Megatron's indexed dataset), or a text file (.jsonl, .txt,
    .parquet, also .gz or .zst), which is tokenized first. Several are blended, by weights when each has a number before
    it (0.3 wiki 0.7 web), else by their sizes."""
    data_args_path: str | None = None
    """File with the words of --data-path."""
    train_data_path: Words | None = None
    """Training data, as in --data-path, when validation and test data are separate files."""
    valid_data_path: Words | None = None
    """Validation data, with --train-data-path."""
    test_data_path: Words | None = None
    """Test data, with --train-data-path: evaluated once, at the end of the run."""
    data_cache_path: str | None = None
    """Folder for indices and tokenized text, built once per node. Default: the folder cache beside the data."""
    mock_data: bool = False
    """Train on synthetic tokens that are a function of (seed, sample index). Needs only --vocab-size."""
    split: str = only_with("969,30,1", mock_data=False)
    """Relative sizes of the train, validation and test parts of the documents; missing ones are 0."""
    tokenizer_model: str | None = None
    """Sentencepiece model, Hugging Face tokenizer.json or tiktoken file, or a folder with one. Gives the vocabulary
    size and checks it against the model's."""
    tiktoken_pattern: Literal["gpt2", "cl100k", "o200k", "llama3"] | None = only_with(None, tokenizer_model=GIVEN)
    """How text is split before a tiktoken file's merges; the file itself does not say."""
    seq_length: int | None = None
    """Tokens per sample. Default: --max-position-embeddings, at most 8192."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel process."""
    global_batch_size: int | None = None
    """Samples per optimizer step. Default: micro batch x data-parallel processes (no accumulation)."""
    rampup_batch_size: Words | None = None
    """Three numbers: first batch size, increment, and the samples over which it grows to --global-batch-size."""
    packing: Literal["stream", "best-fit", "off"] | None = "stream"
    """How documents become sequences. stream: joined and cut every --seq-length tokens. best-fit: a document that fits
    is never cut; sequences are filled by best-fit decreasing and padded."""
    reset_attention_mask: bool = False
    """Tokens do not attend to other documents in their sequence."""
    reset_position_ids: bool = only_with(False, position_embedding_type=("rope", "learned_absolute"))
    """Positions start at 0 in every document."""
    eod_mask_loss: bool = False
    """No loss where the last token of a document would predict the first one of the next."""
    num_workers: int = 2
    """Threads that read batches ahead; 0 reads each when it is needed."""
    chat_template: str | None = None
    """File with a Jinja chat template, instead of the tokenizer's own."""
    mask_prompt: bool = True
    """Train on what the assistant says (or the completion) only; --no-mask-prompt trains on all tokens."""
    bad_sample_threshold: float = 0.01
    """Largest fraction of samples that may be broken (not JSON, unknown role, nothing to train on). They are left out
    and named by line number; more are an error."""
    preview: int = 0
    """Print this many samples as the model would see them, with trained tokens in colour (in a pipe: in ⟦ ⟧), and
    exit."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) instead of training all weights."""

    lora_rank: int | None = None
    """Freeze the model and train adapters of this rank. Default: all weights are trained."""
    lora_alpha: float | None = None
    """What an adapter adds is scaled by alpha / rank. Default: 2 x rank."""
    lora_dropout: float | None = None
    """Dropout on the input of adapters. Default: 0, or that of --load-adapter."""
    lora_target_modules: str | None = None
    """Linear layers that get an adapter: shell patterns, separated by commas, of whole names or of their last part
    (query, key, value, output, gate, up, down). Experts only by whole names, such as *.experts.*. Default: all but
    experts."""
    use_dora: bool = False
    """Also train the norms of a weight's rows (DoRA, peft's use_dora). Not with --lora-dropout, not on experts. An
    adapter in --load-adapter may bring it."""
    load_in_4bit: bool = False
    """QLoRA: keep the frozen weights of linear layers in 4 bits (NF4, as bitsandbytes). Embedding, output matrix and
    experts keep their precision. Needs adapters."""
    bnb_4bit_use_double_quant: bool = only_with(True, load_in_4bit=True)
    """Also quantize the scales of 4-bit weights."""
    load_adapter: str | None = None
    """Start from the adapter in this folder of peft's format, which brings rank, alpha and target modules."""


@dataclass
class ObjectiveConfig:
    """What is minimised."""

    objective: Literal["sft", "dpo", "orpo", "kto", "reward"] = "sft"
    """sft: cross-entropy of the samples; dpo: direct preference optimization on pairs of answers; orpo: cross-entropy
    of the chosen answer and its odds against the rejected one, without a reference; kto: Kahneman-Tversky optimization
    on answers that have a label, desirable or not; reward: a reward model, whose score of a chosen answer is above that
    of the rejected one."""
    dpo_loss_type: Literal["sigmoid", "hinge", "ipo"] = only_with("sigmoid", objective="dpo")
    """sigmoid: DPO's own; hinge: SLiC's, max(0, 1 - beta x margin); ipo: the squared distance of the margin, of means
    over tokens, from 1 / (2 beta)."""
    dpo_beta: float = only_with(0.1, objective="dpo")
    """Strength with which the policy is kept near the reference: factor of the difference of log-ratios."""
    dpo_label_smoothing: float = only_with(0.0, dpo_loss_type="sigmoid")
    """Probability that a preference is the wrong way round, below 0.5 (conservative DPO)."""
    dpo_reference: Literal["adapters-off", "copy", "precomputed"] | None = only_with(None, objective=("dpo", "kto"))
    """Where the reference's log-probabilities come from. adapters-off: the model without its adapters; copy: a frozen
    copy; precomputed: a table computed before training. Default: adapters-off with --lora-rank, else copy."""
    orpo_beta: float = only_with(0.1, objective="orpo")
    """Weight of the odds beside the cross-entropy (lambda in the paper)."""
    kto_beta: float = only_with(0.1, objective="kto")
    """Strength with which the policy is kept near the reference: factor of the log-ratios."""
    kto_desirable_weight: float = only_with(1.0, objective="kto")
    """Weight of the losses of desirable answers. The paper keeps weight x number of the two kinds within a ratio of 1
    to 4/3."""
    kto_undesirable_weight: float = only_with(1.0, objective="kto")
    """Weight of the losses of undesirable answers."""
    reward_center_coefficient: float = only_with(0.0, objective="reward")
    """Weight of the squared sum of a pair's scores, which keeps them around 0 (TRL's center_rewards_coefficient)."""


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and clipping."""

    optimizer: Literal["adam", "apex-adam", "sgd", "muon"] = "adam"
    """adam: torch's fused AdamW; apex-adam: apex's FusedAdam (must be installed); muon: orthogonalized updates for the
    matrices of blocks, AdamW for embeddings, output matrix, norms and biases."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = only_with(0.0, lr_decay_style=("cosine", "linear", "WSD"))
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["cosine", "linear", "WSD", "constant"] = "cosine"
    """Shape of the decay after the warm-up. WSD stays at the peak and decays at the end."""
    lr_decay_iters: int | None = only_with(None, lr_decay_style=("cosine", "linear", "WSD"), lr_warmup_fraction=GIVEN)
    """Iteration at which the decay ends. Default: the last one."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay iterations, instead of --lr-warmup-iters."""
    lr_wsd_decay_iters: int | None = only_with(None, lr_decay_style="WSD")
    """WSD: length of the final decay. Default: a tenth of the decay iterations."""
    weight_decay: float = 0.1
    """Weight decay, decoupled with Adam, added to the gradient with sgd; never on biases and norms (one dimension)."""
    adam_beta1: float = only_with(0.9, optimizer=("adam", "apex-adam", "muon"))
    """Decay rate of Adam's first moment."""
    adam_beta2: float = only_with(0.95, optimizer=("adam", "apex-adam", "muon"))
    """Decay rate of Adam's second moment."""
    adam_eps: float = only_with(1e-8, optimizer=("adam", "apex-adam", "muon"))
    """Added to Adam's denominator."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp8"] = only_with("fp32", optimizer="adam")
    """Storage of Adam's first moment. Below fp32 it is rounded stochastically. fp8 has a scale per 128 elements of a
    row. Biases and norms stay in fp32."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp8"] = only_with("fp32", optimizer="adam")
    """Storage of Adam's second moment, in the same way; fp8 stores its square root."""
    sgd_momentum: float = only_with(0.0, optimizer="sgd")
    """Momentum of --optimizer sgd."""
    optimizer_cpu_offload: bool = only_with(False, optimizer="adam")
    """Keep Adam's moments in host memory and compute its steps there. Gradients are copied out during the last backward
    pass, new weights back while other parameters are updated."""
    muon_momentum: float = only_with(0.95, optimizer="muon")
    """Decay rate of Muon's momentum."""
    muon_use_nesterov: bool = only_with(True, optimizer="muon")
    """Nesterov's momentum in Muon; --no-muon-use-nesterov takes the plain one."""
    muon_num_ns_steps: int = only_with(5, optimizer="muon")
    """Newton-Schulz steps of Muon's orthogonalization."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = only_with("spectral", optimizer="muon")
    """Scale of Muon's update of an (out, in) matrix, times --muon-extra-scale-factor. spectral: sqrt(max(out, in));
    unit_rms_norm: sqrt(out / in); shape_scaling: sqrt(max(1, out / in))."""
    muon_extra_scale_factor: float = only_with(0.2, optimizer="muon")
    """Extra factor of Muon's update, see --muon-scale-mode. With spectral, 0.2 makes updates as large as AdamW's, so
    its learning rate fits."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0 switches clipping off."""


@dataclass
class TrainingConfig:
    """Length of the run, evaluation, what ends it and how it is observed."""

    train_iters: int | None = None
    """Optimizer steps to train for. One of --train-iters and --train-samples is needed."""
    train_samples: int | None = None
    """Samples to train for, instead of --train-iters (rounded up to whole steps)."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    eval_interval: int | None = None
    """Evaluate on the validation split every so many iterations, and at the end. Default: never."""
    eval_iters: int = only_with(10, eval_interval=GIVEN, test_data_path=GIVEN)
    """Global batches per evaluation."""
    exit_interval: int | None = None
    """Save and stop after an iteration that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and stop once the run has lasted this long."""
    max_skipped_steps: int = 10
    """Steps with a NaN or infinite loss or gradient norm are skipped. This many in a row end the run."""
    deterministic_mode: bool = False
    """Use only deterministic algorithms; an operation that has none is an error."""
    profile: bool = False
    """Record a torch profiler trace and a memory snapshot into --log-dir."""
    profile_step_start: int = only_with(3, profile=True, trace_pipeline=True)
    """First iteration of --profile, and the one of --trace-pipeline. If a resume is past it, the first iteration of
    that run."""
    profile_step_end: int = only_with(5, profile=True)
    """Iteration before which --profile stops."""
    trace_pipeline: bool = False
    """Write a Chrome trace of the pipeline's actions in iteration --profile-step-start to
    <log-dir>/pipeline_trace.json; tools/plot_pipeline.py draws it."""
    dry_run: bool = False
    """Print the resolved settings, the mesh, parameters per rank and a memory estimate, then exit."""
    suggest: float | None = only_with(None, dry_run=True)
    """With --dry-run: also print which memory-saving flags make the run fit into this many GiB per device, the cheapest
    first."""
    train_epochs: int | None = None
    """Passes over the training samples, instead of --train-iters and --train-samples."""


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = None
    """Folder that checkpoints are saved under, or a URL such as s3://bucket/run. One job at a time may use it."""
    load: str | None = None
    """Folder to resume from: its newest checkpoint that is whole, or that one checkpoint. auto: what --save holds, or a
    fresh start when it holds nothing. A Hugging Face folder gives the architecture and the weights."""
    save_interval: int | None = None
    """Save every so many iterations. The end of a run is saved in any case."""
    save_mtbf_hours: float | None = None
    """In place of --save-interval: mean time between failures. A checkpoint is saved every sqrt(2 x measured cost of a
    save x this) (Young). The first save is after the first iteration, to measure the cost."""
    async_save: bool = False
    """Write checkpoints in the background. Training stops only while the state is copied to host memory, which needs
    room for one copy."""
    ckpt_step: int | None = None
    """Load this iteration of --load, not the newest one."""
    finetune: bool = False
    """Take only the weights from --load and start at iteration 0."""
    load_optim: bool = True
    """Load the optimizer too; --no-load-optim takes only weights and counters from --load and starts a new
    optimizer."""
    exit_on_missing_checkpoint: bool = only_with(True, load=GIVEN)
    """End with an error when --load has no checkpoint; --no-exit-on-missing-checkpoint starts from scratch instead."""
    keep_last_k: int | None = None
    """Keep only this many newest checkpoints (at least 2), and those of --save-retain-interval and --keep-best-k.
    Default: 2 if one of those is given, else all are kept."""
    save_retain_interval: int | None = None
    """Also keep checkpoints whose iteration is a multiple of this."""
    keep_best_k: int | None = None
    """Also keep this many checkpoints with the lowest validation loss. Needs --eval-interval."""
    resume: bool = False
    """Continue from the newest checkpoint in --save if there is one. The same command line then works for every
    restart."""


@dataclass
class LoggingConfig:
    """Logs, metrics and where they go."""

    log_dir: str = "runs/pretrain"
    """Folder of metrics.jsonl, starts.jsonl (settings, command, versions and commit of every start), status.json,
    TensorBoard events and profiles. tools/report.py makes a page of it."""
    log_interval: int = 10
    """Iterations between log lines and records."""
    log_format: Literal["short", "megatron"] = "short"
    """Log line of an iteration. short: at most 200 characters, with epoch and remaining time; megatron: Megatron's
    format, for scripts that parse it. metrics.jsonl has everything in both cases."""
    tensorboard: bool = True
    """Write TensorBoard events to <log-dir>/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (wandb must be installed)."""
    wandb_exp_name: str | None = only_with(None, wandb_project=GIVEN)
    """Name of the Weights & Biases run."""
    mlflow_experiment: str | None = None
    """Also log to this experiment of MLflow, settings as its parameters (mlflow or mlflow-skinny must be installed)."""
    mlflow_run_name: str | None = only_with(None, mlflow_experiment=GIVEN)
    """Name of the run in MLflow."""
    mlflow_tracking_uri: str | None = only_with(None, mlflow_experiment=GIVEN)
    """MLflow server, or file:PATH for a folder. Default: the environment variable MLFLOW_TRACKING_URI."""
    progress_bar: bool = True
    """Show a progress bar on rank 0's stderr."""
    status_file: str | None = None
    """File with the state of the run: running, then done, requeue, failed or bad_config. If it says running and the
    process is gone, the process was killed. Default: <log-dir>/status.json (not written by a run that never
    started)."""


@dataclass
class Config:
    """The whole tree. A fine-tuning run has an ``objective``, and adapters if its ``lora`` asks for them; a pretraining
    run has neither group."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig | None = None
    objective: ObjectiveConfig | None = None
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        lora = self.lora
        return lora is not None and (lora.lora_rank is not None or lora.load_adapter is not None)

    @property
    def has_pairs(self) -> bool:
        """Whether a sample is a pair of answers."""
        return self.objective is not None and self.objective.objective in ("dpo", "orpo", "reward")

    @property
    def has_scores(self) -> bool:
        """Whether a reward model is trained."""
        return self.objective is not None and self.objective.objective == "reward"

    @property
    def has_labels(self) -> bool:
        """Whether a sample is an answer that is desirable or not."""
        return self.objective is not None and self.objective.objective == "kto"

    @property
    def judges_answers(self) -> bool:
        """Whether the loss is one of whole answers, no cross-entropy of tokens."""
        return self.has_pairs or self.has_labels

    @property
    def resume_from(self) -> str | None:
        """Where the state of a run comes from, as --load of pretraining says it. A fine-tuning run goes on from its own
        checkpoints or from none: what its --load names is not a state to resume but weights to begin with."""
        if self.objective is None:
            return self.checkpoint.load
        return "auto" if self.checkpoint.resume else None
