"""Settings of the architecture. The rest of the tree is in ``smp.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smp.config.declare import GIVEN, Words, only_with


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
