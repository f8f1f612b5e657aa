"""Bytes that a block keeps for its backward pass, by formula. No torch; symbols as in :mod:`smp.training.memory`."""

from __future__ import annotations

from typing import Literal

from smp.config import Config, Layout, ModelConfig
from smp.config.layer_pattern import scores_flag


def is_fused(config: Config) -> bool:
    """Whether a GPU runs SwiGLU in a kernel of its own, which computes again what it could keep."""
    return config.parallel.kernels != "torch" and not config.parallel.compile


def kept_per_token(
    config: Config,
    layout: Layout,
    b: int,
    recompute: Literal["none", "selective", "full"],
    *,
    fused: bool,
    experts: bool = False,
) -> int:
    """Bytes per token that one block keeps for its backward pass on one of ``layout.tp`` processes.

    With h_l = h / tp under sequence parallelism, else h, and all other widths local:

    - none: input and output of both norms 4 h_l; query, key, value and output of attention 2 q + 2 k; MLP 2 f, with
      SwiGLU that is not ``fused`` 4 f (gate, up, SiLU, product); with qk-norm its inputs q + k, with norms before and
      behind 2 h_l more; log-sum-exp, 4 bytes per head, or with attention dropout per head and position the
      probabilities in fp32, the mask in one byte and the dropped probabilities in compute precision, and where scores
      are changed the probabilities, with a cap also the capped scores. Context parallelism that exchanges keys keeps
      no probabilities.
    - selective: input h_l; results of matrix products q + 2 k + (2 or 1) f + 2 h_l (the last after their reduction)
      and of attention q; log-sum-exp, or with attention dropout the scores in compute precision.
    - full: input h_l.

    A layer with experts keeps for each of a token's k experts of width e, instead of the MLP: its row and its result
    2 h, and 3 e or, not ``fused``, 4 e, without a gate 2 e; selective: the result, with expert parallelism once more
    for each of both ways, and 2 e, without a gate e. Loads are taken to be even. A shared expert is an MLP beside them.

    Latent attention keeps other things for its 2 q + 2 k, see :func:`_latent`.
    """
    model, length, tp = config.model, config.data.seq_length, layout.tp
    head_dim, groups, ffn = model.kv_channels, model.num_query_groups, model.ffn_hidden_size
    assert head_dim is not None and groups is not None and ffn is not None and length is not None, "resolved before"
    if experts:
        ffn = model.moe_shared_expert_intermediate_size or 0
    heads, f = model.num_attention_heads // tp, ffn // tp
    q, k = heads * head_dim, max(1, groups // tp) * head_dim
    heads_have_norms = model.qk_layernorm and not model.multi_latent_attention  # latents have them there
    split = tp if config.parallel.sequence_parallel else 1
    h_l = model.hidden_size // split
    if recompute == "full":
        return b * h_l
    if recompute == "selective":
        own = 2 if experts and not ffn else 3  # their results are counted with their rows
        elements = own * h_l + 2 * q + 2 * k + (2 if model.gated else 1) * f
        wide, results = 2 if model.gated else 1, 1 + 2 * (layout.ep > 1)
    else:
        mlp = (2 if fused and model.swiglu else 4) if model.gated else 2
        norms = 6 if model.norm_placement == "sandwich" else 4
        elements = norms * h_l + 2 * q + 2 * k + mlp * f + (q + k if heads_have_norms else 0)
        wide, results = (3 if fused and model.swiglu else 4) if model.gated else 2, 2
    if experts:
        rows = results * model.hidden_size * layout.expert_tp // tp  # of the tokens of the ranks that share an expert
        elements += model.moe_router_topk * (rows + wide * (model.moe_ffn_hidden_size or 0) // tp)
    if model.multi_latent_attention:
        elements += _latent(model, heads, split, recompute) - (2 * q + 2 * k)
    return b * elements + heads * (_per_position(config, layout, recompute, b) * length or 4)


def _per_position(config: Config, layout: Layout, recompute: str, b: int) -> int:
    """Bytes that attention keeps for each head and pair of positions: none, where a kernel does it."""
    model = config.model
    # auto may choose to exchange heads
    by_heads = layout.cp == 1 or config.parallel.cp_comm_type not in ("p2p", "all_gather")
    if not by_heads or (model.attention_dropout == 0 and not scores_flag(model)):
        return 0
    if model.attention_dropout == 0:
        return 8 if model.attn_logit_softcapping is not None and recompute == "none" else 4
    return b if recompute == "selective" else 4 + 1 + b


def replayed_per_token(config: Config, layout: Layout, b: int, *, fused: bool, experts: bool = False) -> int:
    """Bytes per token that a block's backward pass computes again: what it keeps without recompute, less what it keeps
    with it. Results that selective recompute keeps are let go of as the replay passes them, but for the block's output,
    which it does not reach."""
    model, tp, recompute = config.model, layout.tp, config.parallel.recompute_granularity
    whole, kept = (kept_per_token(config, layout, b, how, fused=fused, experts=experts) for how in ("none", recompute))
    reached = recompute != "selective" or experts
    return whole - kept + (0 if reached else b * model.hidden_size // (tp if config.parallel.sequence_parallel else 1))


def in_flight_per_token(config: Config, layout: Layout, b: int, *, experts: bool = False) -> int:
    """Bytes per token of gradients in a block's backward pass: h_l of its output, with sequence parallelism h of what
    it gathers, and of its wider half, 2 q + 2 k of attention or of the MLP 4 f (of the product, of gate and up, and the
    product once more), without a gate 2 f. With experts of each of a token's k the row h, or 3 e when the row of the
    result has gone."""
    model, tp, length = config.model, layout.tp, config.data.seq_length
    assert model.ffn_hidden_size is not None and model.kv_channels is not None and length is not None, "resolved before"
    split, wide = tp if config.parallel.sequence_parallel else 1, 4 if model.gated else 2
    heads, groups = model.num_attention_heads // tp, max(1, (model.num_query_groups or 1) // tp)
    width = model.kv_channels
    if model.multi_latent_attention:
        width, groups = max(model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim), heads
    mlp = wide * model.ffn_hidden_size // tp
    if experts:
        rows = model.hidden_size * layout.expert_tp // tp
        inner = (3 if model.gated else 2) * (model.moe_ffn_hidden_size or 0) // tp  # they keep the product
        each = max(rows, inner - rows)
        mlp = model.moe_router_topk * each + wide * (model.moe_shared_expert_intermediate_size or 0) // tp
    scores = heads * _per_position(config, layout, "none", b) * length
    around = model.hidden_size // split + (model.hidden_size if split > 1 else 0)
    return b * (around + max(mlp, 2 * (heads + groups) * width)) + scores


def _latent(model: ModelConfig, heads: int, split: int, recompute: str) -> int:
    """Elements per token of latent attention. Heads are filled up to one width: query, key, value and output, and where
    values are narrower the output once more without what filled it; latents, and their norms' results. selective: the
    results of attention and of the projections."""
    key = model.qk_head_dim + model.qk_pos_emb_head_dim
    width, low = max(key, model.v_head_dim), model.kv_lora_rank + (model.q_lora_rank or 0)
    if recompute == "selective":
        up = key + model.qk_head_dim + model.v_head_dim
        return heads * (width + up) + (low + model.qk_pos_emb_head_dim) // split
    narrow = model.v_head_dim if model.v_head_dim < width else 0
    return heads * (4 * width + narrow) + low * (2 if model.qk_layernorm else 1) // split
