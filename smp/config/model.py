"""Settings of the architecture. The rest of the tree is in ``smp.config.schema``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from smp.config.declare import GIVEN, Words, only_with


@dataclass
class ModelConfig:
    """Architecture. ``--model`` picks a named size; any flag given with it overrides that size."""

    model: str | None = None
    """Named size to start from, such as llama3-8b (--dry-run prints what it resolves to). Default: the values below."""
    model_implementation: Literal["auto", "smp", "transformers"] = "auto"
    """What computes the model of a Hugging Face folder or --model-config. smp: this project's decoder, with every
    parallelism and kernel; transformers: its own module, whatever its architecture is; auto: smp where the architecture
    is one of its families, else transformers. docs/any-model.md says what each has."""
    model_config: str | None = None
    """File config.json of Hugging Face's, or a folder with one, whose architecture is trained from random weights."""
    transformers_config: str | None = None
    """Content of the config.json of a model that transformers computes. No flag."""
    num_layers: int = 4
    """Number of transformer blocks."""
    layer_types: Words | None = None
    """Kind of each layer's mixer, such as attention: names in the order of layers, which repeat where they are fewer.
    A script can register more kinds. Default: attention in all layers."""
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
    rope_scaling_type: Literal["llama3", "linear", "yarn", "longrope", "dynamic"] = only_with(
        "llama3", use_rope_scaling=True
    )
    """llama3: slow down low frequencies (Llama 3.1); linear: all frequencies alike (position interpolation); yarn: slow
    down low frequencies and sharpen attention; longrope: each frequency by its own factor (Phi-3); dynamic: a larger
    base in each sequence longer than --rope-original-max-position, by its length (dynamic NTK)."""
    rope_scaling_factor: float = only_with(8.0, rope_scaling_type=("llama3", "linear", "yarn", "dynamic"))
    """RoPE scaling: how much low frequencies are slowed down; with linear all of them; with dynamic how fast the base
    grows."""
    rope_low_freq_factor: float = only_with(1.0, rope_scaling_type="llama3")
    """Llama 3.1 RoPE scaling: wavelengths above original length / this are scaled fully."""
    rope_high_freq_factor: float = only_with(4.0, rope_scaling_type="llama3")
    """Llama 3.1 RoPE scaling: wavelengths below original length / this are left alone."""
    rope_original_max_position: int = only_with(8192, rope_scaling_type=("llama3", "yarn", "longrope", "dynamic"))
    """Llama 3.1 RoPE scaling, YaRN, LongRoPE and dynamic NTK: context length before the scaling."""
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
    """Gated SiLU MLP with three matrices, also in experts, as all activations below; --no-swiglu is a plain MLP with
    GELU."""
    geglu: bool = only_with(False, swiglu=False)
    """Gated GELU MLP with three matrices (Gemma, with --tanh-gelu; needs --no-swiglu)."""
    quick_geglu: bool = only_with(False, swiglu=False)
    """Gated MLP with x sigmoid(1.702 x), three matrices (GPT-OSS; needs --no-swiglu)."""
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
    mlp_multipliers: Words | None = only_with(None, swiglu=True)  # noqa: RUF009 (text)
    """Two numbers that the MLP's gate, before SiLU, and the MLP's result are multiplied by (Falcon-H1). Default: 1
    each."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output layer its own matrix; --no-untie-embeddings-and-output-weights shares the embedding's."""
    scalar_head: bool = False
    """A row instead of the output matrix, whose product with a text's last token is its score: a reward model, which
    --objective reward makes. No flag."""
    disable_bias_linear: bool = True
    """No bias in linear layers; --no-disable-bias-linear adds them, also to experts and their router."""
    add_qkv_bias: bool = only_with(False, disable_bias_linear=True)
    """Bias on the query, key and value projections even when other biases are off (Qwen 2.5)."""
    add_attention_output_bias: bool = only_with(False, disable_bias_linear=True)
    """Bias on attention's output projection even when other biases are off (Hugging Face's attention_bias, with
    --add-qkv-bias)."""
    add_mlp_bias: bool = only_with(False, disable_bias_linear=True)
    """Bias on the projections of MLPs, also of experts and on their router, even when other biases are off (Hugging
    Face's mlp_bias)."""
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
    """Channels with RoPE in a head's query, and in the one key that all heads share; rotated in neighbouring pairs, or
    with --position-embedding-type none not at all (Kimi-Linear)."""
    v_head_dim: int = only_with(128, multi_latent_attention=True)
    """Channels of a head's value."""
    latent_norm_epsilon: float | None = only_with(None, multi_latent_attention=True)
    """Epsilon of --qk-layernorm's norms of latent vectors. Default: --norm-epsilon (Kimi-Linear, GLM-5: 1e-6)."""
    experimental_attention_variant: Literal["dsa"] | None = only_with(None, multi_latent_attention=True)
    """dsa: DeepSeek's sparse attention (V3.2, GLM-5): an indexer next to each layer of latent attention scores all
    keys, and a token sees those with the largest scores. Default: all keys."""
    dsa_indexer_n_heads: int = only_with(64, experimental_attention_variant="dsa")
    """Heads of the indexer's queries; its key is one for all."""
    dsa_indexer_head_dim: int = only_with(128, experimental_attention_variant="dsa")
    """Channels of a head of the indexer, of which the first --qk-pos-emb-head-dim have RoPE."""
    dsa_indexer_topk: int = only_with(2048, experimental_attention_variant="dsa")
    """Keys that a token sees. In shorter sequences attention is dense."""
    dsa_indexer_rope_interleaved: bool = only_with(False, experimental_attention_variant="dsa")
    """The indexer's RoPE rotates neighbouring pairs (GLM-5), instead of halves (DeepSeek-V3.2)."""
    dsa_indexer_loss_coeff: float = only_with(0.001, experimental_attention_variant="dsa")
    """Coefficient of the loss that trains the indexers, the divergence of their scores from attention's probabilities,
    a mean over tokens and a sum over layers; nothing else moves them. 0: they stay as they are."""
    dsa_indexer_use_sparse_loss: bool = only_with(False, experimental_attention_variant="dsa")
    """The indexers' loss is over the chosen keys (DeepSeek's sparse stage), instead of all keys."""
    dsa_indexer_warmup: bool = only_with(False, experimental_attention_variant="dsa")
    """DeepSeek's dense warm-up: tokens see all keys, and only the indexers train."""
    attention_output_gate: bool = False
    """Multiply attention's output by the sigmoid of one more projection of its input (Qwen3-Next)."""
    linear_attention_type: Literal["gated_delta_net", "kda", "mamba2"] | None = None
    """A linear recurrence instead of attention, in the layers of --linear-attention-freq. gated_delta_net: that of
    Qwen3-Next and Qwen 3.5; kda: Kimi delta attention, whose channels fade apart (Kimi-Linear); mamba2: Mamba-2 with an
    MLP after it (Granite 4). Default: all layers have attention."""
    linear_attention_freq: str | None = only_with(None, linear_attention_type=GIVEN)
    """Layers with the linear recurrence. n: all except every n-th, which keeps attention (Qwen3-Next: 4). Or Megatron's
    list, with 1 for a layer with the recurrence and 0 for one with attention. Default: all layers."""
    linear_conv_kernel_dim: int = only_with(4, linear_attention_type=GIVEN, hybrid_layer_pattern=GIVEN)
    """Tokens that the causal convolution in front of the recurrence sees, with the token itself."""
    linear_key_head_dim: int = only_with(128, linear_attention_type=("gated_delta_net", "kda"))
    """Channels of a query and of a key of the recurrence."""
    linear_value_head_dim: int = only_with(128, linear_attention_type=("gated_delta_net", "kda"))
    """Channels of a value of the recurrence; of kda as many as of a key."""
    linear_num_key_heads: int = only_with(16, linear_attention_type=("gated_delta_net", "kda"))
    """Heads of queries and keys of the recurrence; each serves as many heads of values, of kda one."""
    linear_num_value_heads: int = only_with(32, linear_attention_type=("gated_delta_net", "kda"))
    """Heads of values of the recurrence, each with a state of its own."""
    linear_allow_neg_eigval: bool = only_with(False, linear_attention_type="gated_delta_net")
    """Rates of writing up to 2 instead of 1, with which a state can also turn over what it knows (OLMo-hybrid)."""
    linear_norm_epsilon: float | None = only_with(None, linear_attention_type=("gated_delta_net", "kda"))
    """Epsilon of the norm of the recurrence's output. Default: --norm-epsilon (OLMo-hybrid: 1e-5)."""
    linear_norm_placement: Literal["pre", "post", "sandwich"] | None = only_with(None, linear_attention_type=GIVEN)
    """Where norms stand in layers with the recurrence. Default: --norm-placement (OLMo-hybrid: pre, beside post)."""
    linear_attention_parallel: bool = only_with(False, linear_attention_type=GIVEN)
    """Layers with the recurrence have attention, too: both read the same input, and their results are added
    (Falcon-H1)."""
    attention_out_multiplier: float = only_with(1.0, linear_attention_parallel=True)
    """In layers with both, attention's result is multiplied by this (Falcon-H1)."""
    ssm_out_multiplier: float = only_with(1.0, linear_attention_parallel=True)
    """In layers with both, the recurrence's result is multiplied by this (Falcon-H1)."""
    hybrid_layer_pattern: str | None = None
    """A letter for each layer, which is one part alone with one norm. M: Mamba-2; *: attention; -: MLP; E: experts
    (Nemotron-H). Default: a layer is attention, or what --linear-attention-type says, and an MLP or experts."""
    mamba_state_dim: int = only_with(128, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: a head's state has so many numbers for each channel of the head."""
    mamba_head_dim: int = only_with(64, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: channels of a head."""
    mamba_num_groups: int = only_with(8, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: groups of heads; those of a group read and write by the same keys (B and C), and share a norm."""
    mamba_num_heads: int | None = only_with(None, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: number of heads. Default: 2 x hidden size / --mamba-head-dim."""
    mamba_dt_min: float = only_with(0.0, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: a token's step (dt) is at least this."""
    mamba_dt_max: float | None = only_with(None, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: a token's step (dt) is at most this. Default: no limit."""
    mamba_rms_norm: bool = only_with(True, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)
    """Mamba-2: normalize the gated output; --no-mamba-rms-norm leaves the norm out (Falcon-H1)."""
    ssm_multipliers: Words | None = only_with(None, linear_attention_type="mamba2", hybrid_layer_pattern=GIVEN)  # noqa: RUF009 (text)
    """Mamba-2: five numbers that projections of the input are multiplied by: those of gates (z), values (x), keys (B),
    queries (C) and steps (dt) (Falcon-H1). Default: 1 each."""
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
    """Width of the shared expert, an MLP next to the routed experts that every token uses. Default: none."""
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
    def is_foreign(self) -> bool:
        """Whether transformers computes it: then the other settings only say how large it is."""
        return self.transformers_config is not None

    @property
    def sees_images(self) -> bool:
        """Whether transformers computes it and it has a part for images."""
        return self.transformers_config is not None and "vision_config" in json.loads(self.transformers_config)

    @property
    def reads_apart(self) -> bool:
        """Whether transformers computes it and it is an encoder, which reads a prompt, with a decoder for the
        answer."""
        content = json.loads(self.transformers_config or "{}")
        return bool(content.get("is_encoder_decoder"))

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def default_ffn(self) -> int:
        """Width of an MLP for which nothing is said. Megatron's rule: 8/3 keeps a three-matrix MLP the size of a
        two-matrix one; multiples of 64 fill tensor cores."""
        return max(64, 8 * self.hidden_size // 3 // 64 * 64) if self.gated else 4 * self.hidden_size

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that RoPE rotates; a part of one is cut off, as in transformers and Megatron."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        assert self.kv_channels is not None, "resolved before"
        return int(self.kv_channels * self.rotary_percent)
