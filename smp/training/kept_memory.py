"""Bytes that a block keeps for its backward pass, by formula. No torch; symbols as in :mod:`smp.training.memory`."""

from __future__ import annotations

from typing import Literal

from smp.config import Config, Layout
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

    Latent attention keeps besides what its up projections make, before heads are put together, and its latents, with
    their norms' results if these are not computed again.
    """
    model, length, tp = config.model, config.data.seq_length, layout.tp
    head_dim, groups, ffn = model.kv_channels, model.num_query_groups, model.ffn_hidden_size
    assert head_dim is not None and groups is not None and ffn is not None and length is not None, "resolved before"
    if experts:
        ffn = model.moe_shared_expert_intermediate_size or 0
    heads, f = model.num_attention_heads // tp, ffn // tp
    q, k = heads * head_dim, max(1, groups // tp) * head_dim
    split = tp if config.parallel.sequence_parallel else 1
    h_l = model.hidden_size // split
    if recompute == "full":
        return b * h_l
    if recompute == "selective":
        elements = 3 * h_l + 2 * q + 2 * k + (2 if model.gated else 1) * f
        per_position = b
        wide, results = 2 if model.gated else 1, 1 + 2 * (layout.ep > 1)
    else:
        mlp = (2 if fused and model.swiglu else 4) if model.gated else 2
        norms = 6 if model.norm_placement == "sandwich" else 4
        elements = norms * h_l + 2 * q + 2 * k + mlp * f + (q + k if model.qk_layernorm else 0)
        per_position = 4 + 1 + b
        wide, results = (3 if fused and model.swiglu else 4) if model.gated else 2, 2
    if experts:
        rows = results * model.hidden_size * layout.expert_tp // tp  # of the tokens of the ranks that share an expert
        elements += model.moe_router_topk * (rows + wide * (model.moe_ffn_hidden_size or 0) // tp)
    if model.multi_latent_attention:
        low = (model.kv_lora_rank + (model.q_lora_rank or 0)) // split
        up = heads * (2 * (model.qk_head_dim + model.v_head_dim) + model.qk_pos_emb_head_dim)
        elements += low + up if recompute == "selective" else 2 * low + up
    # auto may choose to exchange heads
    by_heads = layout.cp == 1 or config.parallel.cp_comm_type not in ("p2p", "all_gather")
    if not by_heads or (model.attention_dropout == 0 and not scores_flag(model)):
        return b * elements + heads * 4
    if model.attention_dropout == 0:
        per_position = 8 if model.attn_logit_softcapping is not None and recompute == "none" else 4
    return b * elements + heads * per_position * length
