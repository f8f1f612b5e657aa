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
    """How positions enter the model. alibi: scores fall with the distance, by a slope of each head's own (BLOOM)."""
    position_embedding_offset: int = only_with(0, position_embedding_type="learned_absolute")
    """Row of the table of learned positions that the first token takes (2 in OPT, whose first rows are not used)."""
    rotary_base: float = only_with(10000.0, position_embedding_type="rope")
    """RoPE base frequency (theta)."""
    rotary_percent: float = only_with(1.0, position_embedding_type="rope")
    """Fraction of each head that RoPE rotates."""
    rotary_interleaved: bool = only_with(False, position_embedding_type="rope")
    """RoPE rotates channels 0 and 1, 2 and 3, ... (GLM-4, Cohere), not the two halves of a head."""
    no_rope_freq: str | None = only_with(None, position_embedding_type="rope")
    """Layers without RoPE: n for every n-th, from the n-th on, or Megatron's list of a 1 for each layer without and a 0
    for each with it (SmolLM3: 4). Default: none."""
    attn_temperature_tuning: bool = only_with(False, no_rope_freq=GIVEN)
    """Queries of layers without RoPE grow with their position p: they are multiplied by
    1 + --attn-scale x ln(1 + floor((p + 1) / --floor-scale)) (Llama 4)."""
    attn_scale: float = only_with(0.1, attn_temperature_tuning=True)
    """See --attn-temperature-tuning."""
    floor_scale: int = only_with(8192, attn_temperature_tuning=True)
    """See --attn-temperature-tuning: tokens from one value to the next; before so many it is 1."""
    rotary_base_local: float | None = only_with(None, window_size=GIVEN)
    """RoPE base of the layers with a window, which also go without --use-rope-scaling (Gemma 3). Default: as in all
    others."""
    use_rope_scaling: bool = only_with(False, position_embedding_type="rope")
    """Scale RoPE's frequencies for sequences longer than the model was trained on, as --rope-scaling-type says."""
    rope_scaling_type: Literal["llama3", "linear", "yarn", "longrope"] = only_with("llama3", use_rope_scaling=True)
    """llama3: Llama 3.1's, which slows down low frequencies; linear: all frequencies alike (position interpolation);
    yarn: YaRN, which slows down low ones and makes attention sharper; longrope: each by a factor of its own (Phi-3)."""
    rope_scaling_factor: float = only_with(8.0, use_rope_scaling=True)
    """RoPE scaling: how much low frequencies are slowed down; with linear all of them."""
    rope_low_freq_factor: float = only_with(1.0, use_rope_scaling=True)
    """Llama 3.1 RoPE scaling: wavelengths above original length / this are scaled fully."""
    rope_high_freq_factor: float = only_with(4.0, use_rope_scaling=True)
    """Llama 3.1 RoPE scaling: wavelengths below original length / this are left alone."""
    rope_original_max_position: int = only_with(8192, use_rope_scaling=True)
    """Llama 3.1 RoPE scaling, YaRN and LongRoPE: context length before the scaling."""
    longrope_short_factor: Words | None = only_with(None, rope_scaling_type="longrope")  # noqa: RUF009 (text)
    """LongRoPE: how much each frequency is slowed down in sequences up to --rope-original-max-position, a number for
    each pair of rotated channels."""
    longrope_long_factor: Words | None = only_with(None, rope_scaling_type="longrope")  # noqa: RUF009 (text)
    """LongRoPE: the same in longer sequences."""
    longrope_attention_factor: float | None = only_with(None, rope_scaling_type="longrope")
    """LongRoPE: queries and keys are multiplied by this. Default: sqrt(1 + ln(s) / ln(o)), where o is
    --rope-original-max-position and s is --max-position-embeddings / o."""
    yarn_beta_fast: float = only_with(32.0, rope_scaling_type="yarn")
    """YaRN: frequencies that turn more often than this within the original context are left alone."""
    yarn_beta_slow: float = only_with(1.0, rope_scaling_type="yarn")
    """YaRN: frequencies that turn less often than this within the original context are scaled fully."""
    yarn_truncate: bool = only_with(True, rope_scaling_type="yarn")
    """YaRN: between the two, the ramp begins and ends at whole channels."""
    yarn_attention_factor: float | None = only_with(None, rope_scaling_type="yarn")
    """YaRN: queries and keys are multiplied by this. Default: 0.1 x ln(factor) + 1."""
    yarn_mscale: float | None = only_with(None, rope_scaling_type="yarn")
    """YaRN: instead, with --yarn-mscale-all-dim, the quotient of the default's values in which ln(factor) is multiplied
    by this and by that (DeepSeek). Default: not used."""
    yarn_mscale_all_dim: float | None = only_with(None, rope_scaling_type="yarn")
    """YaRN: see --yarn-mscale; with --multi-latent-attention scores are also multiplied by the square of the default's
    value in which ln(factor) is multiplied by this. Default: not used."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of normalization."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside a normalization."""
    apply_layernorm_1p: bool = False
    """A norm multiplies by 1 + its weight, which starts at 0 (Gemma)."""
    layernorm_bias: bool = only_with(True, normalization="LayerNorm")
    """Add a bias in a LayerNorm; --no-layernorm-bias leaves it out (Cohere)."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """pre: attention and MLP read normalized input; post: what they give is normalized before it is added (OLMo 2);
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
    """Keep --quick-geglu's gate below this, and its up projection within +- this. Default: as they are."""
    glu_linear_offset: float = only_with(0.0, quick_geglu=True)
    """Added to --quick-geglu's up projection (GPT-OSS: 1)."""
    relu: bool = only_with(False, swiglu=False)
    """ReLU in the plain MLP instead of GELU (OPT; needs --no-swiglu)."""
    squared_relu: bool = only_with(False, swiglu=False)
    """Squared ReLU in the plain MLP instead of GELU (needs --no-swiglu)."""
    tanh_gelu: bool = only_with(False, swiglu=False)
    """GPT-2's tanh approximation of GELU, in the plain MLP or with --geglu (needs --no-swiglu)."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output layer a matrix of its own; --no-untie-embeddings-and-output-weights shares the embedding's."""
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
    """Normalize queries, and keys, of all heads together instead of each head (OLMoE)."""
    qk_l2_norm: bool = only_with(False, position_embedding_type="rope")
    """In layers with RoPE divide each head's queries and keys by the root of their mean square, without a weight
    (Llama 4 Scout)."""
    multi_latent_attention: bool = False
    """Multi-head latent attention: keys and values of all heads are made of a few numbers per token (DeepSeek-V2).
    --qk-layernorm then normalizes these."""
    q_lora_rank: int | None = only_with(None, multi_latent_attention=True)
    """Numbers per token that queries are made of. Default: queries are projected at once."""
    kv_lora_rank: int = only_with(32, multi_latent_attention=True)
    """Numbers per token that keys and values are made of."""
    qk_head_dim: int = only_with(128, multi_latent_attention=True)
    """Channels of a head's query and key without RoPE."""
    qk_pos_emb_head_dim: int = only_with(64, multi_latent_attention=True)
    """Channels of a head's query, and of the one key that all heads share, with RoPE, in neighbouring pairs."""
    v_head_dim: int = only_with(128, multi_latent_attention=True)
    """Channels of a head's value."""
    window_size: int | None = None
    """Sliding-window attention: a token sees itself and the window_size - 1 tokens before it. Default: all of them."""
    window_attn_skip_freq: str | None = only_with(None, window_size=GIVEN)
    """Layers without the window: n for every n-th, from the n-th on (Gemma 2: 2, Gemma 3: 6), or Megatron's list of a 1
    for each layer with and a 0 for each without it. Default: none."""
    attention_chunk_size: int | None = only_with(None, position_embedding_type="rope")
    """Chunked attention: in layers with RoPE a token sees only those before it in its own chunk of so many tokens,
    counted from the beginning of its document (Llama 4: 8192). Default: all before it."""
    softmax_scale: float | None = None
    """Products of queries and keys are multiplied by this. Default: 1 / square root of --kv-channels."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable: each head has a learned score that takes part in every softmax and belongs to no key, an attention
    sink (GPT-OSS)."""
    attn_logit_softcapping: float | None = None
    """Keep attention's scores s within +-c, by c x tanh(s / c) (Gemma 2). They are materialised then. Default: as they
    are."""
    final_logit_softcapping: float | None = None
    """The same of the logits (Gemma 2)."""
    logit_scale: float = 1.0
    """Logits are multiplied by this (Cohere; Granite's is 1 / logits_scaling)."""
    embedding_multiplier: float = 1.0
    """The embedding is multiplied by this (Gemma: square root of --hidden-size; Granite)."""
    residual_multiplier: float = 1.0
    """What attention and MLP add to the residual stream is multiplied by this (Granite)."""
    num_experts: int | None = None
    """Mixture of experts: feed-forward networks of a layer, of which each token gets --moe-router-topk. Default: none,
    layers are dense."""
    moe_router_topk: int = only_with(2, num_experts=GIVEN)
    """Experts of a token."""
    moe_ffn_hidden_size: int | None = only_with(None, num_experts=GIVEN)
    """Width of one expert. Default: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = only_with(None, num_experts=GIVEN)
    """Width of a further MLP in each layer with experts, which every token gets. Default: none."""
    moe_layer_freq: str = only_with("1", num_experts=GIVEN)
    """Which layers have experts: n for every n-th, from the first on, or Megatron's list of a 1 for each layer with
    experts and a 0 for each dense one, such as [0]*1+[1]*3."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = only_with("softmax", num_experts=GIVEN)
    """What makes the weights of a token's experts of its logits. sigmoid: each logit's, divided by their sum over the
    token's experts (DeepSeek-V3)."""
    moe_router_pre_softmax: bool = only_with(False, num_experts=GIVEN)
    """Softmax over all experts, so that the weights of a token's sum to less than 1 (OLMoE, Qwen 2). Else over the
    token's experts alone (Mixtral, Qwen 3)."""
    moe_router_topk_scaling_factor: float | None = only_with(None, num_experts=GIVEN)
    """The weights are multiplied by this. Default: they are not."""
    moe_apply_probs_on_input: bool = only_with(False, num_experts=GIVEN)
    """Multiply what an expert reads by its weight, not what it gives (Llama 4). With --moe-router-topk 1."""
    moe_router_num_groups: int | None = only_with(None, num_experts=GIVEN)
    """Groups of neighbouring experts; a token's experts are of its --moe-router-group-topk best ones. Default: none."""
    moe_router_group_topk: int | None = only_with(None, moe_router_num_groups=GIVEN)
    """Groups that a token's experts are of; which are best, says --moe-router-group-score."""
    moe_router_group_score: Literal["sum", "max"] = only_with("sum", moe_router_num_groups=GIVEN)
    """What a group is worth. sum: of its topk / --moe-router-group-topk largest scores (DeepSeek-V3); max: its largest
    (DeepSeek-V2)."""
    moe_router_enable_expert_bias: bool = only_with(False, moe_router_score_function="sigmoid")
    """Add a bias to each expert's score when experts are chosen, not to their weights. After each step it grows for
    experts with fewer tokens than the mean and falls for the others: balance without a loss (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = only_with(1e-3, moe_router_enable_expert_bias=True)
    """How much the expert bias changes after a step. 0: it stays."""
    moe_shared_expert_gate: bool = only_with(False, moe_shared_expert_intermediate_size=GIVEN)
    """Multiply what the shared MLP gives by the sigmoid of one more logit of each token (Qwen 2)."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        only_with("aux_loss", num_experts=GIVEN)
    )
    """What loads are counted over in the loss of --moe-aux-loss-coeff. aux_loss: the micro-batches that the
    data-parallel processes compute at the same time; global_aux_loss: those and the step's before; seq_aux_loss: each
    sequence. none: there is no such loss; sinkhorn: nor then, choices are balanced over each sequence in training."""
    moe_aux_loss_coeff: float = only_with(0.0, num_experts=GIVEN)
    """Coefficient of the loss that keeps the experts' loads even (Switch), summed over layers; see
    --moe-router-load-balancing-type."""
    moe_z_loss_coeff: float | None = only_with(None, num_experts=GIVEN)
    """Coefficient of the loss that keeps the router's logits small (ST-MoE), summed over layers. Default: there is
    none."""
    moe_expert_capacity_factor: float | None = only_with(None, num_experts=GIVEN)
    """In training an expert takes at most this times its even share of a sequence's choices, rounded up; the others are
    dropped. Default: none is."""
    moe_token_drop_policy: Literal["probs", "position"] = only_with("probs", moe_expert_capacity_factor=GIVEN)
    """Which choices an expert takes then. probs: those with the largest weights; position: those of the first
    tokens."""
    moe_pad_expert_input_to_capacity: bool = only_with(False, moe_expert_capacity_factor=GIVEN)
    """Compute as many rows of each expert as it may take, so that the host waits for no numbers of rows."""
    mtp_num_layers: int | None = None
    """Layers behind the last, made as it is, that each predict one token more ahead, with the model's own embedding and
    output matrix (multi-token prediction, DeepSeek-V3). They train, and are left out of validation and generation.
    Default: none."""
    mtp_loss_scaling_factor: float = only_with(0.1, mtp_num_layers=GIVEN)
    """The mean of the losses of these layers is multiplied by this and added to the loss."""
    parallel_residual: bool = False
    """Attention and MLP read the same input and are added together (GPT-NeoX)."""
    parallel_residual_shared_norm: bool = only_with(False, parallel_residual=True)
    """They also read the same norm of it (Falcon 7B, Cohere)."""
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
    """Processes that share every matrix (TP)."""
    sequence_parallel: bool = only_with(False, noted=True, tensor_model_parallel_size=GIVEN)
    """Split norms, dropout and the residual stream over the TP processes along the tokens."""
    pipeline_model_parallel_size: int = 1
    """Groups of processes that hold consecutive layers and pass activations on to each other (PP)."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = None
    """Order of forward and backward passes. Default: interleaved with several stages per process, else 1f1b. zb-h1 and
    zb-v fill waiting time with weight gradients."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages per process. Default: 2 with interleaved and zb-v, else 1."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage in Megatron's notation, such as Et*3|(tt|)*14tL: E embedding, t a layer, L output layer and
    loss, | next stage. Default: balanced by cost."""
    pipeline_reshard: bool = False
    """Free gathered weights after every use by a micro-batch, not once per step: less memory, more communication."""
    context_parallel_size: int = 1
    """Processes that each hold a part of every sequence (CP): attention exchanges keys and values, or heads.
    --seq-length has to be divisible by twice this."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"] = "auto"
    """What attention exchanges between context-parallel processes. p2p: keys and values travel round a ring;
    all_gather: each process gets all of them; a2a: each gets some heads of all tokens; a2a+p2p: a2a within small groups
    and p2p between them. auto: by a cost model, which is printed."""
    hierarchical_context_parallel_sizes: Words | None = None
    """Two numbers for a2a+p2p: processes of an a2a group, and of a ring. Their product is --context-parallel-size."""
    expert_model_parallel_size: int = only_with(1, num_experts=GIVEN)
    """Processes over which the experts of each layer are spread (EP), neighbours among those that shard weights: it has
    to divide them (--hybrid-shard-degree x --context-parallel-size, and what --expert-tensor-parallel-size leaves of
    tensor parallelism) and --num-experts."""
    expert_tensor_parallel_size: int | None = only_with(None, num_experts=GIVEN)
    """Processes over which each expert's width is cut (ETP), neighbours among the tensor-parallel ones. Below
    --tensor-model-parallel-size, with --sequence-parallel, the others have other experts, or shards of them, and tokens
    go to them by all-to-all. Default: --tensor-model-parallel-size."""
    hybrid_shard_degree: int = 0
    """Processes over which hybrid FSDP shards weights, gradients and optimizer state, times --context-parallel-size.
    0: all data-parallel ones; 1: none (replicas only); n: groups of n, replicated."""
    data_parallel_sharding_strategy: Literal["optim_grads_params", "optim_grads", "optim"] = "optim_grads_params"
    """What is sharded over data-parallel processes between the micro-batches of a step. Without params, weights are
    gathered once per step; without grads, too, gradients are reduced once per step: more memory, less communication. A
    pipeline does both, see --pipeline-reshard."""
    data_parallel_collectives: Literal["auto", "flat", "hierarchical"] = "flat"
    """How weights are gathered and gradients summed over data-parallel processes. flat: as gloo and NCCL do;
    hierarchical: once over each node's uplink, then inside of nodes (CPUs only, where a node has several of the
    processes); auto: by predicted time for each size, from links measured at the start. The choice is printed. Sums are
    taken in another order than flat ones."""
    network_topology: str | None = only_with(
        None, data_parallel_collectives=("auto", "hierarchical"), zero_hpz_partition_size=GIVEN
    )
    """JSON file that says which processes are on one node, what links carry, or both. Default: hostnames say it, and
    auto measures links."""
    zero_quantized_weights: bool = only_with(False, data_parallel_collectives="hierarchical")
    """Round what gathers of weights send to int8, in blocks of 128 numbers with a scale (ZeRO++). Every process then
    computes with rounded weights; the weights that are trained and saved are exact. The relative error is logged."""
    zero_quantized_gradients: bool = only_with(False, data_parallel_collectives="hierarchical")
    """Round what reductions of gradients send between nodes to int8, in blocks of 128 numbers with a scale, after
    the sum within each node (ZeRO++). Sums over replicas stay exact. The relative error is logged."""
    zero_hpz_partition_size: int = only_with(1, data_parallel_sharding_strategy="optim_grads_params")
    """Neighbours on one node, among the processes that shard weights, that keep what a forward pass has gathered once
    more, cut over them; the backward pass gathers within them (ZeRO++): less traffic between nodes, more memory. Has to
    divide --hybrid-shard-degree x --context-parallel-size. 1: none."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradient reduction and optimizer stay in fp32. Without it all is fp32, on
    CUDA with matrix products in TF32."""
    fp8_format: Literal["hybrid", "e4m3", "e2m1"] | None = None
    """Compute the linear layers of blocks in FP8. hybrid: inputs and weights in e4m3, gradients in e5m2, which has more
    range; e4m3: all of them; e2m1: 4 bits, of --fp8-recipe nvfp4. What stays as it is is printed. Default: no FP8."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"] = only_with(
        "delayed", fp8_format=GIVEN
    )
    """Which numbers share a scale, a power of two. delayed: a tensor, by its maxima in past steps; tensorwise: a
    tensor of a micro-batch; rowwise: a token or a row of a weight, weight gradients are not in FP8; blockwise: 128
    numbers of a token, 128 x 128 of a weight; mxfp8: 32 numbers along the dimension that a product sums; nvfp4: 16
    numbers of a token, 16 x 16 of a weight, a scale in e4m3, weight gradients are not in it. All but tensorwise and
    nvfp4 do not depend on micro-batches."""
    fp8_amax_history_len: int = only_with(1024, fp8_recipe="delayed")
    """Delayed scaling: steps whose maxima count."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = only_with("max", fp8_recipe="delayed")
    """Delayed scaling: the scale is that of the largest maximum of these steps, or of the last step's."""
    fp8_emulate: bool = only_with(False, fp8_format=GIVEN)
    """Compute the same 8-bit numbers without tensor cores, on any device: products of what was rounded, in fp32. For
    tests and to try what FP8 does to a loss; it is slower than no FP8."""
    fp8_param_gather: bool = only_with(False, fp8_recipe=("delayed", "tensorwise"))
    """FP8: gather weights that are sharded over data-parallel processes as 8-bit numbers, 1 byte each. The result is
    the same, bit for bit."""
    first_last_layers_bf16: bool = only_with(False, fp8_format=GIVEN)
    """FP8: leave the first and the last layers as they are without it."""
    num_layers_at_start_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: how many first layers."""
    num_layers_at_end_in_bf16: int = only_with(1, first_last_layers_bf16=True)
    """FP8: how many last layers."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass. selective keeps matrix products, attention and communication
    results; full keeps only each block's input."""
    offload_activations: bool = False
    """Keep in the host's memory what blocks save for their backward pass: with --recompute-granularity full their
    inputs, with none all that their operations save. Copies run beside the computation and change no result."""
    activation_loading_horizon: int = only_with(2, offload_activations=True)
    """Blocks that have such activations on the device at most, at any moment. Those of the next backward passes come
    back ahead; with 1 each waits for its copy."""
    min_offloaded_tensor_size: int = only_with(1048576, offload_activations=True)
    """Elements from which on a saved tensor leaves the device, with --recompute-granularity none."""
    compile: bool = False
    """Compile each block with torch.compile."""
    kernels: Literal["auto", "torch", "triton", "cuda", "apex"] = "auto"
    """Implementation of cross-entropy, norms, SwiGLU and RoPE. auto: Triton on CUDA, where --compile does not fuse
    them, and PyTorch elsewhere. triton, cuda and apex: that one where it has the operation, else as auto. The choice is
    printed."""
    attention_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Backend of PyTorch's scaled dot-product attention. auto: the first that takes the model's attention, in an order
    that depends on the device. The choice is printed."""
    distributed_timeout_minutes: float = 10.0
    """A collective that waits longer ends the run; each waiting rank dumps its stack first."""


@dataclass
class DataConfig:
    """What is trained on."""

    data_path: Words | None = None
    """What to read: the prefix of a .bin/.idx pair (Megatron's indexed dataset), or a text file (.jsonl, .txt,
    .parquet, also .gz or .zst), which is tokenized first. Several are blended, by weights when each has a number before
    it (0.3 wiki 0.7 web), else by their sizes."""
    data_args_path: str | None = None
    """File that holds the words of --data-path."""
    train_data_path: Words | None = None
    """Training data, in the form of --data-path, when validation and test data are files of their own."""
    valid_data_path: Words | None = None
    """Validation data to --train-data-path."""
    test_data_path: Words | None = None
    """Test data to --train-data-path: evaluated once, at the end of the run."""
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
    """How text is cut before a tiktoken file's merges; such a file does not say it."""
    seq_length: int | None = None
    """Tokens per sample. Default: --max-position-embeddings, at most 8192."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel process."""
    global_batch_size: int | None = None
    """Samples per optimizer step. Default: micro batch x data-parallel processes (no accumulation)."""
    rampup_batch_size: Words | None = None
    """Three numbers: the batch to start with, what is added each time, and the samples over which it grows to
    --global-batch-size."""
    packing: Literal["stream", "best-fit", "off"] | None = "stream"
    """How documents become sequences. stream: laid end to end and cut every --seq-length tokens. best-fit: a document
    that fits is never cut; sequences are filled by best-fit decreasing and padded."""
    reset_attention_mask: bool = False
    """Tokens do not see other documents in their sequence."""
    reset_position_ids: bool = only_with(False, position_embedding_type=("rope", "learned_absolute"))
    """Positions begin at 0 with every document."""
    eod_mask_loss: bool = False
    """No loss where the last token of a document would have to predict the first one of the next."""
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
    """Print so many samples as the model would see them, trained tokens in colour (in a pipe: in ⟦ ⟧), and end."""


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
    """Linear layers that get an adapter: shell patterns with commas in between, of whole names or of their last part
    (query, key, value, output, gate, up, down). Experts by whole names only, as *.experts.*. Default: all of them but
    experts."""
    use_dora: bool = False
    """Adapters also train the norms of a weight's rows (DoRA), as peft's use_dora. Without --lora-dropout, and not on
    experts. --load-adapter brings it."""
    load_in_4bit: bool = False
    """Keep the frozen weights of linear layers in 4 bits, NF4 of bitsandbytes (QLoRA); embedding, output matrix and
    experts stay as they are. Needs adapters."""
    bnb_4bit_use_double_quant: bool = only_with(True, load_in_4bit=True)
    """Quantize the scales of 4-bit weights, too."""
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
    """How far the policy is held to the reference: scales the difference of log-ratios."""
    dpo_label_smoothing: float = only_with(0.0, dpo_loss_type="sigmoid")
    """Probability that a preference is the wrong way round, below 0.5 (conservative DPO)."""
    dpo_reference: Literal["adapters-off", "copy", "precomputed"] | None = only_with(None, objective=("dpo", "kto"))
    """Where log-probabilities of the reference come from: the model without its adapters, a frozen copy, or a table
    that is computed before training. Default: adapters-off with --lora-rank, else copy."""
    orpo_beta: float = only_with(0.1, objective="orpo")
    """Weight of the odds beside the cross-entropy (lambda in the paper)."""
    kto_beta: float = only_with(0.1, objective="kto")
    """How far the policy is held to the reference: scales log-ratios."""
    kto_desirable_weight: float = only_with(1.0, objective="kto")
    """Weight of the losses of desirable answers. The paper holds weight x number of both kinds within 1 to 4/3."""
    kto_undesirable_weight: float = only_with(1.0, objective="kto")
    """Weight of the losses of undesirable answers."""
    reward_center_coefficient: float = only_with(0.0, objective="reward")
    """Weight of the squared sum of a pair's scores, which keeps them around 0 (TRL's center_rewards_coefficient)."""


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and clipping."""

    optimizer: Literal["adam", "apex-adam", "sgd", "muon"] = "adam"
    """adam is torch's fused AdamW, apex-adam is apex's FusedAdam (must be installed). muon orthogonalizes the updates
    of the matrices of blocks; embeddings, the output matrix, norms and biases get AdamW beside it."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = only_with(0.0, lr_decay_style=("cosine", "linear", "WSD"))
    """Learning rate at the end of the decay."""
    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and of the output matrix, instead of --lr."""
    decoupled_min_lr: float | None = only_with(None, decoupled_lr=GIVEN)
    """Their learning rate at the end of the decay. Default: --min-lr."""
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
    """What Adam's first moment rests in; below fp32 it is rounded stochastically. fp8 has a scale for each 128 elements
    of a row. Of biases and norms it stays fp32."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp8"] = only_with("fp32", optimizer="adam")
    """The same of Adam's second moment, of which fp8 holds the square root."""
    sgd_momentum: float = only_with(0.0, optimizer="sgd")
    """Momentum of --optimizer sgd."""
    optimizer_cpu_offload: bool = only_with(False, optimizer="adam")
    """Keep Adam's moments in the host's memory and compute its steps there: gradients are copied out while the last
    backward pass runs, and new weights back while the steps of other parameters are computed."""
    muon_momentum: float = only_with(0.95, optimizer="muon")
    """Decay rate of Muon's momentum."""
    muon_use_nesterov: bool = only_with(True, optimizer="muon")
    """Nesterov's momentum in Muon; --no-muon-use-nesterov takes the plain one."""
    muon_num_ns_steps: int = only_with(5, optimizer="muon")
    """Newton-Schulz steps of Muon's orthogonalization."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = only_with("spectral", optimizer="muon")
    """What Muon's update of a matrix (out, in) is scaled by, times --muon-extra-scale-factor. spectral: sqrt(max(out,
    in)); unit_rms_norm: sqrt(out / in); shape_scaling: sqrt(max(1, out / in))."""
    muon_extra_scale_factor: float = only_with(0.2, optimizer="muon")
    """See --muon-scale-mode. With spectral, 0.2 makes updates as large as AdamW's, so that its learning rate fits."""
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
    """Initial weights, data order and dropout are functions of it."""
    eval_interval: int | None = None
    """Evaluate on the validation split every so many iterations, and at the end. Default: never."""
    eval_iters: int = only_with(10, eval_interval=GIVEN, test_data_path=GIVEN)
    """Global batches per evaluation."""
    exit_interval: int | None = None
    """Save and stop after an iteration that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and stop once the run has lasted this long."""
    max_skipped_steps: int = 10
    """Steps with a NaN or infinite loss or gradient norm are skipped; so many in a row end the run."""
    deterministic_mode: bool = False
    """Use only deterministic algorithms; an operation that has none is an error."""
    profile: bool = False
    """Record a torch profiler trace and a memory snapshot into --log-dir."""
    profile_step_start: int = only_with(3, profile=True, trace_pipeline=True)
    """First iteration that --profile records, and the one of --trace-pipeline; on a resume behind it the first of the
    run."""
    profile_step_end: int = only_with(5, profile=True)
    """Iteration before which --profile stops; it records this minus --profile-step-start of them."""
    trace_pipeline: bool = False
    """Write when each action of the pipeline ran in iteration --profile-step-start to <log-dir>/pipeline_trace.json, a
    Chrome trace that tools/plot_pipeline.py draws."""
    dry_run: bool = False
    """Print the resolved settings, the mesh, parameters per rank and a memory estimate, then exit."""
    suggest: float | None = only_with(None, dry_run=True)
    """Also print which flags that save memory make the run fit into so many GiB on each device, the cheapest first."""
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
    """Save by the clock instead: given the mean time between failures, every sqrt(2 x measured cost of a save x this)
    (Young). The first save is after the first iteration, to measure its cost."""
    async_save: bool = False
    """Write checkpoints in the background; training stops only while the state is copied to memory of the host, which
    needs as much of it again."""
    ckpt_step: int | None = None
    """Load this iteration of --load and not the newest one."""
    finetune: bool = False
    """Take only the weights from --load and start at iteration 0."""
    load_optim: bool = True
    """--no-load-optim takes weights and counters from --load, but starts the optimizer afresh."""
    exit_on_missing_checkpoint: bool = only_with(True, load=GIVEN)
    """It is an error when --load holds no checkpoint; --no-exit-on-missing-checkpoint then starts from nothing."""
    keep_last_k: int | None = None
    """Delete all but so many newest checkpoints (at least 2) and those that the next two settings keep. Default: with
    one of those 2, else all are kept."""
    save_retain_interval: int | None = None
    """Keep checkpoints whose iteration is a multiple of this."""
    keep_best_k: int | None = None
    """Keep so many checkpoints with the lowest validation loss. Needs --eval-interval, which measures it."""
    resume: bool = False
    """Go on from the newest checkpoint in --save if there is one. The same command line then survives restarts."""


@dataclass
class LoggingConfig:
    """Logs, metrics and where they go."""

    log_dir: str = "runs/pretrain"
    """Folder of metrics.jsonl, starts.jsonl (settings, command, versions and commit of every start), status.json,
    TensorBoard events and profiles. tools/report.py makes a page of it."""
    log_interval: int = 10
    """Iterations between log lines and records."""
    log_format: Literal["short", "megatron"] = "short"
    """Log line of an iteration. short: at most 200 characters, with the epoch and the time that is left; megatron:
    Megatron's, for scripts that parse it, then throughput and memory. metrics.jsonl holds all in any case."""
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
    """MLflow's server, or a folder as file:PATH. Default: what MLFLOW_TRACKING_URI says."""
    progress_bar: bool = True
    """Show a progress bar on rank 0's stderr."""
    status_file: str | None = None
    """File that says how the run is: running, then done, requeue, failed or bad_config. Still running although the
    process is gone means that it was killed. Default: <log-dir>/status.json, where a run that never started writes
    nothing."""


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
